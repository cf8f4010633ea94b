"""What is answered from a request's head alone: refusals of a full queue, and /health. Over raw sockets."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from patience import until
from splittime.ledger.store import Ring
from splittime.web import connection as connections
from splittime.web.tenants import TOLD_TENANT

from .conftest import LiveServer, say
from .test_loop_stalls import stall

BODY = b'{"prompt": "x", "max_tokens": 2}'
SAID_OF_A_REFUSAL = ("x-request-id", "request-id", "retry-after", "content-type", "content-length")
FULL = {"config": {"max_queued_requests": 1}, "max_running": 1}


def post(
    body: bytes = BODY,
    *headers: str,
    length: int | None = None,
    version: str = "1.1",
    path: str = "/v1/completions",
) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: 127.0.0.1", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_answer(stream) -> tuple[int, dict[str, str], bytes]:
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, stream.read(int(headers["content-length"]))


@contextlib.contextmanager
def full(launch) -> Iterator[LiveServer]:
    """A server whose queue is full, and stays so."""
    live = launch(say("x" * 8, end=False), **FULL)
    live.engine.paused = True
    with socket.create_connection(("127.0.0.1", live.port)) as waiting:
        waiting.sendall(post())
        until(lambda: live.service.admission.queued_requests == 1)
        yield live


@contextlib.contextmanager
def client(live: LiveServer) -> Iterator[tuple[socket.socket, object]]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        yield connection, connection.makefile("rb")


def test_a_refusal_has_all_that_a_refusal_has_and_no_task(launch, monkeypatch) -> None:
    with full(launch) as live, client(live) as (connection, answers):
        monkeypatch.setattr(connections.ConnectionProtocol, "_start_asgi_task", None)
        for _ in range(3):  # on one connection
            connection.sendall(post(BODY, "X-Request-Id: mine", "endpoint-load-metrics-format: JSON"))
            status, headers, body = read_answer(answers)
            assert status == 429
            assert headers["x-request-id"] == "mine"
            assert int(headers["retry-after"]) >= 1
            assert headers["content-type"] == "application/json"
            assert "endpoint-load-metrics" in headers
            assert "date" in headers
            error = json.loads(body)["error"]
            assert (error["reason"], error["queued"], error["limit"]) == ("queued_requests", 1, 1)
        assert live.service.admission.refusals == {"queued_requests": 3}
        accounts = [account for account in live.ledger.accounts() if account.is_refused]
        assert [account.request_id for account in accounts] == ["mine"] * 3
        for account in accounts:
            account.verify()
            assert [interval.stage for interval in account.intervals] == ["receive", "deliver"]
            assert account.error.code == "queued_requests"


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/api/embed"])
def test_other_apis_are_refused_at_once_in_their_own_form(launch, monkeypatch, path: str) -> None:
    with full(launch) as live, client(live) as (connection, answers):
        told = []
        for is_at_once in (True, False):
            if not is_at_once:
                monkeypatch.setattr(connections.ConnectionProtocol, "_may_answer_at_once", lambda protocol: False)
            connection.sendall(post(BODY, "X-Request-Id: mine", path=path))
            status, headers, body = read_answer(answers)
            told.append((status, json.loads(body), {name: headers.get(name) for name in SAID_OF_A_REFUSAL}))
        assert told[0] == told[1]
        assert (told[0][0], told[0][2]["request-id"]) == (429, "mine" if path == "/v1/messages" else None)
        assert {account.endpoint for account in live.ledger.accounts() if account.is_refused} <= {"chat", "embeddings"}


def test_a_body_is_read_past_and_the_next_request_is_answered(launch) -> None:
    with full(launch) as live, client(live) as (connection, answers):
        head, body = post(length=5000, body=b""), b"z" * 5000
        connection.sendall(head + body[:100])
        assert read_answer(answers)[0] == 429  # before the rest of the body is there
        connection.sendall(body[100:] + b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert read_answer(answers)[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(post(length=connections.MAX_SKIPPED_BYTES + 1, body=b"x"), id="long"),
        pytest.param(post(b"5\r\nhello\r\n", "Transfer-Encoding: chunked", length=-1), id="chunked"),
        pytest.param(post(b"", "Expect: 100-continue", length=50), id="expected"),
        pytest.param(post(BODY, "Connection: close"), id="asked"),
        pytest.param(post(BODY, version="1.0"), id="old"),
    ],
)
def test_a_body_that_is_not_worth_reading_ends_the_connection(launch, monkeypatch, request_bytes: bytes) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_S", 0.2)
    with full(launch) as live, client(live) as (connection, answers):
        connection.sendall(request_bytes)
        status, headers, _ = read_answer(answers)
        assert (status, headers["connection"]) == (429, "close")
        with contextlib.suppress(ConnectionResetError):
            assert answers.read() == b""


def test_one_who_never_sends_the_body_is_not_waited_for(launch, monkeypatch) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_S", 0.2)
    with full(launch) as live, client(live) as (connection, answers):
        connection.sendall(post(length=500, body=b"x"))
        status, headers, _ = read_answer(answers)
        assert status == 429
        assert "connection" not in headers
        with contextlib.suppress(ConnectionResetError):
            assert answers.read() == b""


def test_pipelined_requests_are_answered_in_order(launch) -> None:
    """A refusal must not overtake the answer of the request before it."""
    live = launch(say("x" * 8, end=False), **FULL)
    live.engine.paused = True
    with client(live) as (connection, answers):
        connection.sendall(post() + post() + b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: live.service.admission.queued_requests == 1)
        live.engine.paused = False
        assert [read_answer(answers)[0] for _ in range(3)] == [200, 200, 200]


def test_many_in_one_packet_are_all_answered(launch) -> None:
    with full(launch) as live, client(live) as (connection, answers):
        connection.sendall(post() * 50)
        assert [read_answer(answers)[0] for _ in range(50)] == [429] * 50
        until(lambda: sum(account.is_refused for account in live.ledger.accounts()) == 50)


def test_one_who_does_not_read_is_not_written_for(launch) -> None:
    """Endless pipelined requests whose answers nobody reads must not fill this process's memory."""
    live = launch(config={"send_buffer_bytes": 8192})
    ask = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000
    with client(live) as (connection, _):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):  # it may stop taking them before
            connection.sendall(ask * 10)  # of which the answers are 1.5 MB
        until(lambda: live.call(lambda: unsent_bytes(live)) > 0)
        assert live.call(lambda: unsent_bytes(live)) < 2**18
    assert live.get("/health")[0] == 200


