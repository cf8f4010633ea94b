"""Who reads what a client sent, and when: the loop's own thread what is short, one thread what is long, another the
giants, and keys by turns."""

import asyncio
import threading
from typing import Any

import pytest

from splittime.core.errors import Refused
from splittime.web import reading
from splittime.web.http import Disconnected
from splittime.web.reading import GIANT_BYTES, MAX_WAITING_BYTES, SHORT_BYTES, BodySender, read_beside
from splittime.web.tenants import Sharer

LONG = SHORT_BYTES + 1


class Client:
    """Sends nothing more, and may leave."""

    def __init__(self, key: str = "", weight: float = 1.0) -> None:
        self.left = asyncio.Event()
        self.sender = BodySender(Sharer(key, weight), self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class HeldReader:
    """Has the thread for long bodies busy until it is let go. order: what was read since."""

    def __init__(self) -> None:
        self._let_go, self.order = threading.Event(), []
        self._held = asyncio.ensure_future(read_beside(Client("first").sender, LONG, self._let_go.wait, 20))

    def submit(self, client: Client, name: str, num_bytes: int = LONG) -> asyncio.Task[None]:
        return asyncio.ensure_future(read_beside(client.sender, num_bytes, self.order.append, name))

    async def release(self, *tasks: asyncio.Task[None]) -> list[Any]:
        await settled()
        self._let_go.set()
        await self._held
        return await asyncio.gather(*tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def reader_of(num_bytes: int) -> str:
    async def main() -> str:
        return await read_beside(Client().sender, num_bytes, lambda: threading.current_thread().name)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("num_bytes", "reader"),
    [
        (0, "MainThread"),
        (SHORT_BYTES, "MainThread"),
        (SHORT_BYTES + 1, "reading-bodies_0"),
        (GIANT_BYTES, "reading-bodies_0"),
        (GIANT_BYTES + 1, "reading-giants_0"),
        (2**30, "reading-giants_0"),
    ],
)
def test_a_body_is_read_where_it_keeps_nobody_waiting(num_bytes: int, reader: str):
    assert reader_of(num_bytes) == reader
    assert reader_of(num_bytes) == reader  # a thread stays


async def test_what_the_reading_raises_is_raised():
    def fails() -> None:
        raise ValueError("no such text")

    async with asyncio.timeout(30):
        for num_bytes in (0, LONG, LONG):
            with pytest.raises(ValueError, match="no such text"):
                await read_beside(Client().sender, num_bytes, fails)


async def test_a_long_body_is_read_while_a_giant_is():
    read, let_go = threading.Event(), threading.Event()
    async with asyncio.timeout(30):
        giant = asyncio.ensure_future(read_beside(Client().sender, GIANT_BYTES + 1, let_go.wait, 20))
        await read_beside(Client().sender, LONG, read.set)
        assert not giant.done()
        let_go.set()
        assert await giant
    assert read.is_set()


async def test_a_key_that_sends_one_body_waits_for_one_of_a_key_that_sent_many():
    async with asyncio.timeout(30):
        reader = HeldReader()
        many = [reader.submit(Client("many"), f"many {n}") for n in range(6)]
        await settled()
        few = [reader.submit(Client("few"), f"few {n}") for n in range(2)]
        await reader.release(*many, *few)
        assert reader.order == ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3", "many 4", "many 5"]


async def test_keys_share_by_bytes_and_weight():
    async with asyncio.timeout(30):
        reader = HeldReader()
        heavy = [reader.submit(Client("heavy", 2.0), "heavy", 2 * LONG) for _ in range(8)]
        light = [reader.submit(Client("light"), "light") for _ in range(8)]
        double = [reader.submit(Client("long"), "long", 2 * LONG) for _ in range(8)]
        await reader.release(*heavy, *light, *double)
        first = reader.order[:10]
        assert (first.count("heavy"), first.count("light"), first.count("long")) == (4, 4, 2)


async def test_what_waits_is_let_go_when_its_sender_leaves():
    async with asyncio.timeout(30):
        reader, leaves, stays = HeldReader(), Client("a"), Client("a")
        left, read = reader.submit(leaves, "left"), reader.submit(stays, "read")
        await settled()
        leaves.left.set()
        with pytest.raises(Disconnected):
            await left
        assert await reader.release(read) == [None]
        assert reader.order == ["read"]


async def test_whoever_leaves_while_it_is_read_is_not_waited_for():
    begun, let_go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait(20)

    async with asyncio.timeout(30):
        client = Client()
        task = asyncio.ensure_future(read_beside(client.sender, LONG, work))
        await asyncio.to_thread(begun.wait, 20)
        client.left.set()
        with pytest.raises(Disconnected):
            await task
        let_go.set()
        assert await read_beside(Client().sender, LONG, lambda: 5) == 5


async def test_a_reading_that_is_cancelled_is_let_go():
    async with asyncio.timeout(30):
        reader = HeldReader()
        cancelled, read = reader.submit(Client(), "cancelled"), reader.submit(Client(), "read")
        await settled()
        cancelled.cancel()
        assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)
        await reader.release(read)
        assert reader.order == ["read"]


async def test_what_of_a_key_waits_is_bounded_in_bytes():
    async with asyncio.timeout(30):
        reader, leaves, size = HeldReader(), Client("many"), MAX_WAITING_BYTES // 4
        giant_held = threading.Event()
        held = asyncio.ensure_future(read_beside(Client("x").sender, size, giant_held.wait, 20))
        await settled()
        waiting = [reader.submit(leaves if n == 0 else Client("many"), "many", size) for n in range(4)]
        await settled()
        with pytest.raises(Refused, match="4 bodies of this key wait") as caught:
            await reader.submit(Client("many"), "too many", size)
        assert (caught.value.info.status, caught.value.reason, caught.value.info.limit) == (
            429,
            "queued_bodies",
            MAX_WAITING_BYTES,
        )
        assert caught.value.info.retry_after_s == 1.0
        other = reader.submit(Client("few"), "few", 2 * MAX_WAITING_BYTES)  # one of a key may be as long as it likes
        leaves.left.set()
        await settled()
        waiting.append(reader.submit(Client("many"), "again", size))
        giant_held.set()
        await asyncio.gather(reader.release(*waiting, other), held)
        assert sorted(reader.order) == ["again", "few", "many", "many", "many"]


async def test_nothing_is_kept_of_what_was_read():
    async with asyncio.timeout(30):
        for _ in range(3):
            await read_beside(Client("a").sender, LONG, int)
        (line,) = reading._LINES[asyncio.get_running_loop()].values()
        assert not line._lines
        assert not line._shares.waiting
        assert not line._is_busy
