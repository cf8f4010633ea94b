"""The account as the client gets it and as the ledger keeps it: contiguous, exact, with nothing unattributed."""

import pytest

from splittime.ledger.account_json import account_from_json
from splittime.ledger.stages import Stage

from .conftest import EOS, say


def check_timing(timing: dict) -> None:
    """The issue's promise: contiguous, from 0 to sealed - start."""
    end_ns = 0
    for stage in timing["stages"]:
        assert stage["begin_ns"] == end_ns
        end_ns = stage["end_ns"]
    assert end_ns == timing["sealed_ns"] - timing["start_ns"]


CASES = [
    ("whole", {}, {"X-Include-Timing": "1"}),
    ("stream", {"stream_options": {"include_timing": True}}, {}),
    ("stream", {"stream_options": {"include_timing": True, "include_usage": True}}, {}),
    ("stream", {}, {"X-Include-Timing": "1"}),
]


@pytest.mark.parametrize(("how", "more", "headers"), CASES)
@pytest.mark.parametrize("stop", [None, "lo w"])
def test_timing_adds_up_and_agrees_with_the_ledger(
    launch, how: str, more: dict, headers: dict, stop: str | None
) -> None:
    live = launch(say("hello world"))
    body = {"prompt": "abc", "max_tokens": 40, "stop": stop, **more}
    headers = {**headers, "X-Request-Id": "timed"}
    if how == "whole":
        timing = live.post("/v1/completions", body, headers)[2]["timing"]
    else:
        timing = live.events("/v1/completions", body, headers)[-2]["timing"]
    check_timing(timing)
    closed = live.get("/ledger/requests/timed")[2]
    assert closed["start_ns"] == timing["start_ns"]
    assert closed["end_ns"] >= timing["sealed_ns"]
    assert closed["stages"][:-1] == timing["stages"][:-1]
    assert timing["ttft_ns"] <= closed["ttft_ns"] if how == "whole" else timing["ttft_ns"] == closed["ttft_ns"]
    assert [s["stage"] for s in timing["stages"]] == [
        "receive", "admit", "tokenize", "admit", "handoff", "queue", "prefill", "decode", "deliver",
    ]  # fmt: skip


def test_each_choice_has_its_timing_and_the_last_one_is_at_the_top(launch) -> None:
    live = launch(lambda request: [*list(b"x" * (5 + 10 * (request.sampling.seed % 3))), 256])
    body = {"prompt": "a", "n": 3, "seed": 0, "max_tokens": 60}
    answer = live.post("/v1/completions", body, {"X-Include-Timing": "1"})[2]
    for choice in answer["choices"]:
        check_timing(choice["timing"])
    assert answer["timing"] == answer["choices"][2]["timing"]
    options = {"stream_options": {"include_timing": True}}
    events = live.events("/v1/completions", {**body, **options})
    timed = [c for event in events[:-1] for c in event["choices"] if c["finish_reason"]]
    assert len(timed) == 3
    for choice in timed:
        check_timing(choice["timing"])
    assert events[-2]["timing"]["stages"]
    assert "timing" not in events[-3]


def test_every_token_has_its_step_and_its_instants(launch) -> None:
    live = launch(say("hello"))
    for stream in (True, False):
        live.post("/v1/completions", {"prompt": "x", "stream": stream})
    for account in live.ledger.accounts():
        account.verify()
        assert account.output_tokens == len(account.token_steps) == 6
        assert len(account.token_ready_ns) == len(account.token_written_ns) == 6
        assert all(r <= w for r, w in zip(account.token_ready_ns, account.token_written_ns, strict=True))
        assert account.token_written_ns[-1] <= account.end_ns
        assert all(interval.stage is not Stage.UNATTRIBUTED for interval in account.intervals)
    streamed, whole = live.ledger.accounts()
    assert (streamed.first_chunk_tokens, whole.first_chunk_tokens) == (1, 6)


def test_without_being_asked_an_answer_says_nothing_of_time(launch) -> None:
    live = launch(say("hello"))
    assert "timing" not in live.post("/v1/completions", {"prompt": "x"})[2]
    assert all("timing" not in event for event in live.events("/v1/completions", {"prompt": "x"})[:-1])


def test_ledger_pages(launch) -> None:
    live = launch(say("hello"))
    for _ in range(5):
        live.post("/v1/completions", {"prompt": "x"})
    assert len(live.get("/ledger/requests?limit=3")[2]["accounts"]) == 3
    assert live.get("/ledger/requests?slower_than_ms=60000")[2]["accounts"] == []
    assert live.get("/ledger/steps")[2] == {"steps": []}
    trace = live.get("/ledger/trace.json")[2]
    assert any(event["name"] == "prefill" for event in trace["traceEvents"])


def test_a_long_prompt_is_tokenised_beside_the_loop(launch) -> None:
    live = launch(say("x"), model={"max_model_len": 200_000}, prefill_chunk=10**6)
    assert live.post("/v1/completions", {"prompt": "word " * 20_000})[0] == 200
    assert live.ledger.accounts()[-1].prompt_tokens == 100_000


def test_lag_and_counts_reach_the_metrics(launch) -> None:
    live = launch(say("hello"))
    live.events("/v1/completions", {"prompt": "x"})
    text = live.get("/metrics")[2].decode()
    assert "splittime_send_lag_seconds_count 6.0" in text
    assert 'splittime_requests_total{finish_reason="stop"} 1.0' in text


def test_what_vllm_counts_of_a_prompt_is_counted_once_for_each(launch) -> None:
    live = launch(lambda request: [65] * len(request.prompt_token_ids) + [EOS], model={"max_model_len": 50})
    live.post("/v1/completions", {"prompt": ["xx", "yyyy"], "n": 3, "max_tokens": 20})
    live.post("/v1/completions", {"prompt": "x", "n": 0})
    text = live.get("/metrics")[2].decode()
    labels = 'model_name="fake",engine="0"'
    for name, count, total in (
        ("request_params_n", 2, 6),
        ("request_params_max_tokens", 6, 120),
        ("request_max_num_generation_tokens", 2, 3 + 5),
        ("request_generation_tokens", 6, 3 * (3 + 5)),
    ):
        assert f"vllm:{name}_count{{{labels}}} {count}.0\n" in text
        assert f"vllm:{name}_sum{{{labels}}} {total}.0\n" in text


def test_how_long_a_template_took_is_a_part_of_tokenising(launch) -> None:
    live = launch(say("x"))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "hi", "max_tokens": 1})):
        name = live.post(f"/v1/{path}", body)[1]["x-request-id"]
        account = live.get(f"/ledger/requests/{name}")[2]
        took_ns = sum(s["end_ns"] - s["begin_ns"] for s in account["stages"] if s["stage"] == "tokenize")
        assert 0 <= account["render_ns"] <= took_ns
        assert (account["render_ns"] > 0) is (path == "chat/completions")
        assert account_from_json(account).render_ns == account["render_ns"]
