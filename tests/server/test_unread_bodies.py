"""A body that nobody asked for: the answer arrives, little of the body is read, the connection ends or goes on."""

import contextlib
import socket
import time

import pytest

from patience import until
from splittime.web.edge import LAST, BoundedBody
from splittime.web.http import TRANSPORT

from .conftest import LiveServer
from .test_endings import connect

CHUNKED, LONG = "Transfer-Encoding: chunked", "Content-Length: 1000000"
ROUTES = [
    ("GET", "/health", 200),
    ("GET", "/metrics", 200),
    ("HEAD", "/v1/models", 200),
    ("GET", "/dashboard/static/app.js", 200),
    ("POST", "/nowhere", 404),
    ("DELETE", "/v1/completions", 405),
    ("POST", "/sleep", 413),
    ("POST", "/v1/completions", 413),
]


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def dribble(server: LiveServer, client: socket.socket, piece: bytes) -> None:
    """Send on and on, until the server has let go of the connection."""

    def is_over() -> bool:
        with contextlib.suppress(OSError):
            client.sendall(piece)
        time.sleep(0.05)
        return not server.server.server_state.connections

    until(is_over)


@pytest.mark.parametrize("length", [CHUNKED, LONG])
@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_a_body_by_the_byte_does_not_hold_its_connection(
    launch, monkeypatch, method: str, path: str, status: int, length: str
) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_S", 0.2)
    server = launch(config={"max_body_bytes": 10})
    until(lambda: not server.server.server_state.connections)
    client = connect(server)
    client.sendall(head(method, path, length))
    byte = b"1\r\nx\r\n" if length is CHUNKED else b"x"
    if status == 413 and length is CHUNKED:
        client.sendall(byte * 100)
    assert client.recv(20).startswith(f"HTTP/1.1 {status}".encode())
    dribble(server, client, byte)
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("config", [{"api_key": ("secret",)}, {}], ids=["no key", "another's name"])
def test_nor_does_one_of_who_may_not_come_in(launch, monkeypatch, config: dict) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_S", 0.2)
    server = launch(config=config)
    client = connect(server)
    asked = head("POST", "/v1/completions", LONG)
    client.sendall(asked if config else asked.replace(b"localhost", b"evil.example"))
    assert client.recv(20).startswith(b"HTTP/1.1 401" if config else b"HTTP/1.1 403")
    dribble(server, client, b"x")


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_little_of_it_is_read(launch, monkeypatch, path: str) -> None:
    """As much as the two systems hold and the bound; here far less than what is sent in the time."""
    monkeypatch.setattr("splittime.web.http.LINGER_S", 60.0)
    monkeypatch.setattr("splittime.web.http.LINGER_BYTES", 100_000)
    server = launch()
    client = connect(server)
    client.sendall(head("GET", path, "Content-Length: 100000000000"))
    assert client.recv(20).startswith(b"HTTP/1.1 200")
    with contextlib.suppress(OSError):
        for _ in range(1000):
            client.sendall(b"x" * 10**6)
        pytest.fail("a gigabyte was read")


def test_a_body_that_ends_soon_leaves_the_connection_to_the_next_request(launch, monkeypatch) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_BYTES", 500_000)
    server = launch(config={"api_key": ("secret",)})
    client = connect(server)
    for _ in range(3):
        client.sendall(head("POST", "/v1/completions", "Content-Length: 300000"))
        assert client.recv(20).startswith(b"HTTP/1.1 401")
        client.sendall(b"x" * 300_000)
        rest = b""
        while b"Bearer KEY" not in rest:  # the end of the answer
            rest += client.recv(4096)
    client.sendall(head("GET", "/health"))
    assert client.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_the_answer_to_a_body_too_long_arrives_whole(launch, connection: str) -> None:
    """Not overtaken by a reset, also where the client sends all of it before it reads."""
    server = launch()
    for path in ("/v1/completions", "/tokenize"):
        client = connect(server)
        lines = (f"Connection: {connection}", f"Content-Length: {8 * 2**20}")
        client.sendall(head("POST", path, *lines) + b" " * (8 * 2**20))
        assert client.recv(20).startswith(b"HTTP/1.1 413")


