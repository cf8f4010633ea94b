"""How much time a tune has, and what is left of it in words."""

import time


class TimeBudget:
    """Runs from now on."""

    def __init__(self, minutes: float) -> None:
        self._begin_s, self._whole_s = time.monotonic(), minutes * 60

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._whole_s - self.spent_s)

    def __str__(self) -> str:
        left_s = self.left_s
        return f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
