"""What the rules share: sums over accounts, and how much of the requests' time something took.

The request book's time is the measure of all shares: the sum over requests of the wall time that each felt. Waits are
taken from the causes that the scheduler stated at the moment, never from a threshold on a gauge.

How much of the requests' time something took, and how sure that is: what every finding claims, and must be sure of.

    share     = lost / felt                                     both summed over the requests
    interval  = share + what the mean of (lost - share * felt) may be off / mean of felt  (the ratio, linearised)

Neighbouring requests lose together, and count for fewer, and a run that was spared the long queues reaches further
upward (`stats.intervals`). The interval says what another run of the same load would show; it is wide where few
requests, or one event, lost it all. A finding is told only if the whole interval is worth acting on: `of_requests` and
`ratio` make the share, `unsure` says what to answer where it is not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot
from typing import Any

import msgspec
import numpy

from splittime.core.request import FinishReason
from splittime.diagnose.books import Books
from splittime.diagnose.finding import OF_REQUESTS, OF_TIME, Abstention, RuleEnd
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.stats.intervals import MIN_REQUESTS, spread_of, upward

WORST = 5  # ids to name in a finding: enough to look at, few enough to read
CERTAIN, LIKELY, POSSIBLE = 0.95, 0.8, 0.6  # stated by the scheduler; computed from records; inferred from a pattern

Span = tuple[int, int]


def served(accounts: Iterable[ClosedAccount]) -> list[ClosedAccount]:
    """The accounts of requests that reached the engine, by start. A refused one has an account, and no time there."""
    return sorted((a for a in accounts if a.finish_reason != "refused"), key=lambda account: account.start_ns)


def total_ns(accounts: Iterable[ClosedAccount]) -> int:
    """The requests' time: the denominator of all shares."""
    return max(1, sum(account.end_ns - account.start_ns for account in accounts))


def num_requests(accounts: Iterable[ClosedAccount], wanted: Iterable[str] | None = None) -> int:
    """Returns how many HTTP requests these are of; of these accounts, by id."""
    ids = None if wanted is None else set(wanted)
    return len({derive.request_of(one) for one in accounts if ids is None or one.request_id in ids})


def time_ns(account: ClosedAccount, wanted: Callable[[StageInterval], bool]) -> int:
    return sum(interval.duration_ns for interval in account.intervals if wanted(interval))


def times_ns(accounts: Iterable[ClosedAccount], wanted: Callable[[StageInterval], bool]) -> dict[str, int]:
    """By request id, those with none left out."""
    found = ((account.request_id, time_ns(account, wanted)) for account in accounts)
    return {request_id: ns for request_id, ns in found if ns > 0}


def setting(books: Books, name: str) -> Any:
    """A resolved setting of the server, or None if it is not known."""
    return books.facts.settings.get(name) if books.facts is not None else None


def threads_and_cores(books: Books) -> tuple[int, int]:
    """The threads that the server uses, and the cores that its machine has: as many, where that is not known."""
    machine = books.facts.machine if books.facts is not None else None
    if machine is None:
        return 1, 1
    return machine.threads, machine.cores if machine.cores is not None else machine.threads


def in_stages(*stages: Stage) -> Callable[[StageInterval], bool]:
    return lambda interval: interval.stage in stages


def waits_for(cause: Cause, *stages: Stage) -> Callable[[StageInterval], bool]:
    """Intervals of a cause, in these stages if any are given."""
    return lambda interval: interval.cause is cause and (not stages or interval.stage in stages)


def worst(amounts: Mapping[str, float]) -> tuple[str, ...]:
    """The ids with the largest amounts, the largest first."""
    return tuple(sorted(amounts, key=lambda name: -amounts[name])[:WORST])


def slowest_steps(steps: Iterable[StepRecord]) -> tuple[int, ...]:
    """The ids of the longest steps."""
    longest = sorted(steps, key=lambda step: step.begin_ns - step.end_ns)
    return tuple(step.step_id for step in longest[:WORST])


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans' instants as disjoint spans, in order."""
    merged: list[Span] = []
    for begin_ns, end_ns in sorted(spans):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((begin_ns, end_ns))
    return merged


def overlap_ns(begin_ns: int, end_ns: int, spans: Sequence[Span]) -> int:
    """How much of [begin, end) the spans (disjoint, in order) cover."""
    return sum(max(0, min(end_ns, b) - max(begin_ns, a)) for a, b in spans if a < end_ns and b > begin_ns)


