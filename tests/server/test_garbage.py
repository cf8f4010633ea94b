"""An ended request is freed at once, by its reference counts: what waits for the garbage collector piles up under load,
and the one that is asked for something when a full collection comes waits for all of it."""

import gc
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from patience import until
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls
from splittime.web.reading import SHORT_BYTES

from .conftest import LiveServer, say
from .test_endings import connect, raw_request

TOO_LONG = "\N{SNOWMAN}" * 5000


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def garbage() -> Counter[str]:
    """What the collector finds, by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    return Counter(type(each).__name__ for each in gc.garbage)


def ask(connection: http.client.HTTPConnection, **fields: object) -> int:
    body = json.dumps({"prompt": "abc", "max_tokens": 5, **fields})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def until_all_left(server: LiveServer) -> None:
    until(lambda: not server.call(lambda: server.service.num_open or server.service.groups))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"stream": True}, 200),
        ({"stream": True, "n": 2}, 200),
        ({"stop": "l"}, 200),
        ({"temperature": -1}, 400),
        ({"prompt": TOO_LONG}, 400),
        ({"prompt": "x" * SHORT_BYTES, "temperature": -1}, 400),  # read beside the event loop
    ],
)
def test_an_ended_request_leaves_nothing_to_collect(launch, fields: dict, status: int) -> None:
    server = launch(say("hello"))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(2):
        assert ask(connection, **fields) == status
    with without_collector():
        for _ in range(10):
            assert ask(connection, **fields) == status
        connection.close()
        until_all_left(server)
        left = garbage()
    assert max(left.values(), default=0) < 10, left  # one of each request would be ten


def test_a_request_whose_client_left_leaves_nothing_to_collect(launch) -> None:
    server = launch(say("x" * 2000, end=False), step_s=0.005)

    def leave_early() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": "abc", "max_tokens": 2000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(100)
        connection.close()

    leave_early()
    until_all_left(server)
    with without_collector():
        for _ in range(10):
            leave_early()
        until_all_left(server)
        left = garbage()
    assert max(left.values(), default=0) < 10, left


def test_a_reader_that_was_dropped_leaves_nothing_to_collect(launch) -> None:
    """Its unread answer would stay until the next full collection, an hour later."""
    config = {"slow_reader_s": 0.1, "send_buffer_bytes": 4096, "slow_reader_buffer_bytes": 10**9}
    server = launch(say("hello " * 400, end=False), step_s=0.001, config=config, model={"max_model_len": 10**6})

    def drop_one(name: str) -> None:
        slow = connect(server, receive_buffer=4096)
        body = {"prompt": "x", "max_tokens": 500_000, "stream": True, "logprobs": 5}
        slow.sendall(raw_request(body, headers=f"X-Request-Id: {name}\r\n"))
        until(lambda: bool(server.ledger.account(name)))
        slow.close()

    drop_one("first")
    until_all_left(server)
    with without_collector():
        for number in range(3):
            drop_one(f"slow-{number}")
        until_all_left(server)
        left = garbage()
    assert not {"StreamWriter", "Choice", "Visit"} & set(left), left


def test_a_text_whose_client_left_leaves_nothing_to_collect(launch) -> None:
    """A long text would stay with it."""
    server = launch()

    def leave_early() -> None:
        left = connect(server)
        left.sendall(raw_request({"prompt": "a b " * 500_000}, path="/tokenize"))
        until(
            lambda: server.call(
                lambda: any(worker.task for lane in server.service.texts.lanes for worker in lane.workers)
            )
        )
        left.close()
        until(
            lambda: not server.call(lambda: [w for lane in server.service.texts.lanes for w in lane.workers if w.task])
        )

    leave_early()
    with without_collector():
        for _ in range(3):
            leave_early()
        left = garbage()
    assert not {"TextTask", "CountedText"} & set(left), left


def test_a_grammar_of_tools_leaves_nothing_to_collect() -> None:
    tool = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, is_strict=True)
    with without_collector():
        for family in FAMILIES.values():
            grammar_of_calls(family, [tool], may_answer=True, may_repeat=False)
        left = garbage()
    assert not left, left


def test_a_refusal_leaves_nothing_to_collect(launch) -> None:
    server = launch(say("x" * 1000, end=False), config={"max_queued_requests": 1}, max_running=1, step_s=0.05)
    body = {"prompt": "abc", "max_tokens": 1000}
    streams = [server.events_later("/v1/completions", body)]
    until(lambda: server.engine.running and server.get("/stats")[2]["server"]["queued_requests"] == 0)
    streams.append(server.events_later("/v1/completions", body))
    until(lambda: server.engine.waiting)
    server.engine.paused = True
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with without_collector():
        statuses = [ask(connection) for _ in range(10)]
        left = garbage()
    assert statuses == [429] * 10
    assert max(left.values(), default=0) < 10, left
    server.engine.paused, server.engine.step_s = False, 0.0
    for stream in streams:
        stream.join(60)
