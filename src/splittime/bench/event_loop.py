"""The event loop that load is made on: uvloop where there is one, which reads a chunk at a third of asyncio's cost;
what ends it; and what must not stop it.

How many connections one process of the client may hold: the system's limit on open files, and who will not fit.

A closed loop says beforehand how many it needs. One that cannot have them is refused before anything is sent: after the
run it would be VOID, with most of its requests spent on errors. An open loop needs as many as the server makes it need:
there the audit tells (`audit`, "sockets").
"""

import asyncio
import contextlib
import gc
import resource
import signal
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from splittime.bench.share import LoadShare
from splittime.core.errors import ConfigError

SPARE = 24  # files that are no connections of the load: pipes, timers, libraries, what a server is asked beside it
Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM)


def allow() -> None:
    """Raise this process' limit as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """On all open files of this process; 0 for none."""
    return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def check(shares: Sequence[LoadShare]) -> None:
    """Raises `ConfigError` if a closed loop needs more connections in a process than this may have."""
    needed, room = max(map(at_most, shares)), limit() - SPARE
    if limit() == 0 or needed <= room:
        return
    hint = f"Allow more with `ulimit -n {needed + SPARE}`"
    if room > 0:
        hint += f", deal them out with --workers {-(-sum(map(at_most, shares)) // room)}"
    what = f"{needed} requests at a time need as many connections, and a process may open {max(0, room)} here"
    raise ConfigError(what, param="concurrency", value=needed, limit=max(0, room), hint=f"{hint}, or ask for fewer.")


def at_most(share: LoadShare) -> int:
    """Connections at a time of a closed loop; 0 for an open one: not known."""
    if share.concurrency is None:
        return 0
    return min(share.concurrency * len(share.targets), share.max_in_flight or len(share.jobs), len(share.jobs))


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Returns what the work returns. Who handled a signal before handles it again: uvloop would leave its own handler,
    which swallows every later Ctrl-C."""
    before = {one: signal.getsignal(one) for one in ENDING}
    try:
        return _run(work)
    finally:
        work.close()  # it may not have begun
        for one, handler in before.items():
            if signal.getsignal(one) is not handler:
                signal.signal(one, handler)


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def interrupted() -> asyncio.Event:
    """Returns an event that the first Ctrl-C or SIGTERM sets, which ends a run with what was measured: also one that
    comes while the loop is being closed. The second ends the program."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    before = {one: signal.getsignal(one) for one in ENDING}

    def handle(number: int, frame: object) -> None:
        if event.is_set():  # no sooner: Python complains where a signal came already and its handler is gone
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
            return
        with contextlib.suppress(RuntimeError):  # a closed loop wakes nobody
            event.set()
            loop.call_soon_threadsafe(bool)  # wakes a loop that waits

    with contextlib.suppress(ValueError):  # not in the main thread
        for one in ENDING:
            signal.signal(one, handle)
    return event


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what is within as Ctrl-C does, so that what was changed is undone."""
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt(number: int, frame: object) -> None:
    """Does what Ctrl-C does: within a loop it cancels the work, where an exception would break the loop itself."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
