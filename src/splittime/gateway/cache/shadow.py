"""How often a hit would have been wrong: on a share of hits the model runs all the same, and both answers are compared.

Two answers to one question are rarely the same words, so there are four outcomes: `same` (the same text, spaces aside),
`close` (other words, and the verifier says that they say the same), `different`, and `unjudged` (the verifier gave no
verdict). A false hit is a `different` one, and the rate is of those that were judged. Without a verifier, which equal
requests need not have, other words are `different`: that errs to the wrong side. A verifier errs too: who needs better
marks hits as wrong (`/cache/wrong`).
"""

import math
from collections.abc import Awaitable, Callable

SAME, CLOSE, DIFFERENT, UNJUDGED = "same", "close", "different", "unjudged"
JUDGED = (SAME, CLOSE, DIFFERENT)
OUTCOMES = (*JUDGED, UNJUDGED)
Z = 1.959963984540054  # of 95 %
MAX_CHARS = 4000

SaysSame = Callable[[str, str], Awaitable[bool | None]]


async def outcome(given: str, fresh: str, says_same: SaysSame | None) -> str:
    """Returns how the answer that would have been given compares with the model's own."""
    given, fresh = " ".join(given.split()), " ".join(fresh.split())
    if given == fresh:
        return SAME
    if says_same is None:
        return DIFFERENT
    if max(len(given), len(fresh)) > MAX_CHARS:
        return UNJUDGED
    return {True: CLOSE, False: DIFFERENT, None: UNJUDGED}[await says_same(given, fresh)]


def wilson(events: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's interval (1927) of a share, 95 %; from 0 to 1 where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, z2 = events / trials, Z * Z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    reach = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    low = 0.0 if events == 0 else max(0.0, middle - reach)
    return low, 1.0 if events == trials else min(1.0, middle + reach)
