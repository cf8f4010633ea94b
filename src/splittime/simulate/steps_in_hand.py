"""Steps of a coarse replica that follow each other, and how many of them have begun by when."""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from splittime.simulate.coarse import CoarseRequest


class StepsInHand(NamedTuple):
    """Steps that follow each other: the first takes `first_ns`, each next one `more_ns` more. late_ns: from a step's
    tokens to the begin of the next step. chunks: prompts' parts in it, of a single step."""

    begin_ns: int
    number: int
    first_ns: float
    more_ns: float
    late_ns: int
    chunks: "tuple[tuple[CoarseRequest, int], ...]" = ()

    @property
    def end_ns(self) -> int:
        return self.begin_ns + round(self.number * (self.first_ns + self.more_ns * (self.number - 1) / 2))

    def begun_by(self, now_ns: int) -> int:
        """Returns how many have begun by this time, at least one."""
        passed, half = now_ns - self.begin_ns, self.first_ns - self.more_ns / 2
        if self.more_ns > 0:
            count = (math.sqrt(half * half + 2 * self.more_ns * passed) - half) / self.more_ns
        else:
            count = passed / self.first_ns
        return min(self.number, max(1, math.ceil(count)))
