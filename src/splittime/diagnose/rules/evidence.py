"""What the rules share: sums over accounts, who waited longest, and when others' waits overlap.

The request book's time is the measure of all shares: the sum over requests of the wall time that each felt. Waits are
taken from the causes that the scheduler stated at the moment, never from a threshold on a gauge.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from splittime.core.request import FinishReason
from splittime.diagnose.books import Books
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

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
    """HTTP requests, each of which may have several choices (`n`) with an account each; of these accounts, by id."""
    ids = None if wanted is None else set(wanted)
    return len({account.group_id for account in accounts if ids is None or account.request_id in ids})


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
