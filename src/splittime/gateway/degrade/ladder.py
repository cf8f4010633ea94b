"""Which stage of the ladder the gateway is on: entered by the queue's wait, left with hysteresis.

The wait is that of whoever has waited longest now. A stage is entered as soon as the wait reaches its `enter_wait_s`,
and left when the wait has been at most its `leave_wait_s` for `hold_s` without a break: a queue that swings about one
bound does not swing the answers.
"""

from collections.abc import Callable, Sequence

from splittime.gateway.config import DegradationConfig

QUEUE_WAIT = "queue_wait"  # the reason of every stage so far


class Ladder:
    """stages: the lightest first. wait_ns: how long whoever has waited longest has waited, at this instant."""

    def __init__(self, stages: Sequence[DegradationConfig], wait_ns: Callable[[int], int]) -> None:
        self.stages = tuple(stages)
        self._wait_ns = wait_ns
        self._calm_since_ns: int | None = None
        self.level = 0  # stages that are entered

    def observe(self, now_ns: int) -> int:
        """Returns the level at this instant; to be called when somebody comes or goes."""
        if not self.stages:
            return 0
        wait_s = self._wait_ns(now_ns) / 1e9
        while self.level < len(self.stages) and wait_s >= self.stages[self.level].enter_wait_s:
            self.level += 1
            self._calm_since_ns = None
        self._maybe_leave(wait_s, now_ns)
        return self.level

    def _maybe_leave(self, wait_s: float, now_ns: int) -> None:
        while self.level and wait_s <= self.stages[self.level - 1].leave_wait_s:
            if self._calm_since_ns is None:
                self._calm_since_ns = now_ns
            hold_ns = int(self.stages[self.level - 1].hold_s * 1e9)
            if now_ns - self._calm_since_ns < hold_ns:
                return
            self.level -= 1
            self._calm_since_ns += hold_ns  # the next one is held for its own time
        self._calm_since_ns = None
