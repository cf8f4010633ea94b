"""What the two generation endpoints answer: OpenAI's forms, whole and streamed, saying the same."""

import json

import pytest

from splittime.core.engine import EngineStats
from splittime.server import prompts

from .conftest import EOS, LiveServer, say

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def joined(events: list, chat: bool = False) -> str:
    choices = [c for event in events[:-1] for c in event["choices"]]
    return "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)


def test_a_completion_is_whole_and_counts_its_tokens(launch) -> None:
    live: LiveServer = launch(say("hello wörld"), cached_tokens=2)
    status, headers, body = live.post("/v1/completions", {"prompt": "abc", "max_tokens": 50})
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "hello wörld", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "queue;dur=" in headers["server-timing"]
    assert body["id"] == "cmpl-" + headers["x-request-id"]


def test_a_completion_gets_16_tokens_by_default_and_a_chat_the_rest_of_the_context(launch) -> None:
    live = launch(say("x" * 100, end=False), model={"max_model_len": 64})
    assert live.post("/v1/completions", {"prompt": "abc"})[2]["usage"]["completion_tokens"] == 16
    usage = live.post("/v1/chat/completions", CHAT)[2]["usage"]
    assert usage["total_tokens"] == 64


ADVICE = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 12}


def asked(server) -> dict:
    sampling = server.engine.submitted[-1].sampling
    return {name: getattr(sampling, name) for name in ADVICE}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_model_s_makers_advise_applies_where_a_request_says_nothing(launch, path: str) -> None:
    server = launch(model={"default_sampling": ADVICE})
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    assert server.post(path, body)[0] == 200
    assert asked(server) == ADVICE
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 30}
    assert server.post(path, {**body, **said})[0] == 200
    assert asked(server) == said
    server.post(path, {**body, "top_k": -1, "temperature": None})
    assert asked(server) == {**ADVICE, "top_k": 0}


def test_advice_of_more_tokens_than_there_is_room_for_is_cut(launch) -> None:
    server = launch(model={"default_sampling": {"max_tokens": 10_000}, "max_model_len": 300})
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})[0] == 200
    assert 16 < server.engine.submitted[-1].sampling.max_tokens < 300
    server.post("/v1/completions", {"prompt": "a"})
    assert server.engine.submitted[-1].sampling.max_tokens == 16


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_what_the_whole_answer_says(launch, chat: bool) -> None:
    live = launch(say("héllo 木 wörld"))
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", {"prompt": "x"})
    body = {**body, "max_tokens": 60, "stream_options": {"include_usage": True}}
    events = live.events(path, body)
    assert joined(events, chat) == "héllo 木 wörld"
    assert events[-1] == "[DONE]"
    assert [c["finish_reason"] for e in events[:-1] for c in e["choices"]].count("stop") == 1
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 18
    assert all(event["usage"] is None for event in events[:-2])
    if chat:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def counted(events: list, index: int) -> list[int]:
    """The output tokens that the chunks of one choice tell, in their order."""
    chunks = [e for e in events[:-1] if e["choices"] and e["choices"][0]["index"] == index]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in (c["usage"] for c in chunks))
    return [chunk["usage"]["completion_tokens"] for chunk in chunks]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_each_chunk_counts_the_tokens_so_far_and_the_last_ones_are_the_sum(launch, chat: bool, more: dict) -> None:
    live = launch(lambda request: [*list("héllo".encode()[request.sampling.seed :]), EOS], cached_tokens=1)
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", {"prompt": ["ab", "c"]})
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**body, **more, "n": 2, "seed": 0, "max_tokens": 60, "stream_options": options}
    events = live.events(path, body)
    choices = range(2 if chat else 4)
    told = [counted(events, index) for index in choices]
    assert all(counts == sorted(counts) for counts in told)
    assert [counts[-1] for counts in told] == [7 - index % 2 for index in choices]
    assert not chat or {counts[0] for counts in told} == {0}
    whole = events[-2]
    assert whole["choices"] == []
    assert whole["usage"]["completion_tokens"] == sum(counts[-1] for counts in told)
    assert whole["usage"] == live.post(path, {k: v for k, v in body.items() if k != "stream_options"})[2]["usage"]


def test_tokens_so_far_without_the_chunk_at_the_end(launch) -> None:
    live = launch(say("abc"))
    events = live.events("/v1/completions", {"prompt": "xy", "stream_options": {"continuous_usage_stats": True}})
    assert counted(events, 0)[-1] == 4
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {2}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_tokens_so_far_of_a_prompt_that_is_only_echoed(launch) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "stream_options": {"continuous_usage_stats": True}}
    events = launch(say("zzz")).events("/v1/completions", body)
    assert counted(events, 0)[-1] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_is_cut_and_ends_it_in_the_engine(launch, stream: bool) -> None:
    live = launch(say("one two three four five"))
    body = {"prompt": "x", "max_tokens": 60, "stop": ["zzz", "wo thr"]}
    if stream:
        events = live.events("/v1/completions", body)
        assert joined(events) == "one t"
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = live.post("/v1/completions", body)[2]["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one t", "stop")
    assert len(live.engine.aborts) == 1
    account = live.ledger.accounts()[-1]
    account.verify()
    assert account.finish_reason == "stop"
    assert account.intervals[-1].begin_ns == account.token_ready_ns[-1]


