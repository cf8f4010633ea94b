"""Every way a request can end before its time: gone clients, slow readers, a dead engine, a drain. Nothing is left."""

import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import until
from splittime.server import service

from .conftest import LiveServer, say

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def raw_request(body: dict, path: str = "/v1/completions", headers: str = "") -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def connect(live: LiveServer, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", live.port))
    return sock


def nothing_left(live: LiveServer) -> bool:
    service = live.service
    return (
        live.engine.is_empty
        and service.num_open == 0
        and not service.groups
        and not service._reserved
        and service.admission.queued_requests == 0
        and service.admission.queued_prompt_tokens == 0
    )


def num_tasks(live: LiveServer) -> int:
    import asyncio

    return live.call(lambda: len(asyncio.all_tasks()))


@pytest.mark.parametrize("max_running", [2, 64])
def test_disconnects_at_any_moment_leave_nothing_behind(launch, max_running: int) -> None:
    live = launch(say(TEXT), max_running=max_running, step_s=0.001)
    before = num_tasks(live)
    draw = random.Random(max_running)

    def visit_and_go(seed: int) -> None:
        own = random.Random(seed)
        body = {"prompt": "x" * own.choice([3, 3, 3000]), "max_tokens": 300, "n": own.choice([1, 1, 3])}
        body |= {"stream": own.random() < 0.7, "stop": own.choice([None, "lazy"])}
        request = raw_request(body)
        with connect(live) as sock:
            sock.sendall(request[: own.choice([len(request)] * 4 + [40, len(request) - 5])])
            time.sleep(own.choice([0, 0.0005, 0.002, 0.005, 0.02, 0.05]))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(visit_and_go, [draw.random() for _ in range(150)]))
    until(lambda: nothing_left(live))
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 9})[2]["choices"][0]["text"] == TEXT[:9]
    until(lambda: num_tasks(live) <= before + 1)
    accounts = live.ledger.accounts(limit=5000)
    assert any(account.finish_reason == "abort" for account in accounts)
    for account in accounts:
        account.verify()
        assert not any(interval.stage == "unattributed" for interval in account.intervals)
        if account.finish_reason == "abort" and account.freed_ns is not None:
            assert account.cancelled_ns is not None
            assert account.freed_ns >= account.cancelled_ns
    assert max(live.engine.steps_to_abort) <= 1


def test_a_client_that_goes_is_aborted_within_a_step(launch) -> None:
    live = launch(say(TEXT, end=False), step_s=0.02)
    with connect(live) as sock:
        sock.sendall(raw_request({"prompt": "x", "max_tokens": 4000, "stream": True}))
        sock.recv(100)
    until(lambda: nothing_left(live))
    account = live.ledger.accounts()[-1]
    assert account.finish_reason == "abort"
    assert account.freed_ns >= account.cancelled_ns
    assert live.engine.steps_to_abort == [1]
    assert "splittime_cancel_to_freed_seconds_count 1.0" in live.get("/metrics")[2].decode()


def test_a_slow_reader_is_dropped_and_others_notice_nothing(launch) -> None:
    small = {"slow_reader_buffer_bytes": 20_000, "send_buffer_bytes": 4096, "slow_reader_s": 30.0}
    live = launch(say(TEXT * 40, end=False), step_s=0.001, config=small, model={"max_model_len": 10**6})
    endless = {"prompt": "x", "max_tokens": 500_000, "stream": True, "logprobs": 5}
    live.engine.paused = True
    slow = connect(live, receive_buffer=4096)
    slow.sendall(raw_request(endless, headers="X-Request-Id: slow\r\n"))
    until(lambda: "slow" in live.service.groups)
    live.engine.paused = False
    lags = []
    while "slow" in live.service.groups:
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 20})[0] == 200
        account = live.ledger.accounts(limit=1)[0]
        lags.append(account.end_ns - account.token_ready_ns[-1])
        assert len(lags) < 2000
    account = live.ledger.account("slow")[0]
    account.verify()
    assert (account.finish_reason, account.error.code) == ("error", "slow_reader")
    assert account.error.limit == 20_000
    assert len(account.token_written_ns) < len(account.token_steps)
    until(lambda: nothing_left(live))
    slow.close()


def test_a_reader_that_makes_no_progress_is_dropped_after_a_time(launch) -> None:
    config = {"slow_reader_s": 0.3, "send_buffer_bytes": 4096, "slow_reader_buffer_bytes": 10**9}
    live = launch(say(TEXT * 40, end=False), step_s=0.001, config=config, model={"max_model_len": 10**6})
    slow = connect(live, receive_buffer=4096)
    body = {"prompt": "x", "max_tokens": 500_000, "stream": True, "logprobs": 5}
    slow.sendall(raw_request(body, headers="X-Request-Id: slow\r\n"))
    until(lambda: bool(live.ledger.account("slow")))
    assert live.ledger.account("slow")[0].error.limit == 0.3
    until(lambda: nothing_left(live))
    slow.close()


