"""What a closed loop cannot see: the requests that it did not send while it waited for a server that stood still.

Its workers each wait for an answer before they ask again. A server that stands for 2 s so delays one request of each
worker, where users would have sent many more, and all of those would have waited: the tail that is shown is too good
("coordinated omission"). What would have been seen is estimated as HdrHistogram does: a request that waited so much
longer than usual stands for others, each begun a usual answer's time later. Waits are those for chunks, so that a long
answer is none.
"""

from collections.abc import Sequence
from itertools import pairwise

from splittime.ledger.client_book import Check, Ending, Outcome, Run
from splittime.ledger.derive import percentile

STALL = 10.0  # times the usual wait
TOO_GOOD = 1.5  # the tail that users would have felt, over the one that is shown
MIN_ANSWERS = 20
MOST_MISSED = 100_000  # of one request


def audit_closed_loop(run: Run) -> Check | None:
    """Checks the worst of the run's servers. Returns None where there is too little to go by."""
    found = [check for arm in range(len(run.arms)) if (check := _of_one(run.measured(arm))) is not None]
    return max(found, key=lambda check: check.value or 0.0, default=None)


def _of_one(measured: Sequence[Outcome]) -> Check | None:
    whole = [o for o in measured if o.ending is Ending.COMPLETE and o.sent_ns is not None and o.end_ns is not None]
    if len(whole) < MIN_ANSWERS:
        return None
    waits = [longest_wait_ns(outcome) for outcome in whole]
    usual_ns = max(1.0, percentile(waits, 50) or 0.0)
    each_ns = max(1.0, percentile([(o.end_ns or 0) - (o.sent_ns or 0) for o in whole], 50) or 0.0)
    missed = [felt for wait in waits if wait > STALL * usual_ns for felt in _not_sent(wait, each_ns)]
    told = [(percent, _ms(waits, percent), _ms([*waits, *missed], percent)) for percent in (90, 99)]
    percent, shown_ms, felt_ms = max(told, key=lambda one: one[2] / max(1e-6, one[1]))
    ratio = felt_ms / max(1e-6, shown_ms)
    ok = ratio <= TOO_GOOD
    sentence = "nothing points to requests that a stall kept from being sent"
    if not ok:
        sentence = (
            f"the server stood for up to {max(waits) / 1e6:,.0f} ms, and a closed loop sends nothing meanwhile: about "
            f"{len(missed):,} requests that users would have sent are missing, and the longest wait for a chunk would "
            f"be about {felt_ms:,.0f} ms at p{percent} instead of {shown_ms:,.0f} ms. Measure with --rate"
        )
    return Check(name="closed_loop", ok=ok, value=ratio, limit=TOO_GOOD, unit="times", sentence=sentence, voids=False)


def _ms(waits: Sequence[float], percent: int) -> float:
    return (percentile(waits, percent) or 0.0) / 1e6


def longest_wait_ns(outcome: Outcome) -> int:
    """For the first chunk or for a next one; without chunks, for the end."""
    sent_ns = outcome.sent_ns or 0
    instants = (sent_ns, *outcome.chunk_ns) if outcome.chunk_ns else (sent_ns, outcome.end_ns or sent_ns)
    return max(later - earlier for earlier, later in pairwise(instants))


def _not_sent(wait_ns: int, each_ns: float) -> list[float]:
    count = min(MOST_MISSED, int(wait_ns / each_ns))
    return [wait_ns - place * each_ns for place in range(1, count + 1)]
