"""What lay in a socket while the event loop was busy is in the account of who lay there, and counted; what ends at once
does not keep the loop busy all at once."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from patience import until
from splittime.core.errors import ErrorInfo
from splittime.server.group import Group
from splittime.server.visit import Visit
from splittime.text.process import FLOOR_CHARS, INLINE_NS, InlineTokenizing
from splittime.web import reading
from splittime.web.reading import MOST_PUT_OFF_NS, LoopTurn
from splittime.web.tenants import ANYBODY

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


@pytest.fixture
def worked(monkeypatch):
    """Returns what has the loop's processor time go by, a third of a turn's."""
    spent_ns = [1]
    monkeypatch.setattr(reading, "time", SimpleNamespace(thread_time_ns=lambda: spent_ns[0]))

    def work() -> None:
        spent_ns[0] += MOST_PUT_OFF_NS // 3 + 1

    return work


def test_what_can_be_put_off_is_done_in_its_order_and_who_comes_gets_a_turn_between(worked) -> None:
    async def main() -> list[object]:
        turn, done, loop = LoopTurn(), list[object](), asyncio.get_running_loop()

        async def one(number: int) -> None:
            await turn.room()
            if number == 0:
                loop.call_soon(done.append, "who came")
            worked()
            done.append(number)

        await asyncio.gather(*map(one, range(9)))
        return done

    assert asyncio.run(main()) == [0, 1, 2, "who came", 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_many_books_that_close_at_once_share_the_loop_and_stay_as_they_were(launch, worked, how: str) -> None:
    """Not even a shutdown between them makes failures of answers that were given."""
    live, filed, seen = launch(say("ab")), [], []
    quota = live.service.quota(ANYBODY)
    file = live.service.file_account

    def filing(account) -> None:
        if not filed:
            group, error = (
                next(iter(live.service.groups.values())),
                ErrorInfo("overloaded_error", "over", "draining", 503),
            )
            live.loop.call_soon(lambda: (seen.append(len(filed)), group.end_early(error)))
        assert quota.num_open == 0  # who has the answer may ask again
        filed.append(account)
        worked()
        file(account)

    live.service.file_account = filing
    body = {"prompt": ["a", "b"], "n": 16, "max_tokens": 2, "stream": how == "stream"}
    if how == "whole":
        assert live.post("/v1/completions", body)[0] == 200
    else:
        assert live.events("/v1/completions", body)[-1] == "[DONE]"
    until(lambda: len(filed) == 32 and not live.service.num_open)
    assert seen[0] < 32
    assert [account.error for account in filed] == [None] * 32


def test_a_visit_that_is_cancelled_between_its_books_closes_them_all() -> None:
    closed: list[tuple[int, int]] = []

    async def room() -> None:
        if len(closed) == 2:
            raise asyncio.CancelledError

    visit = SimpleNamespace(
        service=SimpleNamespace(turn=SimpleNamespace(room=room)),
        close_choice=lambda choice, at_ns: closed.append((choice, at_ns)),
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Visit._close(visit, range(5), 7))
    assert set(closed) == {(choice, 7) for choice in range(5)}


class Told:
    """An engine's client that is told what to do, and says nothing, nor that anything has ended."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def submit(self, request) -> None:
        self.told.append(f"submit {request.request_id}")

    def abort(self, request_id: str) -> None:
        self.told.append(f"abort {request_id}")

    async def stream(self, request_id: str):
        yield await asyncio.Event().wait()


@pytest.mark.parametrize("most", [3, 2])
def test_choices_are_submitted_in_turns_that_have_room_and_all_or_none(most: int) -> None:
    """All 2,048 inputs that a body may have took 72 ms of the loop. most: then there is no more room for ever."""
    client, place = Told(), SimpleNamespace(give_up=lambda: client.told.append("give up"))
    choices = [
        SimpleNamespace(
            request=SimpleNamespace(request_id=name), is_done=False, error=None, token_ids=(), cancelled_ns=None
        )
        for name in "abc"
    ]

    async def room() -> None:
        client.told.append("room")
        if client.told.count("room") > most:
            await asyncio.Event().wait()

    async def main() -> None:
        starting = asyncio.ensure_future(Group("g", client, choices, place, None, lambda: None).start(room))
        while client.told.count("room") <= most and not starting.done():
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(main())
    submitted = [word for name in "abc"[:most] for word in ("room", f"submit {name}")]
    taken_back = ["room", "abort a", "abort b", "give up"] if most < 3 else []
    assert client.told == submitted + taken_back