def test_a_body_that_takes_too_long_ends_its_connection(launch, monkeypatch) -> None:
    monkeypatch.setattr("splittime.web.http.LINGER_S", 0.05)
    server = launch(config={"body_timeout_s": 0.2})
    until(lambda: not server.server.server_state.connections)
    for path in ("/v1/completions", "/tokenize", "/sleep"):
        client = connect(server)
        client.sendall(head("POST", path, "Content-Length: 50") + b"{")
        assert client.recv(20).startswith(b"HTTP/1.1 408")
        dribble(server, client, b"")


def test_a_body_that_is_read_past_wakes_nobody(launch, monkeypatch) -> None:
    """4 MB to a path that is none: the loop does no more for them than the parser."""
    pieces, receive = [], BoundedBody.receive

    async def counted(self: BoundedBody) -> dict:
        pieces.append(await receive(self))
        return pieces[-1]

    monkeypatch.setattr(BoundedBody, "receive", counted)
    server = launch()
    client = connect(server)
    client.sendall(head("POST", "/nowhere", f"Content-Length: {2**22}"))
    assert client.recv(20).startswith(b"HTTP/1.1 404")
    client.sendall(b"x" * 2**22 + head("GET", "/health"))
    until(lambda: b"HTTP/1.1 200" in client.recv(4096))
    assert len(pieces) < 5
    assert sum(len(one["body"]) for one in pieces) < 2**20


def test_what_comes_behind_an_unread_body_is_the_next_request_with_its_own(launch) -> None:
    """The body that nobody reads is whole when its answer is, and the next one has begun."""
    server = launch()
    client = connect(server)
    asked = b'{"prompt": "a"}'
    unread = head("POST", "/nowhere", "Content-Length: 9") + b"x" * 9
    client.sendall(unread)
    told = client.recv(4096)
    assert told.startswith(b"HTTP/1.1 404")
    while not told.endswith(b"}"):  # it may come in pieces
        told += client.recv(4096)
    (connection,) = server.server.server_state.connections
    until(lambda: connection.cycle.response_complete)
    assert connection._skip_timer is None
    client.sendall(unread + head("POST", "/tokenize", f"Content-Length: {len(asked)}"))
    told = client.recv(4096)
    assert told.startswith(b"HTTP/1.1 404")
    client.sendall(asked)
    while b'"tokens"' not in told:
        piece = client.recv(4096)
        assert piece, told
        told += piece


class Peer:
    """The other side of a `BoundedBody`: what comes in, what went out, and how often the rest was to be read past."""

    def __init__(self, *parts: bytes) -> None:
        self.parts, self.sent, self.num_skips = list(parts), [], 0

    async def receive(self) -> dict:
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    def get_protocol(self) -> "Peer":
        return self

    def skip_body(self, scope: dict) -> None:
        self.num_skips += 1


START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"a", "more_body": True}
END = {"type": "http.response.body", "body": b"b", "more_body": False}
KEPT_BACK = [START, PIECE, {**END, "more_body": True}, LAST]


@pytest.mark.parametrize(
    ("headers", "parts", "num_read", "sent", "num_skips"),
    [
        ([], [], 0, [START, PIECE, END], 0),
        ([(b"content-length", b"0")], [], 0, [START, PIECE, END], 0),
        ([(b"content-length", b"2")], [b"xy"], 0, KEPT_BACK, 1),
        ([(b"content-length", b"2")], [b"xy"], 1, [START, PIECE, END], 0),
        ([(b"transfer-encoding", b"chunked")], [b"x", b"y"], 1, KEPT_BACK, 1),
        ([(b"content-length", b"30")], [b"x" * 5, b"x" * 5, b"x" * 20], 0, KEPT_BACK, 1),
    ],
)
async def test_the_end_of_an_answer_waits_for_an_unread_body_alone(
    headers: list, parts: list, num_read: int, sent: list, num_skips: int
) -> None:
    peer = Peer(*parts)
    bounded = BoundedBody({"headers": headers, "extensions": {TRANSPORT: peer}}, peer.receive, peer.send)
    for _ in range(num_read):
        await bounded.receive()
    assert not bounded.has_begun
    for message in (START, PIECE, END):
        await bounded.send(message)
        assert bounded.has_begun
    await bounded.end()
    assert peer.sent == sent
    assert peer.num_skips == num_skips
    assert not peer.parts
