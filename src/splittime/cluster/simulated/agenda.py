"""What happens when, in virtual time: calls at their instants, in order."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """now_ns: the instant of the call that is being made. Calls of one instant are made in the order of their entry."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._calls: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._calls)

    def clock(self) -> int:
        return self.now_ns

    def at(self, at_ns: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have this called at `at_ns`, or now if that is over."""
        self._count += 1
        heapq.heappush(self._calls, (max(self.now_ns, round(at_ns)), self._count, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_ns + seconds * 1e9, call, *arguments)

    def run_one(self) -> None:
        self.now_ns, _, call, arguments = heapq.heappop(self._calls)
        call(*arguments)
