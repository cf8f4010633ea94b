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
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def interrupted() -> asyncio.Event:
    """Returns an event that the first Ctrl-C or SIGTERM sets, which ends a run with what was measured. The second ends
    the program."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def first() -> None:
        event.set()
        for one in ENDING:
            loop.remove_signal_handler(one)

    with contextlib.suppress(NotImplementedError, ValueError):
        for one in ENDING:
            loop.add_signal_handler(one, first)
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
    raise KeyboardInterrupt


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
