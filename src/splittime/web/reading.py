"""Who reads what clients sent, and when: what is made of a body of 4 MB takes up to 0.1 s.

A short body is read here and now. A long one is read beside the event loop, in one thread, and the largest in another,
so that no other waits behind them. Keys share each by the bytes that were read for them (`core.shares`): whoever sends
a thousand bodies waits for itself. What of a key waits is bounded in bytes, and is let go when its sender leaves.

Work that an event loop with a token to write need not wait for: beside it, the interpreter's lock is held for
`TURN_S` at a time, not for Python's 5 ms; in it, what can be put off leaves the rest to a later turn of the loop.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from splittime.core.errors import Refused
from splittime.core.shares import KeyShares
from splittime.web import http
from splittime.web.tenants import Sharer

SHORT_BYTES = 2**14  # of a body, read in at most 2 ms, be it all tools
GIANT_BYTES = 2**18
MAX_WAITING_BYTES = 2**27  # of one key: 32 of the longest bodies

Result = TypeVar("Result")
TURN_S = 0.0005
MOST_PUT_OFF_NS = 2_000_000  # of a processor, in a turn of the loop


class _Turns:
    """Has the interpreter change its turns while some thread is at such work."""

    def __init__(self) -> None:
        self._lock, self._num_at_work, self._usual_s = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._num_at_work += 1
            if self._num_at_work == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(TURN_S)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_at_work -= 1
            if self._num_at_work == 0:
                sys.setswitchinterval(self._usual_s)


_TURNS = _Turns()


def in_short_turns(work: Callable[..., Result], *args: object) -> Result:
    """Returns what the work does."""
    with _TURNS:
        return work(*args)


class LoopTurn:
    """A turn of the event loop, shared by what can be put off, in the order in which it comes: where 64 answers end at
    once, who comes need not wait for all their books."""

    def __init__(self) -> None:
        self._begin_ns: int | None = None

    async def room(self) -> None:
        """Returns in a turn that has room left."""
        while (now_ns := time.thread_time_ns()) - (self._begin_ns or now_ns) >= MOST_PUT_OFF_NS:
            await asyncio.sleep(0)
        if self._begin_ns is None:
            self._begin_ns = now_ns
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._begin_ns = None


class BodySender(NamedTuple):
    """Who sent something, and how their leaving is learnt of."""

    sharer: Sharer
    receive: http.Receive


async def read_beside(sender: BodySender, num_bytes: int, work: Callable[..., Result], *args: object) -> Result:
    """Returns what the work makes of so many bytes. Raises `Refused` where too many of this key's wait, `Disconnected`
    as soon as the sender has left."""
    if num_bytes <= SHORT_BYTES:
        return work(*args)
    loop = asyncio.get_running_loop()
    reading = _line(loop, num_bytes > GIANT_BYTES).add(sender.sharer, num_bytes, partial(work, *args))
    gone = loop.create_task(http.until_gone(sender.receive))
    try:
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise http.Disconnected
        return reading.result()  # type: ignore[no-any-return]
    finally:
        gone.cancel()
        reading.cancel()
        del reading  # whose error has this frame


class WaitingWork(NamedTuple):
    sharer: Sharer
    num_bytes: int
    work: Callable[[], Any]


Reading = asyncio.Future[Any]  # of what comes of it; cancelled when nobody wants that any more


class ReadingLine:
    """What one event loop's clients have waiting for a thread, by key."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reader: ThreadPoolExecutor) -> None:
        self._new_future = loop.create_future
        self._reader, self._shares, self._is_busy = reader, KeyShares(), False
        self._lines: dict[str, dict[Reading, WaitingWork]] = {}

    def add(self, sharer: Sharer, num_bytes: int, work: Callable[[], Any]) -> Reading:
        """Raises `Refused` if too much of the key waits."""
        line = self._lines.setdefault(sharer.name, {})
        if line:
            _require_room(sharer, sum(one.num_bytes for one in line.values()) + num_bytes, len(line))
        reading = self._new_future()
        line[reading] = WaitingWork(sharer, num_bytes, work)
        self._shares.wait(self._shares.of(*sharer))
        reading.add_done_callback(partial(self._leave, sharer))
        self._begin_next()
        return reading

    def _leave(self, sharer: Sharer, reading: Reading) -> None:
        """Forget what its sender left before anybody began with it."""
        if reading in self._lines.get(sharer.name, ()):
            self._take(sharer.name, reading, is_served=False)

    def _take(self, name: str, reading: Reading, *, is_served: bool) -> WaitingWork:
        line = self._lines[name]
        waiting = line.pop(reading)
        if not line:
            del self._lines[name]
        share = self._shares.of(*waiting.sharer)
        self._shares.leave(share, is_served=is_served)
        if is_served:
            share.charge(waiting.num_bytes)
        return waiting

    def _begin_next(self) -> None:
        share = self._shares.first()
        if self._is_busy or share is None:
            return
        self._is_busy = True
        reading = next(iter(self._lines[share.name]))
        waiting = self._take(share.name, reading, is_served=True)
        running = reading.get_loop().run_in_executor(self._reader, in_short_turns, waiting.work)
        running.add_done_callback(partial(self._end, reading))

    def _end(self, reading: Reading, running: Reading) -> None:
        """Tell what came of it, if anybody still wants that, and go on with the next."""
        self._is_busy = False
        error = None if running.cancelled() else running.exception()
        if running.cancelled():
            reading.cancel()
        elif not reading.done():
            reading.set_result(running.result()) if error is None else reading.set_exception(error)
        self._begin_next()


def _require_room(sharer: Sharer, num_bytes: int, num_waiting: int) -> None:
    if num_bytes > MAX_WAITING_BYTES:
        raise Refused(
            f"{num_waiting} bodies of this key wait to be read: with this one {num_bytes} bytes",
            reason="queued_bodies",
            queued=num_waiting,
            limit=MAX_WAITING_BYTES,
            hint="send fewer long bodies at once, or wait for Retry-After",
        )


@cache
def _reader(is_giant: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="reading-giants" if is_giant else "reading-bodies")


_LINES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, ReadingLine]] = WeakKeyDictionary()


def _line(loop: asyncio.AbstractEventLoop, is_giant: bool) -> ReadingLine:
    lines = _LINES.setdefault(loop, {})
    if is_giant not in lines:
        lines[is_giant] = ReadingLine(loop, _reader(is_giant))
    return lines[is_giant]
