"""The excerpt of the books that is replayed, to say what a change would do: the latest requests, and their steps.

A replay starts with an empty server. So the excerpt begins where the fewest requests were in flight; these are left
out, and counted (`Excerpt.num_open`). It ends with the last request that has ended: on a live server some that came
before are still open, and the ledger does not have them yet.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from splittime.diagnose.books import Books
from splittime.ledger.account import ClosedAccount
from splittime.simulate.recorded import Recorded

MAX_REQUESTS = 500
MAX_STEPS, MOST_STEPS = 4_000, 12_000  # the latter where the former begins behind a queue
FEW = 0.1  # in flight at the begin, of those that come later: a queue left out makes the replay too quick
MIN_SHARE = 0.5  # of the latest requests: at least so many are kept, however quiet a later begin would be


class Excerpt(NamedTuple):
    """recorded: what is replayed. num_open: requests in flight at its begin, which are left out."""

    recorded: Recorded
    num_open: int


def latest_excerpt(books: Books) -> Excerpt | None:
    """Returns at most `MAX_REQUESTS` requests in about `MAX_STEPS` steps; None for books without steps or facts."""
    if not books.steps or books.facts is None:
        return None
    by_start = sorted(books.accounts, key=lambda account: account.start_ns)
    for most in (MAX_STEPS, MOST_STEPS):
        first_ns = books.steps[-most].begin_ns if len(books.steps) > most else 0
        latest = [account for account in by_start if account.start_ns >= first_ns][-MAX_REQUESTS:]
        begin, num_open = _quietest(latest, books.accounts) if latest else (0, 1)
        if num_open <= FEW * (len(latest) - begin):
            break
    if not latest:
        return None
    kept = latest[begin:]
    steps = [step for step in books.steps if step.end_ns > kept[0].start_ns]
    ordered = sorted(kept, key=lambda account: account.end_ns)
    return Excerpt(Recorded(ordered, steps, books.facts), num_open)


def _quietest(latest: Sequence[ClosedAccount], accounts: Sequence[ClosedAccount]) -> tuple[int, int]:
    """Returns at which of the requests to begin, and how many others were in flight when it came."""
    starts = sorted(account.start_ns for account in accounts)
    ends = sorted(account.end_ns for account in accounts)
    last = int(len(latest) * (1 - MIN_SHARE))
    in_flight = [bisect_right(starts, a.start_ns - 1) - bisect_right(ends, a.start_ns) for a in latest[: last + 1]]
    fewest = min(in_flight)
    return in_flight.index(fewest), fewest
