"""What a hostile or broken client may do to a server that others use: hold connections, block the loop, fill memory."""

import asyncio
import contextlib
import re
import time

import msgspec
import pytest

from patience import until
from splittime.text.process import INLINE_NS
from splittime.text.tokenizer import Tokenizer
from splittime.web.edge import Edge, Names
from splittime.web.http import receive_nothing
from splittime.web.tenants import ApiKeys

from .conftest import say
from .test_endings import connect


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nx-slow: "])
def test_a_head_that_never_comes_does_not_hold_its_connection(launch, sent: bytes) -> None:
    server = launch(config={"body_timeout_s": 0.1})
    client = connect(server)
    client.sendall(sent)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""
    assert server.get("/health")[0] == 200


def test_a_kept_connection_may_rest_and_its_next_head_is_timed(launch) -> None:
    server = launch(config={"body_timeout_s": 0.2})
    client = connect(server)
    for _ in range(2):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.4)
    client.sendall(b"GET /hea")
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""


BEGIN = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
IN_CHUNKS = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (BEGIN, b"x: a\r\n"),
        (BEGIN + b"x: ", b"a"),
        (b"GET /", b"a"),
        (IN_CHUNKS + b"2\r\n{}\r\n0\r\n", b"x: a\r\n"),
        (IN_CHUNKS + b"2;", b"a"),
    ],
)
def test_what_is_in_no_body_has_a_bound(launch, begin: bytes, rest: bytes) -> None:
    server = launch()
    client = connect(server)
    client.sendall(begin)
    num_sent, piece = 0, rest * (2**14 // len(rest))
    with contextlib.suppress(ConnectionError):
        while num_sent < 2**25:
            client.sendall(piece)
            num_sent += len(piece)
    assert num_sent < 2**25
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_long_body_in_small_chunks_is_no_head(launch, size: int) -> None:
    server = launch()
    client = connect(server)
    body = b'{"prompt":"abc"' + b" " * 100_000 + b"}"
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    client.sendall(IN_CHUNKS + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n")
    assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_behind_an_upgrade_is_not_taken_for_a_request(launch) -> None:
    """The parser reads no body of a request that asks for another protocol (as Java's client does, for HTTP/2)."""
    server = launch()
    client = connect(server)
    client.settimeout(60)
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    client.sendall(head + b"content-length: %d\r\n\r\n" % len(inner))
    time.sleep(0.1)
    with contextlib.suppress(ConnectionError):
        client.sendall(inner)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1000):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"without Upgrade" in answer
    assert b'"version"' not in answer


def test_a_trailer_is_no_header(launch) -> None:
    server = launch(config={"api_key": ("secret",)})
    client = connect(server)
    client.sendall(IN_CHUNKS + b'10\r\n{"prompt":"abc"}\r\n0\r\nAuthorization: Bearer secret\r\n\r\n')
    assert client.recv(1000).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
def test_a_body_that_never_comes_is_408(launch, path: str) -> None:
    server = launch(config={"body_timeout_s": 0.2})
    client = connect(server)
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
    answer = client.recv(1000)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer


def test_an_answer_that_nobody_takes_does_not_hold_its_connection(launch, monkeypatch) -> None:
    monkeypatch.setattr("splittime.web.serving.STALL_MORE_S", 0.2)
    server = launch(config={"slow_reader_s": 0.2, "send_buffer_bytes": 4096})
    client = connect(server, receive_buffer=4096)
    own: list = []  # and not that of the launch, which may still be there

    def is_known() -> bool:
        there = list(server.server.server_state.connections)
        own[:] = [one for one in there if one.transport.get_extra_info("peername") == client.getsockname()]
        return bool(own)

    until(is_known)
    for _ in range(20):  # more answers than the two buffers hold
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    (connection,) = own
    until(lambda: connection.transport.is_closing())
    assert server.get("/health")[0] == 200


def test_numbers_beyond_64_bits_are_refused_and_can_be_shown(launch) -> None:
    server = launch()
    status, _, body = server.post("/v1/completions", {"prompt": "x", "seed": 2**70})
    assert (status, body["error"]["value"]) == (400, str(2**70))
    assert server.request("PATCH", "/knobs", {"max_num_seqs": 2**70})[0] == 400
    status, _, body = server.get("/ledger/requests")
    assert status == 200
    assert body["accounts"][-1]["error"]["message"] == "seed: invalid_value"  # no word of what was sent


@pytest.mark.parametrize("body", [{"prompt": "x", "model": "m" * 10**6}, {"prompt": "x", "f" * 10**6: 1}])
def test_an_error_keeps_little_of_what_was_sent(launch, body: dict) -> None:
    """The ledger remembers thousands of them."""
    server = launch()
    assert server.post("/v1/completions", body)[0] == (404 if "model" in body else 200)
    (account,) = server.ledger.accounts()
    assert len(msgspec.json.encode(account)) < 10_000


def test_the_unforeseen_is_a_500_in_the_form_of_all_errors(launch, monkeypatch) -> None:
    server = launch()
    monkeypatch.setattr(server.service.ledger, "account", lambda request_id: 1 / 0)
    status, _, body = server.get("/ledger/requests/x")
    assert status == 500
    assert body["error"]["code"] == "internal_error"


def test_the_unforeseen_after_an_answer_began_is_left_to_the_connection_and_no_second_answer_follows() -> None:
    sent = []

    async def half_an_answer(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message) -> None:
        sent.append(message["type"])

    edge = Edge(half_an_answer, Names("127.0.0.1"), ApiKeys())
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(edge(scope, receive_nothing, send))
    assert sent == ["http.response.start"]


@pytest.mark.parametrize(
    "messages", [[{"role": "r", "content": ""}] * 5000, [{"role": "r" * 5000, "content": "x"}]], ids=["many", "role"]
)
def test_no_chat_is_rendered_in_the_server(launch, monkeypatch, messages: list) -> None:
    monkeypatch.setattr(Tokenizer, "render_chat", None)
    server = launch()
    assert server.post("/v1/chat/completions", {"messages": messages})[0] == 400  # too long for the context
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 200


def test_texts_leave_the_loop_when_the_tokenizer_is_slow(launch, monkeypatch) -> None:
    server = launch()
    here: list[str] = []
    encode = server.service.tokenizer.encode

    def slow(text, **more):
        here.append(text)
        time.sleep(5 * INLINE_NS / 1e9)
        return encode(text, **more)

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    for text in ("ab", "cd"):
        assert server.post("/v1/completions", {"model": "fake", "prompt": text, "max_tokens": 1})[0] == 200
    assert here == ["ab"]
    assert [bytes(request.prompt_token_ids) for request in server.engine.submitted] == [b"ab", b"cd"]


def test_large_answers_are_made_beside_the_loop(launch, monkeypatch) -> None:
    server = launch()
    calls: list[str] = []
    submit = server.service.pool.submit
    monkeypatch.setattr(server.service.pool, "submit", lambda work, *args: calls.append("") or submit(work, *args))
    for path in ("/ledger/requests", "/ledger/steps", "/ledger/trace.json"):
        assert server.get(path)[0] == 200
    assert len(calls) == 3
    monkeypatch.setattr(Tokenizer, "decode", None)
    assert server.post("/detokenize", {"tokens": [65] * 1000})[2] == {"prompt": "A" * 1000}


@pytest.mark.parametrize("garbage", [b"zz\r\n", b"\x00\x01\r\n\r\n"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/health"])
def test_a_body_that_is_not_http_is_400_and_no_failure_of_ours(launch, caplog, path: str, garbage: bytes) -> None:
    server = launch(config={"max_body_bytes": 2, "body_timeout_s": 0.5})
    client = connect(server)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    client.sendall(head + garbage)
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1000):
            pass
    assert server.get("/health")[0] == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    "then", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00garbage\r\n\r\n"], ids=["get", "garbage"]
)
def test_a_client_that_goes_away_ends_what_it_had_asked_before_its_last_request(launch, caplog, then: bytes) -> None:
    server = launch(say("long " * 200, end=False), step_s=0.1)
    client = connect(server)
    body = b'{"prompt":"x","max_tokens":900}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-request-id: a\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body + then)
    until(lambda: server.engine.running or server.ledger.accounts())  # garbage ends all of its connection at once
    client.close()
    until(server.ledger.accounts)
    (account,) = server.ledger.accounts()
    assert (account.request_id, account.finish_reason) == ("a", "abort")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_drain_does_not_wait_for_an_engine_that_hangs(launch, monkeypatch) -> None:
    monkeypatch.setattr("splittime.server.service.ENGINE_ANSWER_S", 0.1)
    server = launch(step_s=60)
    monkeypatch.setattr(server.engine, "abort", lambda request_id: None)
    client = connect(server)
    body = b'{"prompt":"x","stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-request-id: a\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    until(lambda: server.engine.running)
    asyncio.run_coroutine_threadsafe(server.service.drain(grace_s=0), server.loop).result(50)  # a step takes 60 s
    received = b""
    while b'"code":"draining"' not in received:
        part = client.recv(10_000)
        assert part, received
        received += part
    (account,) = server.ledger.accounts()
    account.verify()
    assert account.error.code == "draining"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/knobs"])
def test_a_chunked_body_is_refused_as_soon_as_it_is_too_long(launch, path: str) -> None:
    """Not when it ends, which it does not."""
    server = launch(config={"max_body_bytes": 1000})
    client = connect(server)
    method = "PATCH" if path == "/knobs" else "POST"
    client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    client.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
    client.sendall(b"1\r\n \r\n")
    assert client.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_is_announced_as_too_long_is_not_waited_for(launch, path: str) -> None:
    server = launch(config={"max_body_bytes": 1000})
    client = connect(server)
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n".encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_of_just_the_limit_is_read(launch) -> None:
    server = launch(config={"max_body_bytes": 1000})
    body = b'{"prompt": "x", "max_tokens": 2}'
    assert server.post("/v1/completions", body.ljust(1000))[0] == 200
    assert server.post("/v1/completions", body.ljust(1001))[0] == 413


def test_who_does_not_take_a_whole_answer_is_cut(launch) -> None:
    config = {"slow_reader_s": 0.3, "send_buffer_bytes": 4096}
    server = launch(say("long " * 200, end=False), step_s=0.0002, config=config, model={"max_model_len": 10**6})
    client = connect(server, receive_buffer=4096)
    body = b'{"prompt":"x","max_tokens":3000,"logprobs":20}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: slow\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    until(lambda: server.ledger.account("slow"))
    (account,) = server.ledger.account("slow")
    account.verify()
    assert (account.error.code, account.error.limit) == ("slow_reader", 0.3)
    until(lambda: not server.server.server_state.connections)  # the connection is cut, not only given up


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip\r\ntransfer-encoding: chunked\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n", 501),
        (b"GET /version HTTP/2.0\r\n", 505),
        (b"GET /version HTTP/0.9\r\n", 505),
        (b"GET /version HTTP/3.7\r\n", 400),
        (b"GET /health HTTP/2.0\r\n", 505),
    ],
)
def test_a_head_that_others_may_read_otherwise_ends_its_connection(launch, head: bytes, status: int) -> None:
    client = connect(launch())
    client.settimeout(60)
    client.sendall(head + b"Host: localhost\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b"".join(iter(lambda: client.recv(1000), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"%d" % status]
    assert b"connection: close" in answer


def test_one_transfer_encoding_is_read_however_it_is_written(launch) -> None:
    client = connect(launch())
    client.sendall(
        IN_CHUNKS.replace(b"transfer-encoding: chunked", b"TRANSFER-encoding:  Chunked ")
        + b'10\r\n{"prompt":"abc"}\r\n0\r\n\r\n'
    )
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