def test_text_that_only_looked_like_a_stop_string_is_given_out_at_the_end(launch) -> None:
    live = launch(say("abab"))
    assert joined(live.events("/v1/completions", {"prompt": "x", "stop": "ababc"})) == "abab"


def test_an_id_may_be_used_again_right_after_a_stop_string(launch) -> None:
    live = launch(say("abcdef"), step_s=0.02)
    for _ in range(4):
        headers = {"X-Request-Id": "again"}
        assert live.post("/v1/completions", {"prompt": "x", "stop": "c"}, headers)[0] == 200


def test_a_stop_id_ends_it_without_its_text(launch) -> None:
    live = launch(say("abcdef"))
    body = {"prompt": "x", "stop_token_ids": [ord("d")], "return_token_ids": True}
    choice = live.post("/v1/completions", body)[2]["choices"][0]
    assert choice["text"] == "abc"
    assert choice["token_ids"] == list(b"abcd")
    assert choice["prompt_token_ids"] == [ord("x")]


def test_ignore_eos_and_min_tokens_reach_the_engine(launch) -> None:
    live = launch(say("ab"))
    body = {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "min_tokens": 4, "top_k": -1, "min_p": 0.1}
    assert live.post("/v1/completions", body)[2]["choices"][0]["text"] == "ababab"
    sampling = live.engine.submitted[0].sampling
    assert (sampling.min_tokens, sampling.top_k, sampling.min_p, sampling.ignore_eos) == (4, 0, 0.1, True)


def test_n_answers_have_seeds_of_their_own_and_one_id(launch) -> None:
    live = launch(say("abc"))
    status, _, body = live.post("/v1/completions", {"prompt": ["x", "yy"], "n": 3, "seed": 7}, {"X-Request-Id": "g"})
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [r.sampling.seed for r in live.engine.submitted] == [7, 8, 9, 7, 8, 9]
    assert [r.request_id for r in live.engine.submitted] == [f"g-{i}" for i in range(6)]
    assert body["usage"]["prompt_tokens"] == 3
    account = live.get("/ledger/requests/cmpl-g")[2]
    assert len(account["choices"]) == 6


def test_without_a_seed_each_request_draws_its_own(launch) -> None:
    live = launch(say("abc"))
    for _ in range(3):
        live.post("/v1/completions", {"prompt": "x"})
    assert len({r.sampling.seed for r in live.engine.submitted}) == 3


def test_streamed_choices_are_told_apart(launch) -> None:
    live = launch(lambda request: [*list(b"abcdef"[request.sampling.seed :]), EOS])
    events = live.events("/v1/completions", {"prompt": "x", "n": 3, "seed": 0})
    texts = dict.fromkeys(range(3), "")
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abcdef", 1: "bcdef", 2: "cdef"}


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])],
)
def test_prompts_come_in_four_forms(launch, prompt: object, ids: list) -> None:
    live = launch(say("x"))
    assert live.post("/v1/completions", {"prompt": prompt})[0] == 200
    assert [list(r.prompt_token_ids) for r in live.engine.submitted] == ids


