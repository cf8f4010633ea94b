"""A route's escalations while its config serves: its bound, and how many of its latest answers were asked anew.

Without a limit a bound that suits other traffic than today's would send everything to both models, which costs more
than the large one alone, and the large one is chosen for fewer.
"""

from collections import deque
from typing import Any

from splittime.gateway.config import EscalateConfig

LATEST = 100  # answers
FIRST = 10  # answers, of which a share is allowed before there were as many
OVER_SHARE, NO_TIME, NO_PLACE = "share", "deadline", "no_place"  # why an unsure answer is kept


class Escalations:
    """below: the bound in force, given or calibrated."""

    def __init__(self, config: EscalateConfig, below: float) -> None:
        self.below, self.tokens, self._at_most = below, config.tokens, config.at_most
        self._latest: deque[bool] = deque(maxlen=LATEST)

    @property
    def has_room(self) -> bool:
        """Returns whether one more may be asked anew now."""
        others = list(self._latest)[-(LATEST - 1) :]  # that will be the latest with it
        return sum(others) + 1 <= self._at_most * max(FIRST, len(others) + 1)

    def note(self, *, is_anew: bool) -> None:
        """An answer has been judged."""
        self._latest.append(is_anew)

    def stats(self) -> dict[str, Any]:
        return {"below": self.below, "judged": len(self._latest), "asked_anew": sum(self._latest)}
