"""Who is refused before the queue is full: by chance, and the more surely the more of its share a tenant holds.

A queue that takes everything until it is full and nothing then is a cliff: whoever comes late is refused whosever the
queue is, or another's request that has waited must go. So each tenant has a part of the queue as its weight is among
the tenants that are active now, and from `shed_from` of that part on its newcomers are refused with a chance that rises
evenly to one at the whole part: random early detection (Floyd and Jacobson 1993), for each tenant. What a tenant asks
beyond its part is thus refused when its head has been read, and nobody's place is taken by it.

One draw decides for a request, however often it is looked at.
"""

import math
from collections.abc import Iterable
from typing import Protocol

FORGET_S = 10.0  # in which a rate forgets all but 1/e
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


class Sharing(Protocol):
    """What is asked of a tenant's share."""

    weight: float

    @property
    def is_active(self) -> bool: ...


def part_of(own: Sharing, all_shares: Iterable[Sharing]) -> float:
    """Returns the part of the queue that is this tenant's: its weight among those active, itself included."""
    weights = sum(share.weight for share in all_shares if share.is_active and share is not own)
    return own.weight / (own.weight + weights)


def chance(filled: float, shed_from: float) -> float:
    """Returns the chance with which a newcomer is refused. filled: how much of its part its tenant holds."""
    if filled <= shed_from:
        return float(filled >= 1.0)
    return min(1.0, (filled - shed_from) / (1.0 - shed_from)) if shed_from < 1.0 else 1.0


class TokenRate:
    """Tokens a second, of late: a sum that decays, over the time for which it has been kept."""

    def __init__(self) -> None:
        self._sum, self._at_ns, self._since_ns = 0.0, 0, 0

    def add(self, tokens: int, now_ns: int) -> None:
        self._decay(now_ns)
        self._sum += tokens

    def per_s(self, now_ns: int) -> float | None:
        """None before anything was added, or once all of it is forgotten."""
        self._decay(now_ns)
        kept_s = FORGET_S * -math.expm1((self._since_ns - now_ns) / 1e9 / FORGET_S)
        return self._sum / kept_s if self._sum >= 1.0 and kept_s > 0 else None

    def _decay(self, now_ns: int) -> None:
        if self._at_ns:
            self._sum *= math.exp((self._at_ns - now_ns) / 1e9 / FORGET_S)
        else:
            self._since_ns = now_ns
        self._at_ns = now_ns


def retry_after_s(waiting_tokens: int, per_s: float | None) -> float:
    """Returns when to come back: when what waits of this tenant now has been served, as it is served now."""
    if per_s is None:
        return LEAST_RETRY_S
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, waiting_tokens / per_s))