def median(values: Iterable[float]) -> float | None:
    """The lower median: a value that did occur."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def ms(duration_ns: float) -> float:
    return round(duration_ns / 1e6, 3)


def is_whole(account: ClosedAccount) -> bool:
    """The request came to its own end."""
    return account.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


MIN_SHARE = 0.10  # below a tenth of the requests' time a cure cannot be told from noise in a re-measurement
MIN_LOSERS = 5  # fewer are a few odd requests
CONFIDENCE = 0.8  # of both ends: one run in ten would show less than the lower one


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """interval: None where too few requests lost anything, or the share is too small to ask. least: what is worth
    acting on. of: in words."""

    value: float
    interval: tuple[float, float] | None
    num_losers: int
    least: float
    of: str = OF_TIME

    @property
    def is_worth_it(self) -> bool:
        return self.interval is not None and self.interval[0] >= self.least

    @property
    def as_fields(self) -> dict[str, Any]:
        """Returns the fields by which a `Finding` tells it."""
        return {"share_of_time": self.value, "share_interval": self.interval}

    def require(self) -> "Share":
        """Returns itself. Raises `RuleEnd` with what is `unsure` of a share that is not worth it."""
        if not self.is_worth_it:
            raise RuleEnd(self.unsure())
        return self

    def unsure(self) -> Abstention | None:
        """For a share that is not worth it, or not surely so: None if it is too small as it stands."""
        if self.value < self.least:
            return None
        if self.interval is None:
            why = f"{self.value:.0%} of the time, but seen {self.num_losers} times only; {MIN_LOSERS} are the least"
            return Abstention(why=why)
        low, high = self.interval
        why = f"{self.value:.0%} of the time in this run, but another may show {low:.0%} to {high:.0%}: below "
        return Abstention(why=f"{why}{self.least:.0%} is not worth acting on")


def of_requests(lost_ns: Mapping[str, float], accounts: Sequence[ClosedAccount], least: float = MIN_SHARE) -> Share:
    """By request id, of the accounts' whole time; in the order of their begins."""
    ordered = sorted(accounts, key=lambda account: account.start_ns)
    felt = [account.end_ns - account.start_ns for account in ordered]
    return ratio([lost_ns.get(account.request_id, 0.0) for account in ordered], felt, least)


def ratio(lost: Sequence[float], felt: Sequence[float], least: float = MIN_SHARE) -> Share:
    """Returns the share for requests in the order of their begins. What more was lost than felt counts as all of it."""
    losses, times = numpy.asarray(lost, dtype=float), numpy.asarray(felt, dtype=float)
    value = float(min(1.0, max(0.0, losses.sum() / max(1.0, times.sum()))))
    num_losers = int((losses > 0).sum())
    is_asked = value >= least and num_losers >= MIN_LOSERS and len(losses) >= MIN_REQUESTS
    interval = _interval(losses, times, value) if is_asked else None
    return Share(value=value, interval=interval, num_losers=num_losers, least=least)


def widened(share: Share, reach: float) -> Share:
    """Returns a share of which not only the requests are a sample: what it was worked out from may be off by `reach`
    either way, whichever requests come."""
    if share.interval is None:
        return share
    low, high = share.interval
    low, high = share.value - hypot(share.value - low, reach), share.value + hypot(high - share.value, reach)
    return msgspec.structs.replace(share, interval=(max(0.0, low), min(1.0, high)))


def counted(value: float, num_losers: int, least: float = MIN_SHARE) -> Share:
    """Returns a share that was counted whole and will not come again, as a start: it needs no interval."""
    return Share(value=value, interval=(value, value) if num_losers else None, num_losers=num_losers, least=least)


def of_number(num: int, of: int, least: float = MIN_SHARE) -> Share:
    """Returns how many of so many requests: those that were refused have no time to be a share of."""
    return msgspec.structs.replace(counted(num / max(1, of), num, least), of=OF_REQUESTS)


def stated(lost_ns: Mapping[str, float], accounts: Sequence[ClosedAccount], least: float = MIN_SHARE) -> Share:
    """Returns the share of what the books state of this run, such as a pause or a preemption: whether or not
    another run would have it, so it needs no interval."""
    share = of_requests(lost_ns, accounts, least)
    return counted(share.value, share.num_losers, share.least)


def _interval(losses: numpy.ndarray, times: numpy.ndarray, value: float) -> tuple[float, float]:
    spread = spread_of(losses - value * times)
    reach = spread.reach(CONFIDENCE) / max(1.0, float(times.mean()))
    low, high = value - reach, value + upward(spread.effective, len(losses)) * reach
    return min(value, max(0.0, low)), max(value, min(1.0, high))
