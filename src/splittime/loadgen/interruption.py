"""Work that somebody may want to end: each wait of a run outside its load goes through here."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from splittime.core.errors import EngineError

Result = TypeVar("Result")


async def unless(stop: asyncio.Event | None, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What the work gives; None, and the work cancelled, if `stop` is set first."""
    if stop is None:
        return await work
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def before_the_load(stop: asyncio.Event | None, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives. Raises `EngineError` if `stop` is set first: there is nothing to keep yet."""
    found = await unless(stop, work)
    if found is None:
        raise EngineError("interrupted before the load began: nothing was measured", code="interrupted")
    return found