def test_a_client_that_reads_late_gets_everything_in_larger_chunks_and_owns_the_wait(launch) -> None:
    config = {"send_buffer_bytes": 4096, "slow_reader_buffer_bytes": 10**9}
    live = launch(say(TEXT * 10, end=False), step_s=0.0005, config=config, model={"max_model_len": 10**6})
    late = connect(live, receive_buffer=4096)
    body = {"prompt": "x", "max_tokens": 3000, "stream": True, "logprobs": 5}
    late.sendall(raw_request(body, headers="X-Request-Id: late\r\nConnection: close\r\n"))
    until(lambda: live.engine.submitted and live.engine.is_empty)
    time.sleep(0.05)
    received = b""
    while part := late.recv(65536):
        received += part
    late.close()
    assert b"data: [DONE]" in received
    until(lambda: bool(live.ledger.account("late")))
    account = live.ledger.account("late")[0]
    account.verify()
    assert account.finish_reason == "length"
    assert len(account.token_written_ns) == 3000
    assert len(set(account.token_written_ns)) < 3000
    waited = sum(i.duration_ns for i in account.intervals if i.stage == "client_wait")
    assert waited > 10e6


def test_a_dead_engine_ends_streams_with_an_error_and_the_rest_is_unattributed(launch) -> None:
    live = launch(say(TEXT, end=False), step_s=0.005)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"prompt": "x", "max_tokens": 3000}
        stream = pool.submit(live.events, "/v1/completions", body, {"X-Request-Id": "s"})
        whole = pool.submit(live.post, "/v1/completions", body, {"X-Request-Id": "w"})
        until(lambda: len(live.engine.running) == 2)
        time.sleep(0.05)
        live.call(live.engine.die)
        events, (status, _, answer) = stream.result(), whole.result()
    assert events[-2]["error"]["code"] == "engine_died"
    assert events[-1] == "[DONE]"
    assert (status, answer["error"]["code"]) == (500, "engine_died")
    assert live.get("/ready")[0] == 503
    for name in "sw":
        account = live.ledger.account(name)[0]
        account.verify()
        lost = [i for i in account.intervals if i.stage == "unattributed"]
        assert len(lost) == 1
        assert lost[0].cause == "engine_died"
    live.engine.is_ready = True
    assert live.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_a_broken_promise_of_the_engine_client_still_ends_the_request(launch) -> None:
    live = launch(say(TEXT))

    async def broken(request_id: str):
        raise RuntimeError("no stream today")
        yield

    live.engine.stream = broken
    status, _, answer = live.post("/v1/completions", {"prompt": "x"})
    assert status == 500
    assert "no stream today" in answer["error"]["message"]
    live.ledger.accounts()[-1].verify()


def test_an_id_in_flight_is_refused(launch) -> None:
    live = launch(say(TEXT, end=False), step_s=0.005)
    with connect(live) as sock:
        sock.sendall(raw_request({"prompt": "x", "max_tokens": 4000}, headers="X-Request-Id: one\r\n"))
        until(lambda: "one" in live.service.groups)
        status, _, answer = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "one"})
        assert (status, answer["error"]["code"]) == (409, "request_id_in_flight")
    until(lambda: nothing_left(live))


def test_a_client_that_goes_in_the_middle_of_its_body_has_ended_it_itself(launch) -> None:
    live = launch(say(TEXT))
    with connect(live) as sock:
        sock.sendall(raw_request({"prompt": "x" * 100})[:120])
        until(lambda: live.service.num_open)
    until(live.ledger.accounts)
    (account,) = live.ledger.accounts()
    assert (account.finish_reason, account.error) == ("abort", None)
    until(lambda: nothing_left(live))


def test_a_body_that_never_comes_is_given_up(launch) -> None:
    live = launch(say(TEXT), config={"body_timeout_s": 0.2})
    with connect(live) as sock:
        sock.sendall(raw_request({"prompt": "x" * 100})[:120])
        assert b" 408 " in sock.recv(1000)
    until(lambda: nothing_left(live))


def test_a_stream_that_breaks_is_an_error_and_the_engine_lets_go(launch, monkeypatch) -> None:
    live = launch(say(TEXT, end=False), step_s=0.005)
    whole = live.engine.stream

    async def broken(request_id: str):
        async for item in whole(request_id):
            yield item
            raise ValueError("no such item")

    monkeypatch.setattr(live.engine, "stream", broken)
    status, _headers, answer = live.post("/v1/completions", {"prompt": "x", "max_tokens": 4000})
    assert (status, answer["error"]["message"]) == (500, "the engine's stream broke: no such item")
    assert len(live.engine.aborts) == 1
    until(lambda: nothing_left(live))


