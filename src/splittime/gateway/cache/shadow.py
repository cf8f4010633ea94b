"""How often a hit would have been wrong: on a share of hits the model runs all the same, and both answers are compared.

Two answers to one question are rarely the same words, so there are three outcomes: `same` (the same text, spaces
aside), `close` (the gate finds the same numbers, names, code and negations, and the n-grams are near), `different`. A
false hit is a `different` one. That errs to the wrong side for answers that say one thing in two ways, and misses those
that err in words of which the gate knows nothing: who needs better marks hits as wrong (`/cache/wrong`).
"""

import math

from splittime.gateway.cache.gate import features
from splittime.gateway.cache.ngrams import embedded

SAME, CLOSE, DIFFERENT = "same", "close", "different"
OUTCOMES = (SAME, CLOSE, DIFFERENT)
CLOSE_COSINE = 0.7
Z = 1.959963984540054  # of 95 %
MAX_CHARS = 4000


def outcome(given: str, fresh: str) -> str:
    """Returns how the answer that would have been given compares with the model's own."""
    given, fresh = " ".join(given.split())[:MAX_CHARS], " ".join(fresh.split())[:MAX_CHARS]
    if given == fresh:
        return SAME
    one, other = features(given), features(fresh)
    is_near = float(embedded(given) @ embedded(fresh)) >= CLOSE_COSINE
    says_same = (one.exact, one.bags, one.names) == (other.exact, other.bags, other.names)
    return CLOSE if is_near and says_same else DIFFERENT


def wilson(events: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's interval (1927) of a share, 95 %; from 0 to 1 where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, z2 = events / trials, Z * Z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    reach = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    low = 0.0 if events == 0 else max(0.0, middle - reach)
    return low, 1.0 if events == trials else min(1.0, middle + reach)