def unsent_bytes(live: LiveServer) -> int:
    protocols = live.server.server_state.connections
    return max((protocol.transport.get_write_buffer_size() for protocol in protocols), default=0)


def test_many_newcomers_are_accepted_in_few_turns_of_the_loop(launch) -> None:
    """One a turn, as libuv does it, is one for each step of all streams: newcomers would wait for seconds."""
    live, count = launch(), 64
    turns = []
    with contextlib.ExitStack() as stack:
        with stall(live):
            for _ in range(count):
                stack.enter_context(client(live))
            live.loop.call_soon_threadsafe(count_turns, live, count, turns)
        until(lambda: turns and turns[-1] == "all")
    assert len(turns) < count // 4


def count_turns(live: LiveServer, count: int, turns: list[str]) -> None:
    """In the server's event loop: notes each of its turns until so many connections are there."""
    are_all = len(live.server.server_state.connections) >= count
    turns.append("all" if are_all else "some")
    if not are_all:
        live.loop.call_soon(count_turns, live, count, turns)


def test_the_key_and_the_page_of_another_site_come_first(launch) -> None:
    live = launch(say("x" * 8, end=False), max_running=1, config={"max_queued_requests": 1, "api_key": ("secret",)})
    live.engine.paused = True
    right = "Authorization: Bearer secret"
    with client(live) as (waiting, _), client(live) as (connection, answers):
        waiting.sendall(post(BODY, right))
        until(lambda: live.service.admission.queued_requests == 1)
        for headers, expected in (
            ((), 401),
            (("Authorization: Bearer wrong",), 401),
            ((right, "Sec-Fetch-Site: cross-site"), 403),
            ((right,), 429),
        ):
            connection.sendall(post(BODY, *headers))
            assert read_answer(answers)[0] == expected
        assert live.service.admission.refusals == {"queued_requests": 1}


def test_refused_requests_leave_the_served_ones_in_the_ring(launch) -> None:
    live = launch(say("ok"))
    live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "served"})
    live.service.is_draining = True
    live.ledger._refused = Ring(20, 2**20)
    with client(live) as (connection, answers):
        for _ in range(50):
            connection.sendall(post())
            assert read_answer(answers)[0] == 503
    accounts = live.ledger.accounts(limit=1000)
    assert [account.request_id for account in accounts if not account.is_refused] == ["served"]
    assert len(accounts) == 21
    assert live.ledger.account("served")


def test_two_requests_in_one_piece_leave_no_timer_of_the_first(launch) -> None:
    """The connection's idle time-out, set after /health, would have cut the stream that came with it."""
    live = launch(say("x" * 8, end=False))
    live.engine.paused = True
    with client(live) as (connection, answers):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + post())
        assert read_answer(answers)[0] == 200
        until(lambda: live.service.admission.queued_requests == 1)
        assert [one.timeout_keep_alive_task for one in live.server.server_state.connections] == [None]


def test_a_connection_at_rest_after_an_answer_at_once_ends(launch) -> None:
    live = launch()
    live.server.config.timeout_keep_alive = 0.1
    with client(live) as (connection, answers):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(answers)[0] == 200
        assert connection.recv(1) == b""


def test_who_waits_for_a_turn_with_room_is_before_who_comes(launch) -> None:
    live, opened = launch(say("ab"), config={"max_queued_requests": 1}), []

    async def room() -> None:
        while not opened:
            await asyncio.sleep(0)

    live.service.turn.room = room
    with client(live) as (first, its_answers), client(live) as (second, answers):
        first.sendall(post())
        until(lambda: live.service.coming.total() == 1)
        second.sendall(post())
        assert read_answer(answers)[0] == 429
        opened.append(True)
        assert read_answer(its_answers)[0] == 200
        second.sendall(post())
        assert read_answer(answers)[0] == 200
    assert live.service.coming.total() == 0


def test_who_waits_for_a_turn_with_room_turns_no_other_tenant_away(launch) -> None:
    live, opened = launch(say("ab"), config={"max_queued_requests": 2}), []

    async def room() -> None:
        while not opened:
            await asyncio.sleep(0)

    live.service.turn.room = room
    with contextlib.ExitStack() as stack:
        burst = [stack.enter_context(client(live)) for _ in range(2)]
        (again, its_answers), (other, answers) = (stack.enter_context(client(live)) for _ in range(2))
        for connection, _ in burst:
            connection.sendall(post(BODY, f"{TOLD_TENANT}: many"))
        until(lambda: live.service.coming.total() == 2)
        again.sendall(post(BODY, f"{TOLD_TENANT}: many"))
        assert read_answer(its_answers)[0] == 429
        other.sendall(post(BODY, f"{TOLD_TENANT}: few"))
        until(lambda: live.service.coming == {"many": 2, "few": 1})
        opened.append(True)
        assert read_answer(answers)[0] == 200
    until(lambda: not list(live.service.coming))