def test_a_drain_lets_streams_finish_and_ends_the_rest(launch, monkeypatch) -> None:
    import asyncio

    clock = SimpleNamespace(**vars(time))  # the grace time ends when the test says so
    monkeypatch.setattr(service, "time", clock)
    clock.monotonic = lambda: 0.0
    live = launch(say(TEXT, end=False), step_s=0.005)
    live.engine.paused = True
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        short = pool.submit(live.events, "/v1/completions", {"prompt": "x", "max_tokens": 20})
        endless = pool.submit(live.events, "/v1/completions", {"prompt": "x", "max_tokens": 4000})
        until(lambda: len(live.engine.waiting) == 2)
        drained = asyncio.run_coroutine_threadsafe(live.service.drain(grace_s=3), live.loop)
        status, _headers, answer = live.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["reason"]) == (503, "draining")
        assert live.get("/ready")[0] == 503
        assert live.get("/health")[0] == 200
        live.engine.paused = False
        assert short.result()[-2]["choices"][0]["finish_reason"] == "length"
        assert not drained.done()
        clock.monotonic = lambda: time.monotonic() + 4
        drained.result(60)
        assert endless.result()[-2]["error"]["code"] == "draining"
    assert nothing_left(live)


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_does_not_wait_for_a_client_that_does_not_read(launch, monkeypatch, stream) -> None:
    import asyncio

    monkeypatch.setattr(service, "LAST_WORDS_S", 0.2)
    config = {"send_buffer_bytes": 4096, "slow_reader_buffer_bytes": 10**9, "slow_reader_s": 1000.0}
    live = launch(say(TEXT * 40, end=False), step_s=0.0, config=config, model={"max_model_len": 10**6})
    slow = connect(live, receive_buffer=4096)
    body = {"prompt": "x", "max_tokens": 2000, "stream": stream, "logprobs": 5}
    slow.sendall(raw_request(body, headers="X-Request-Id: slow\r\n"))
    until(lambda: live.engine.submitted and live.engine.is_empty)
    asyncio.run_coroutine_threadsafe(live.service.drain(grace_s=0), live.loop).result(50)
    assert nothing_left(live)
    (account,) = live.ledger.account("slow")
    account.verify()
    assert account.error.code == "draining"
    slow.close()


SERVE = """
import sys
sys.path.insert(0, {tests!r})
from server.conftest import FakeEngine, ModelInfo, ServerConfig, byte_tokenizer, say
from splittime.ledger.store import Ledger
from splittime.server.app import App, Service
from splittime.server.app import serve
engine = FakeEngine(say("abcdefgh", end=False), step_s=0.005)
config = ServerConfig(port=0, grace_s={grace_s})
app = App(Service(engine, byte_tokenizer(), Ledger(), config, ModelInfo(("fake",), 4096, 257, (256,))))
serve(app, config, on_listening=lambda port: print(port, flush=True))
print("served", flush=True)
"""


def is_draining(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 503 " in sock.recv(100)


@pytest.mark.parametrize("again", [False, True])
def test_sigterm_drains_and_a_second_one_ends_at_once(again: bool) -> None:
    """Where there is a second one, the first alone would leave the stream an hour."""
    script = SERVE.format(tests=str(Path(__file__).parents[1]), grace_s=3600 if again else 0.1)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(raw_request({"prompt": "x", "max_tokens": 3000, "stream": True}))
        sock.recv(10)
        os.kill(process.pid, signal.SIGTERM)
        if again:
            until(lambda: is_draining(port))
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(60) == 130
            return
        received = b""
        while part := sock.recv(65536):
            received += part
    assert b'"draining"' in received
    assert received.rstrip().endswith(b"0")
    assert process.wait(60) == 0
    assert process.stdout.read() == "served\n"


def test_connections_have_nodelay_and_a_bounded_send_buffer(launch) -> None:
    live = launch(say("x"))
    with connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sock.recv(100)
        until(lambda: len(live.server.server_state.connections) == 1)  # those of before are gone

        def options() -> tuple[int, int]:
            (connection,) = live.server.server_state.connections
            server_side = connection.transport.get_extra_info("socket")
            nodelay = server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            return nodelay, server_side.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

        nodelay, buffer_bytes = live.call(options)
    assert nodelay == 1
    assert buffer_bytes <= 2 * live.config.send_buffer_bytes
