"""The event loop that load is made on: uvloop where there is one, which reads a chunk at a third of asyncio's cost;
what ends it; and what must not stop it."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM)


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

    def first(number: int, frame: object) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        with contextlib.suppress(RuntimeError):  # a closed loop wakes nobody
            event.set()
            loop.call_soon_threadsafe(bool)  # wakes a loop that waits

    with contextlib.suppress(ValueError):  # not in the main thread
        for one in ENDING:
            signal.signal(one, first)
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
