"""No body holds up the event loop, whatever stands in it: it is read beside the loop, and what is left is short. Nor
does what reads it hold the interpreter's lock for long."""

import urllib.request
from collections import Counter
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from hostile_bodies import dumped, hostile_bodies
from loop_meter import TRIES, LoopMeter, is_too_long, tried
from splittime.api.limits import ModelInfo
from splittime.server.config import ServerConfig
from splittime.server.writers import MANY_PARTS

from .conftest import EOS, LiveServer, say
from .fake_engine import FakeEngine

USER = {"role": "user", "content": "hi"}
ALL_SHAPES = ("/v1/completions", "/v1/responses")
ROUTES = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/v1/messages": lambda text: {"max_tokens": 1, "messages": [{"role": "user", "content": text}]},
    "/v1/messages/count_tokens": lambda text: {"model": "fake", "messages": [{"role": "user", "content": text}]},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/rerank": lambda text: {"query": "a", "documents": [text]},
    "/v1/score": lambda text: {"text_1": "a", "text_2": text},
    "/v1/prefill": lambda text: {"prompt": text},
    "/tokenize": lambda text: {"prompt": text},
    "/detokenize": lambda text: {"tokens": [1], "model": text},
    "/ledger/hops": lambda text: {"hops": [], "x": text},
    "/ledger/what-if": lambda text: {"x": text},
}


@contextmanager
def some_server(**limits):
    info = ModelInfo(names=("fake",), max_model_len=100_000, vocab_size=257, eos_token_ids=(EOS,))
    with LiveServer(FakeEngine(say("hello")), ServerConfig(port=0, **limits), info) as live:
        live.call(live.service.texts.start)
        yield live


@pytest.fixture(scope="module")
def server():
    with some_server(tokenize_cpu_s=0.2) as live:
        yield live


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_holds_up_the_loop(server, path: str) -> None:
    server.post(path, ROUTES[path]("a"))
    bodies = hostile_bodies(ROUTES[path], only_worst=path not in ALL_SHAPES)
    taken_ms = {name: tried(LoopMeter(server.loop), partial(server.post, path, body)) for name, body in bodies.items()}
    assert {name: taken for name, taken in taken_ms.items() if is_too_long(*taken)} == {}


SLOW = "[" + "1e300," * 60_000 + "1]"
WITHIN_A_TEXT = {
    "arguments of slow numbers": ("/v1/chat/completions", "chat", SLOW),
    "few slow numbers": ("/v1/chat/completions", "chat", "[" + "1e300," * 2_500 + "1]"),
    "arguments of lists": ("/v1/chat/completions", "chat", "[" + "[]," * 400_000 + "1]"),
    "arguments to count": ("/v1/messages/count_tokens", "count", SLOW),
    "a schema of slow numbers": ("/v1/completions", "form", SLOW),
    "a short schema of slow numbers": ("/v1/completions", "form", '{"enum": [' + "1e300," * 2_500 + "1]}"),
    "a schema of lists": ("/v1/completions", "form", '{"enum": [' + "[]," * 400_000 + "1]}"),
    "a schema of numbers": ("/v1/completions", "form", {"enum": [1] * 500_000}),
    "a pattern that opens classes": ("/v1/completions", "form", {"pattern": "[^" * 20_000 + "\\"}),
    "a short one": ("/v1/completions", "form", {"pattern": "[^" * 7_000 + "\\"}),
}


def within_a_text(kind: str, given: object) -> dict:
    if kind == "form":
        return {"prompt": "a", "max_tokens": 1, "guided_json": given}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    asked = {"model": "fake", "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    if kind == "count":
        used = {"type": "tool_use", "id": "c", "name": "f", "input": {"text": given}}
        return asked | {"messages": [USER, {"role": "assistant", "content": [used]}]}
    return asked | {"max_tokens": 1}


def test_what_stands_in_a_texts_own_json_holds_up_nobody(server) -> None:
    """600,000 numbers in the arguments of an earlier call kept everybody waiting for 9 s, 5 s a schema's
    pattern of 14 KB, and for half an hour one of 128 KB."""
    taken_ms = {
        name: tried(LoopMeter(server.loop), partial(server.post, path, dumped(within_a_text(kind, given))))
        for name, (path, kind, given) in WITHIN_A_TEXT.items()
    }
    assert {name: taken for name, taken in taken_ms.items() if is_too_long(*taken)} == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_whole_answer_of_many_logprobs_is_rendered_beside_the_loop(launch, path: str) -> None:
    """400 tokens with 20 others each took 100 to 140 ms of the loop, as a chat's."""
    live, many = launch(say("a" * 400)), {"max_tokens": 400, "n": 4}
    asked = (
        {"messages": [USER], "logprobs": True, "top_logprobs": 20}
        if "chat" in path
        else {"prompt": "a", "logprobs": 20}
    )

    def ask() -> None:
        status, _, answer = live.post(path, asked | many)
        assert status == 200
        told = [choice["logprobs"] for choice in answer["choices"]]
        tops = [each["top_logprobs"] for each in told[0]["content"]] if "chat" in path else told[0]["top_logprobs"]
        assert {len(top) for top in tops} == {20}

    assert not is_too_long(*tried(LoopMeter(live.loop), ask))


def test_a_streamed_echo_of_many_logprobs_is_written_in_pieces(launch) -> None:
    """4,000 tokens of a prompt with 20 others each took 32 ms of the loop at once."""
    live = launch(say("a" * 400), model={"max_model_len": 5000})
    asked = {"prompt": "b" * 4000, "echo": True, "logprobs": 20, "max_tokens": 400}
    *chunks, _ = live.events("/v1/completions", asked)
    whole = live.post("/v1/completions", asked)[2]["choices"][0]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][name]] == values
    assert max(len(piece["logprobs"]["tokens"]) for piece in pieces) <= MANY_PARTS


