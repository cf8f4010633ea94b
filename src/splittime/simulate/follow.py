"""Requests that come when an answer has ended, as `bench` sends them: a session's next turn, a closed loop's next one.

A turn comes at its own time, or `think_ns` after the turn before has ended, if that is later. In a closed loop each
worker takes another request at the instant at which its last one has ended: a turn that is due, else the next in order.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from splittime.simulate.trace import TracedRequest


class Followers:
    """requests: those with `follows`, in the order in which workers take them."""

    def __init__(self, requests: Iterable[TracedRequest]) -> None:
        self._next_turns: dict[str, TracedRequest] = {}
        self._in_order: deque[TracedRequest] = deque()
        self._due: list[tuple[int, int, TracedRequest]] = []  # turns of a closed loop, by when they may be taken
        self._free_workers = self._count = 0
        for traced in requests:
            assert traced.follows is not None
            if traced.follows.request_id is None:
                self._in_order.append(traced)
            else:
                self._next_turns[traced.follows.request_id] = traced
        self._is_closed = bool(self._in_order)

    def __bool__(self) -> bool:
        return bool(self._next_turns or self._in_order or self._due)

    def ended(self, request_id: str, at_ns: int) -> Iterator[TracedRequest]:
        """Returns who comes because of that, at their times."""
        turn = self._next_turns.pop(request_id, None)
        if self._is_closed:
            self._free_workers += 1
            if turn is not None and turn.follows is not None:
                self._count += 1
                heapq.heappush(self._due, (at_ns + turn.follows.think_ns, self._count, turn))
            yield from self._taken(at_ns)
        elif turn is not None and turn.follows is not None:
            yield from _coming(turn, max(turn.arrived_ns, at_ns + turn.follows.think_ns))

    def _taken(self, now_ns: int) -> Iterator[TracedRequest]:
        """Returns what the free workers take."""
        while self._free_workers and (self._due or self._in_order):
            self._free_workers -= 1
            if self._due and (self._due[0][0] <= now_ns or not self._in_order):
                due_ns, _, traced = heapq.heappop(self._due)
                yield from _coming(traced, max(now_ns, due_ns))
            else:
                yield from _coming(self._in_order.popleft(), now_ns)


def _coming(traced: TracedRequest, at_ns: int) -> Iterator[TracedRequest]:
    """Returns the request at this time; nothing if that is too late for it."""
    assert traced.follows is not None
    if traced.follows.until_ns is None or at_ns < traced.follows.until_ns:
        yield traced.moved(at_ns - traced.arrived_ns)
