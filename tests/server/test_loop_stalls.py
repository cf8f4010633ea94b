"""What lay in a socket while the event loop was busy is in the account of who lay there, and counted."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from patience import until
from splittime.text.process import FLOOR_CHARS, INLINE_NS, InlineTokenizing

from .conftest import LiveServer, say

STALL_S = 0.1
COARSE_NS = 20_000_000  # the kernel's ticks are 4 or 10 ms
BODY = b'{"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2}'


def ask(connection: socket.socket, name: str) -> int:
    """Send a request; the instant."""
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"X-Request-Id: {name}")
    head = "\r\n".join([*lines, f"Content-Length: {len(BODY)}", "", ""])
    connection.sendall(head.encode() + BODY)
    return time.monotonic_ns()


def answered(connection: socket.socket) -> None:
    connection.settimeout(60)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def stall(server: LiveServer) -> Iterator[None]:
    """The loop stands still for the length of the block, and `STALL_S` more."""
    begun, over = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        over.wait(60)

    server.loop.call_soon_threadsafe(stand)
    begun.wait(60)
    yield
    time.sleep(STALL_S)
    over.set()


def account(server: LiveServer, name: str):
    until(lambda: server.ledger.account(name))
    return server.ledger.account(name)[0]


def test_requests_that_lay_in_their_sockets(launch):
    server = launch(say("ab"))
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address) as kept, socket.socket() as new:
        ask(kept, "before")
        answered(kept)
        with stall(server):
            new.connect(address)
            sent_ns = {"kept": ask(kept, "kept"), "new": ask(new, "new")}
        answered(kept)
        answered(new)
    for name, at_ns in sent_ns.items():
        book = account(server, name)
        assert book.start_ns - at_ns > STALL_S * 1e9
        assert book.start_ns - at_ns < book.unseen_ns + COARSE_NS
        book.verify()
    assert "splittime_unseen_seconds_sum" in server.get("/metrics")[2].decode()


def test_a_slow_tokenizer_leaves_the_loop_and_a_quick_one_comes_back():
    inline = InlineTokenizing(1024)
    assert inline.takes(1024)
    assert not inline.takes(1025)
    inline.learn(10, 30 * INLINE_NS)
    assert not inline.takes(1)
    for _ in range(100):
        inline.learn(FLOOR_CHARS, INLINE_NS // 4)
    assert inline.takes(10)