def test_a_chat_prompt_is_rendered_by_the_template(launch) -> None:
    live = launch(say("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert bytes(live.engine.submitted[0].prompt_token_ids) == b"<|user|>a\nb\n<|assistant|>"


def test_completion_logprobs_and_echo(launch) -> None:
    live = launch(say("hé", end=False))
    body = {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 2}
    choice = live.post("/v1/completions", body)[2]["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abhé"
    assert logprobs["tokens"] == ["a", "b", "h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [None, -1.0, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:3] == [None, {"b": -1.0, "\x01": -1.5}, {"h": -0.5, "i": -1.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 3]


def test_echo_alone_generates_nothing_to_show(launch) -> None:
    live = launch(say("zzz"))
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    answer = live.post("/v1/completions", body)[2]
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0
    events = live.events("/v1/completions", body)
    assert joined(events) == "abc"


def test_an_answer_that_is_no_stream_has_a_bounded_number_of_logprobs(launch, monkeypatch) -> None:
    """It is kept until its end: 128 answers of 30,000 tokens with 20 others each were 8 GB."""
    monkeypatch.setattr(prompts, "MOST_LOGPROBS", 100)
    live, body = launch(say("a" * 50, end=False)), {"prompt": "b" * 30, "n": 2, "max_tokens": 50, "logprobs": 4}
    _, headers, answer = live.post("/v1/completions", body)
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [10, 10]
    assert "max_tokens was clamped to 10" in headers["x-splittime-notice"]
    assert joined(live.events("/v1/completions", body)) == "a" * 100
    assert len(live.post("/v1/completions", {**body, "max_tokens": 10})[2]["choices"][0]["text"]) == 10
    status, _, answer = live.post("/v1/completions", {**body, "echo": True})
    assert (status, answer["error"]["param"], answer["error"]["limit"]) == (400, "logprobs", 100)
    assert live.post("/v1/completions", {**body, "echo": True, "stream": True})[0] == 400
    told = joined(live.events("/v1/completions", {**body, "echo": True, "prompt": "bbbb"}))
    assert (told.count("b"), told.count("a")) == (8, 100)
    once, echoed = {"n": 1, "prompt": "b" * 12}, {"echo": True, "stream": True}  # room for 20 tokens of all prompts
    assert [live.post("/v1/completions", body | once | echoed | {"n": n})[0] for n in (1, 2)] == [200, 400]
    strict = launch(say("a" * 50, end=False), config={"strict": True})
    assert [strict.post("/v1/completions", {**body, "max_tokens": most})[0] for most in (10, 11)] == [200, 400]


def test_chat_logprobs_have_bytes(launch) -> None:
    live = launch(say("h木", end=False))
    body = {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    content = live.post("/v1/chat/completions", body)[2]["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "h"
    assert content[0]["bytes"] == [104]
    assert len(content[0]["top_logprobs"]) == 2
    assert content[1]["bytes"] == ["木".encode()[0]]
    streamed = live.events("/v1/chat/completions", body)
    entries = [
        e for event in streamed[:-1] for c in event["choices"] for e in (c["logprobs"] or {"content": []})["content"]
    ]
    assert entries == content


def test_streamed_token_ids_add_up(launch) -> None:
    live = launch(say("木木"))
    events = live.events("/v1/completions", {"prompt": "x", "return_token_ids": True})
    ids = [i for event in events[:-1] for choice in event["choices"] for i in choice["token_ids"]]
    assert ids == [*"木木".encode(), EOS]
    assert events[0]["choices"][0]["prompt_token_ids"] == [ord("x")]


def test_salt_priority_and_deadline_reach_the_engine(launch) -> None:
    live = launch(say("x"))
    headers = {"X-Request-Deadline-Ms": "60000", "X-Request-Id": "req:1._-A"}
    live.post("/v1/completions", {"prompt": "x", "cache_salt": "me", "priority": -3}, headers)
    request = live.engine.submitted[0]
    assert (request.cache_salt, request.priority, request.request_id) == ("me", -3, "req:1._-A")
    account = live.ledger.accounts()[-1]
    assert request.deadline_ns == account.start_ns + 60_000_000_000


def test_the_load_report_is_given_on_request(launch) -> None:
    live = launch(say("x"))
    live.engine.stats = lambda: EngineStats(now_ns=1, num_waiting=3, num_running=2, blocks_used=1, blocks_total=4)
    asked = {form: _report(live, form) for form in ("JSON", "text", "BIN")}
    named = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3, "num_requests_running": 2}
    kind, _, body = asked["JSON"].partition(" ")
    assert (kind, json.loads(body)) == ("JSON", {"named_metrics": named})
    told = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    assert asked["text"] == f"TEXT {told}"
    assert asked["BIN"] is None


def _report(live, form):
    headers = live.post("/v1/completions", {"prompt": "x"}, {"endpoint-load-metrics-format": form})[1]
    return headers["endpoint-load-metrics"]


def test_models_tokens_and_index(launch) -> None:
    live = launch(say("x"), model={"names": ("main", "alias")})
    assert [m["id"] for m in live.get("/v1/models")[2]["data"]] == ["main", "alias"]
    assert live.get("/v1/models/alias")[2]["id"] == "alias"
    assert live.get("/v1/models/other")[0] == 404
    answer = live.post("/tokenize", {"prompt": "hé", "return_token_strs": True})[2]
    assert answer["tokens"] == list("hé".encode())
    assert answer["count"] == 3
    assert len(answer["token_strs"]) == 3
    assert live.post("/detokenize", {"tokens": answer["tokens"]})[2] == {"prompt": "hé"}
    chat = live.post("/tokenize", CHAT)[2]["tokens"]
    assert bytes(chat) == b"<|user|>hi\n<|assistant|>"
    assert live.get("/")[2]["model"] == "main"
    assert b"docs.js" in live.get("/docs")[2]
    assert live.get("/metrics")[0] == 200
