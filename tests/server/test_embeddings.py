"""`POST /v1/embeddings`: what goes in, what comes out, what is refused and how, and what the books say."""

import base64
import math
import threading
from array import array

import pytest

from splittime.api import ollama
from splittime.core.facts import NO_FILE, NO_FILE_OF_ENCODER, Pooling
from splittime.ledger.stages import Stage

from .conftest import LiveServer

PATH = "/v1/embeddings"
NAMED = Pooling(kind="mean", named_by="modules.json", size=8)


def raw(ids: list[int]) -> list[float]:
    """What the scripted engine answers."""
    return [len(ids), sum(ids) + 1, 3, 4, 0, 0, 0, 12]


def normed(values: list[float]) -> list[float]:
    length = math.hypot(*values)
    return pytest.approx([value / length for value in values], abs=1e-6)


@pytest.fixture
def live(launch) -> LiveServer:
    return launch(model={"pooling": NAMED})


def embedded(live: LiveServer, given: object, **more: object) -> list:
    status, _, answer = live.post(PATH, {"input": given, **more})
    assert status == 200, answer
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    return [each["embedding"] for each in answer["data"]]


def test_an_answer_has_the_fields_of_the_api(live: LiveServer) -> None:
    status, headers, answer = live.post(PATH, {"input": "abc", "model": "fake", "user": "u"}, {"X-Request-Id": "e1"})
    assert status == 200
    assert answer.pop("created") > 0
    assert answer.pop("data")[0]["embedding"] == normed(raw(list(b"abc")))
    assert answer == {
        "object": "list", "id": "embd-e1", "model": "fake", "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }  # fmt: skip
    assert "prefill" in headers["server-timing"]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", [[97, 98, 99]]),
        (["abc", "b"], [[97, 98, 99], [98]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
def test_every_form_of_input(live: LiveServer, given: object, prompts: list[list[int]]) -> None:
    assert embedded(live, given) == [normed(raw(ids)) for ids in prompts]
    asked = live.engine.submitted[-len(prompts) :]
    assert [list(request.prompt_token_ids) for request in asked] == prompts
    assert {request.sampling.pooling for request in asked} == {"mean"}


def test_many_inputs_are_one_request_of_the_queue(launch) -> None:
    live = launch(model={"pooling": NAMED}, config={"max_queued_requests": 2}, max_running=2)
    inputs = [[1 + index % 200] for index in range(300)]
    assert embedded(live, inputs) == [normed(raw(ids)) for ids in inputs]
    assert live.service.admission.queued_requests == live.service.admission.queued_prompt_tokens == 0


def test_base64_holds_the_same_numbers(live: LiveServer) -> None:
    (floats,), (coded,) = embedded(live, "abc"), embedded(live, "abc", encoding_format="base64")
    assert array("f", base64.b64decode(coded)).tolist() == pytest.approx(floats, abs=1e-7)
    (cut,) = embedded(live, "abc", encoding_format="base64", dimensions=3)
    assert len(base64.b64decode(cut)) == 3 * 4


def test_what_is_cut_is_normalised_again(live: LiveServer, launch) -> None:
    assert embedded(live, "abc", dimensions=4) == [normed(raw(list(b"abc"))[:4])]
    plain = launch(model={"pooling": Pooling(named_by="modules.json", size=8, is_normalised=False)})
    assert embedded(plain, "abc") == [raw(list(b"abc"))]
    assert embedded(plain, "abc", dimensions=8) == [raw(list(b"abc"))]
    assert embedded(plain, "abc", dimensions=4) == [normed(raw(list(b"abc"))[:4])]


@pytest.mark.parametrize(
    ("pooling", "dimensions", "words"),
    [
        ({}, 9, "outside 1 to 8"),
        ({}, 0, ">= 1"),
        ({"sizes": (2, 4)}, 3, "it can be 2, 4"),
        ({"may_be_cut": False}, 4, "it can be 8"),
    ],
)
def test_a_size_that_the_model_does_not_allow(launch, pooling: dict, dimensions: int, words: str) -> None:
    live = launch(model={"pooling": Pooling(named_by="modules.json", size=8, **pooling)})
    status, _, answer = live.post(PATH, {"input": "a", "dimensions": dimensions})
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", 1]}, "input", "mixes"),
        ({"input": [300]}, "input", "outside the vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2049 entries, more than 2048"),
        ({"input": [[1]] * 2049}, "input", "2049 entries, more than 2048"),
        ({"input": "a" * 65}, "input", "at most 64"),
        ({"input": "a" * 5000}, "input", "at most 64"),
        ({"input": ["a", "a" * 65]}, "input[1]", "at most 64"),
        ({"input": ["a", "a" * 5000]}, "input[1]", "at most 64"),
        ({"input": [1] * 65}, "input", "at most 64"),
        ({"input": [[1], [1] * 65]}, "input[1]", "at most 64"),
        ({"input": [[1], [300]]}, "input[1]", "outside the vocabulary"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": [[]]}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input[1]", "no tokens"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "1 to 64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 64"),
        ({"input": "a", "model": "other"}, "model", "no model"),
        ({}, "input", "missing"),
    ],
)
def test_refusals_name_the_field(launch, body: dict, param: str, words: str) -> None:
    live = launch(model={"pooling": NAMED, "max_model_len": 64})
    status, _, answer = live.post(PATH, body)
    assert (status // 100, answer["error"]["param"]) == (4, param)
    assert words in answer["error"]["message"]
    assert not live.engine.submitted


def test_the_whole_context_may_be_filled(launch) -> None:
    live = launch(model={"pooling": NAMED, "max_model_len": 64})
    assert embedded(live, ["a" * 64, "b"]) == [normed(raw([97] * 64)), normed(raw([98]))]


def test_a_model_that_makes_none_says_why(launch) -> None:
    live = launch(model={"pooling": Pooling(refusal="modules.json asks for Dense")})
    status, _, answer = live.post(PATH, {"input": "a"})
    assert (status, answer["error"]["code"]) == (400, "unsupported_model")
    assert "modules.json asks for Dense" in answer["error"]["message"]
    assert live.post("/v1/completions", {"prompt": "a"})[0] == 200


def test_a_model_that_was_not_made_for_it_has_a_notice(launch, live: LiveServer) -> None:
    status, headers, answer = launch().post(PATH, {"input": "a"})
    assert (status, answer["notices"], headers["x-splittime-notice"]) == (200, [NO_FILE], NO_FILE)
    assert "notices" not in live.post(PATH, {"input": "a"})[2]


def test_each_has_an_account_that_closes(live: LiveServer) -> None:
    status, _, answer = live.post(PATH, {"input": ["abc", "de"]}, {"X-Request-Id": "e2", "X-Include-Timing": "1"})
    assert status == 200
    assert answer["timing"]["ttft_ns"] is None
    accounts = live.ledger.accounts()
    assert [one.request_id for one in accounts] == ["e2-0", "e2-1"]
    for one, tokens in zip(accounts, (3, 2), strict=True):
        one.verify()
        assert (one.endpoint, one.group_id, one.finish_reason) == ("embeddings", "embd-e2", "stop")
        assert (one.prompt_tokens, one.output_tokens, one.computes_prompt) == (tokens, 0, True)
        seen = [interval.stage for interval in one.intervals]
        assert seen[-4:] == [Stage.HANDOFF, Stage.QUEUE, Stage.PREFILL, Stage.DELIVER]
    assert live.get("/ledger/requests/embd-e2")[0] == 200


@pytest.mark.parametrize("given", [["a", "bcdefg"], ["bcdefg", "a"]])
def test_the_answers_timing_is_that_of_the_embedding_that_came_last(launch, given: list[str]) -> None:
    live = launch(model={"pooling": NAMED}, prefill_chunk=1)
    status, _, answer = live.post(PATH, {"input": given}, {"X-Include-Timing": "1"})
    assert status == 200
    last = max(live.ledger.accounts(), key=lambda account: account.prompt_tokens)
    (told,) = [each for each in answer["timing"]["stages"] if each["stage"] == "deliver"]
    (begin_ns,) = [each.begin_ns for each in last.intervals if each.stage is Stage.DELIVER]
    assert told["begin_ns"] == begin_ns - last.start_ns


def test_generations_metrics_do_not_count_it(live: LiveServer) -> None:
    embedded(live, "abc")
    text = live.get("/metrics")[2].decode()
    assert 'splittime_tokens_total{kind="prompt"} 3' in text
    assert "vllm:request_params_n_count" not in text
    live.post("/v1/completions", {"prompt": "a"})
    assert "vllm:request_params_n_count" in live.get("/metrics")[2].decode()


def test_a_deadline_ends_it(launch) -> None:
    live = launch(model={"pooling": NAMED}, step_s=0.2, prefill_chunk=1)
    status, _, answer = live.post(PATH, {"input": "abcdef"}, {"X-Request-Deadline-Ms": "100"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    live.ledger.accounts()[-1].verify()


def test_ollamas_clients_get_the_same_vectors(live: LiveServer) -> None:
    status, _, answer = live.post("/api/embed", {"model": "fake:latest", "input": ["abc", "b"], "truncate": True})
    assert (status, answer["embeddings"]) == (200, [normed(raw(list(text))) for text in (b"abc", b"b")])
    assert (answer["prompt_eval_count"], answer["total_duration"] > 0) == (4, True)
    assert live.post("/api/embeddings", {"prompt": "abc"})[2] == {"embedding": normed(raw(list(b"abc")))}
    assert live.post("/api/show", {})[2]["capabilities"] == ["completion"]


def test_many_vectors_are_made_ollamas_beside_the_loop(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 of 1,024 values took 40 to 70 ms of the loop."""
    threads, made = list[int](), ollama.embedded

    def noted(body: bytes, *, is_older: bool) -> bytes:
        threads.append(threading.get_ident())
        return made(body, is_older=is_older)

    monkeypatch.setattr(ollama, "embedded", noted)
    status, _, answer = live.post("/api/embed", {"model": "fake", "input": ["abc"] * 200})
    assert (status, answer["embeddings"]) == (200, [normed(raw(list(b"abc")))] * 200)
    assert threads != [live.call(threading.get_ident)]


@pytest.mark.parametrize("path", ["/embed", "/embedding"])
def test_what_is_not_here_names_what_is(live: LiveServer, path: str) -> None:
    status, _, answer = live.post(path, {})
    assert status == 404
    assert "/v1" in answer["error"]["hint"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_an_encoder_is_asked_for_nothing_but_embeddings(launch, path: str, body: dict) -> None:
    live = launch(model={"pooling": Pooling(size=8, kind="cls", is_all=True)})
    status, _, answer = live.post(path, body)
    assert status == 400
    assert "is an encoder: it makes embeddings and generates nothing" in answer["error"]["message"]
    assert not live.engine.submitted
    status, _, answer = live.post(PATH, {"input": "a"})
    assert (status, answer["notices"]) == (200, [NO_FILE_OF_ENCODER])
