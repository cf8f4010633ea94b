"""Waiting for a state, however slow the machine."""

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 100.0) -> None:
    """Returns once the condition holds. Fails after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object], limit_s: float = 100.0) -> None:
    """Returns once the condition holds, and lets the event loop go on until then."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
