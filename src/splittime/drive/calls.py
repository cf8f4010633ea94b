"""Calls to the engine that it answers by their number: each gets one answer or one error."""

import asyncio
import itertools
from typing import Any

from splittime.core.errors import ErrorInfo, SplittimeError, error_from_info


class Calls:
    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def new_number(self) -> int:
        return next(self._numbers)

    async def answer(self, number: int) -> Any:
        """Returns the answer that `settle` gets for this call, or raises its error."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            del self._waiting[number]

    def settle(self, number: int, answer: Any, error: ErrorInfo | None) -> None:
        """Ignores the answer to a call that nobody awaits any more."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error_from_info(error))

    def fail_all(self, error: SplittimeError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
