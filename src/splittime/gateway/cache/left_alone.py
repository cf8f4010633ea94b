"""Asks those whose answer nobody needs, and leaves whoever fails again and again alone for a while."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from splittime.gateway.breaker import Breaker
from splittime.gateway.config import BreakerConfig

Found = TypeVar("Found")


class LeftAlone:
    def __init__(self, config: BreakerConfig) -> None:
        self._breaker = Breaker(config)

    async def unless(self, asking: Callable[[], Awaitable[Found | None]]) -> Found | None:
        """Returns what is answered; None where that fails (`OSError`, `ValueError`), or is not tried for now. An answer
        of None says nothing of who was asked."""
        if not self._breaker.allows(time.monotonic_ns()):
            return None
        self._breaker.begin(asking)
        try:
            found = await asking()
        except (OSError, ValueError):
            self._breaker.note_failure(time.monotonic_ns())
            return None
        finally:
            self._breaker.leave(asking)
        if found is not None:
            self._breaker.note_success()
        return found