def test_the_account_of_many_long_answers_is_written_beside_the_loop(server) -> None:
    """One of 128 answers of 1,000 tokens took 100 to 200 ms, for whoever asked for its own."""
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    one, told = server.ledger.accounts()[-1], tuple(range(10**15, 10**15 + 1_000))
    long = {"token_steps": told, "token_ready_ns": told, "token_written_ns": told, "group_id": "cmpl-long"}
    for number in range(64):
        server.ledger.add_account(msgspec.structs.replace(one, request_id=f"long-{number}", **long))

    def ask() -> None:  # and do not read the JSON, which would keep this process's loop itself
        with urllib.request.urlopen(f"{server.url}/ledger/requests/long", timeout=60) as response:
            assert response.read().count(b'"answer_prefixes":') == 1 + 64

    assert not is_too_long(*tried(LoopMeter(server.loop), ask))


class NotingEngine(FakeEngine):
    """Notes for each request how many had been submitted when its answer was first waited for."""

    begun: Counter[int]

    async def stream(self, request_id: str):
        self.begun[len(self.submitted)] += 1
        async for item in super().stream(request_id):
            yield item


def test_many_inputs_are_followed_as_they_are_handed_off() -> None:
    """The first steps of 2,048 tasks, each of which reads what becomes of one, took 10 to 20 ms of one turn."""
    engine = NotingEngine(say("a"))
    engine.begun = Counter()
    info = ModelInfo(names=("fake",), max_model_len=100, vocab_size=257, eos_token_ids=(EOS,))
    with LiveServer(engine, ServerConfig(port=0), info) as live:
        status, _, answer = live.post("/v1/embeddings", {"input": ["b"] * 2048})
    assert (status, [each["index"] for each in answer["data"]]) == (200, list(range(2048)))
    assert (engine.begun.total(), max(engine.begun.values()) < 1024) == (2048, True)


def test_choices_that_end_at_once_are_closed_in_several_turns(launch) -> None:
    """The accounts of 63 whose prompt has 8,000 tokens took 20 ms of one turn."""
    live = launch(lambda request: list(b"a" * 200) if request.request_id.endswith("-63") else [*b"aaa", EOS])
    turns, number, is_on = list[int](), 0, True

    def turn() -> None:
        nonlocal number
        number += 1
        if is_on:
            live.loop.call_soon(turn)

    live.ledger.subscribe(lambda record: turns.append(number))
    live.call(turn)
    events = live.events("/v1/completions", {"prompt": ["a"] * 4, "n": 16, "max_tokens": 200})
    is_on = False
    ends = [choice["index"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert (sorted(ends), len(turns)) == (list(range(64)), 64)
    assert max(Counter(turns).values()) <= 10


def test_a_small_turn_behind_a_large_conversation_costs_what_is_new() -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": '"[' * 20}] * 4000}
    asked, stored = {"input": [thoughts, {"role": "user", "content": "hi"}], "max_output_tokens": 1}, {}
    with some_server() as live:  # of 2 MB tokens may take long
        for _ in range(12):
            status, _, stored = live.post("/v1/responses", asked | stored)
            assert status == 200
            stored = {"previous_response_id": stored["id"]}

        def ask() -> None:
            assert live.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, **stored})[0] == 200
            assert live.get(f"/v1/responses/{stored['previous_response_id']}/input_items?limit=1")[0] == 200

        assert not is_too_long(*tried(LoopMeter(live.loop), ask))


def test_a_body_of_tools_is_read_beside_the_loop_long_before_it_is_large(server) -> None:
    """All of 31 KB that are schemas took 6 to 10 ms of the loop where a choice is required, 3 where not."""
    maze: dict = {"type": "string"}
    while len(str(maze)) < 20_000:
        maze = {"anyOf": [maze, {"type": "array", "items": maze}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": maze}}}}
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
    meter, taken_ms = LoopMeter(server.loop), []
    for _ in range(TRIES):
        meter.begin()
        assert server.post("/v1/chat/completions", {**asked, "max_tokens": 1})[0] in (200, 400)
        taken_ms.append(meter.longest_ms())
    assert min(taken_ms) < 3
