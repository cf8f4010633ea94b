"""Whose the requests' time was: each nanosecond of each request has exactly one owner, stated before it is inferred.

    attribution(books) -> Attribution          sum over owners == end_ns - start_ns, of every request
    owners_between(books, account, begin_ns, end_ns)        the same of a part of one request

The doctor, `splittime explain`, its comparison with the usual request and the critical path all read it here.

In this order:
1. While the engine's thread was kept from running (collections of garbage, no processor, stopped), whatever it owed
   belongs to that.
2. A wait with a cause belongs to its cause, a stage outside the engine to itself.
3. Computing (prefill, decode, recompute) and waiting for a step in flight are divided as the steps of that time were
   (`diagnose.timeline`): host, sampling, copies, ranks, and the device's part, of which others' prompts are what the
   step took beyond its own decode.

Only that last division is inferred. What steps have no record of belongs to the stage itself.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice, pairwise

import msgspec
import numpy

from splittime.diagnose.books import Books, once
from splittime.diagnose.rules.evidence import served
from splittime.diagnose.timeline import Part, prompt_ns_of_rows, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage


class Computed(StrEnum):
    """Owners beside the stages and the causes: what a step's time went into."""

    HOST = "host"
    SAMPLE = "sample"
    MOVES = "kv_moves"
    RANKS = "ranks"
    OTHERS_PROMPTS = "others_prompts"
    GC = "garbage_collection"
    CPU_WAIT = "cpu_wait"
    STOPPED = "engine_stopped"
    PREEMPTED = "preempted"


Owner = str  # a Stage, a Cause or a Computed, by its value
Owned = tuple[StageInterval, Owner, float]  # a piece of a request's time, its stage and owner: ns
Told = tuple[str, Cause | None]  # a stage with its cause, or what kept the thread from running

MEANING: dict[Owner, str] = {
    Computed.HOST: "the engine plans, launches and commits, or is between steps",
    Computed.SAMPLE: "tokens are chosen",
    Computed.MOVES: "KV blocks are copied to host memory or back",
    Computed.RANKS: "ranks wait for each other",
    Computed.OTHERS_PROMPTS: "the step computes others' prompts beside it",
    Computed.GC: "the engine's garbage is collected",
    Computed.CPU_WAIT: "the engine's thread is ready to run and gets no processor",
    Computed.STOPPED: "the engine's thread is not run at all, and does not ask to be",
    Computed.PREEMPTED: "its blocks were taken back; it waits to be admitted again",
}
_WORDS: dict[str, str] = {str(name): said for name, said in (*STAGE_MEANING.items(), *CAUSE_MEANING.items())} | MEANING
# What a request came for, and what its steps take for it whoever shares them.
COMPUTING: tuple[Owner, ...] = (
    Stage.PREFILL,
    Stage.DECODE,
    Computed.HOST,
    Computed.SAMPLE,
    Computed.MOVES,
    Computed.RANKS,
)
_BY_PART = {
    Part.HOST: Computed.HOST,
    Part.SAMPLE: Computed.SAMPLE,
    Part.MOVES: Computed.MOVES,
    Part.RANKS: Computed.RANKS,
    Part.PROMPTS: Computed.OTHERS_PROMPTS,
}
BY_DEPRIVED = {Part.GC: Computed.GC, Part.CPU_WAIT: Computed.CPU_WAIT, Part.STOPPED: Computed.STOPPED}
DEPRIVED = frozenset(BY_DEPRIVED.values())
_DIVIDED = (Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE)
_IN_ENGINE = (*_DIVIDED, Stage.HANDOFF, Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)


class Attribution(msgspec.Struct, frozen=True):
    """times_ns: by owner, then by request id. total_ns: of all requests."""

    times_ns: dict[Owner, dict[str, float]]
    total_ns: int

    def of(self, *owners: Owner) -> dict[str, float]:
        """Returns, by request id, the time that these owners have of it; requests without any are left out."""
        found: dict[str, float] = {}
        for owner in owners:
            for request_id, ns in self.times_ns.get(owner, {}).items():
                found[request_id] = found.get(request_id, 0.0) + ns
        return found

    def share(self, *owners: Owner) -> float:
        return sum(sum(self.times_ns.get(owner, {}).values()) for owner in owners) / max(1, self.total_ns)

    def largest(self) -> list[tuple[Owner, float]]:
        """Owners with their shares, the largest first."""
        return sorted(((owner, self.share(owner)) for owner in self.times_ns), key=lambda entry: -entry[1])


@once
def attribution(books: Books) -> Attribution:
    accounts = served(books.accounts)
    times_ns: dict[Owner, dict[str, float]] = {}
    for account, pieces in zip(accounts, owned(books, accounts), strict=True):
        for _, owner, ns in pieces:
            of_owner = times_ns.setdefault(str(owner), {})
            of_owner[account.request_id] = of_owner.get(account.request_id, 0.0) + ns
    return Attribution(times_ns, max(1, sum(account.end_ns - account.start_ns for account in accounts)))


def owners_between(books: Books, account: ClosedAccount, begin_ns: int, end_ns: int) -> dict[Owner, float]:
    """Returns whose a request's time from then to then was, the largest first. It sums to that time, so far as the
    request was there."""
    parts = msgspec.structs.replace(account, intervals=tuple(cut(account.intervals, begin_ns, end_ns)))
    found: Counter[Owner] = Counter()
    for interval, owner, ns in next(owned(books, [parts])):
        if begin_ns <= interval.begin_ns < end_ns:
            found[str(owner)] += ns  # type: ignore[assignment]
    return dict(found.most_common())


def stages_and_stops(books: Books, accounts: Sequence[ClosedAccount]) -> Iterator[dict[Told, int]]:
    """Yields the times of each account by stage and cause, but for what kept the engine's thread from running, which
    is told by itself. They sum to the account's with `==`."""
    for account, pieces in zip(accounts, owned(books, accounts), strict=True):
        found: Counter[Told] = Counter()
        for piece in pieces:
            found[told_as(piece)] += piece[2]  # type: ignore[assignment]
        yield derive.apportion(account.end_ns - account.start_ns, {told: round(ns) for told, ns in found.items()})


def told_as(piece: Owned) -> Told:
    """Returns the name under which a piece of a request's time is told."""
    interval, owner, _ = piece
    return (owner, None) if owner in DEPRIVED else (interval.stage, interval.cause)


def in_stages(books: Books, wanted: Owner, stages: Collection[Stage]) -> dict[str, float]:
    """Returns, by request id, the time that this owner has of it in these stages."""
    accounts = served(books.accounts)
    found: dict[str, float] = {}
    for account, pieces in zip(accounts, owned(books, accounts), strict=True):
        ns = sum(ns for interval, owner, ns in pieces if owner == wanted and interval.stage in stages)
        found |= {account.request_id: ns} if ns else {}
    return found


def cut(intervals: Iterable[StageInterval], *at_ns: int) -> Iterator[StageInterval]:
    """Yields the intervals, in two where one of the instants lies within."""
    for interval in intervals:
        inside = sorted(at for at in at_ns if interval.begin_ns < at < interval.end_ns)
        for begin_ns, end_ns in pairwise((interval.begin_ns, *inside, interval.end_ns)):
            yield msgspec.structs.replace(interval, begin_ns=begin_ns, end_ns=end_ns)


def owned(books: Books, accounts: Sequence[ClosedAccount]) -> Iterator[list[Owned]]:
    """Yields the pieces of each account, in the order of time; those of no length are left out."""
    parts = iter(timeline(books).within([interval for account in accounts for interval in account.intervals]))
    own_ns = _own_prompt_ns(books)
    for account in accounts:
        rows = islice(parts, len(account.intervals))
        pieces = _owners(account, rows, own_ns.get(account.request_id, 0.0))
        yield [piece for piece in pieces if piece[2] > 0]


@once
def _own_prompt_ns(books: Books) -> dict[str, float]:
    return prompt_ns_of_rows(books.steps, timeline(books))


def _owners(account: ClosedAccount, parts: Iterable[numpy.ndarray], own_prompt_ns: float) -> Iterator[Owned]:
    """own_prompt_ns: what its own prompt took of the steps; the rest of the prompts' part in its prefill is others'."""
    for interval, row in zip(account.intervals, parts, strict=True):
        spent = dict(zip(Part, map(float, row), strict=True))
        if interval.stage not in _IN_ENGINE:
            yield interval, interval.stage, interval.duration_ns
            continue
        yield from ((interval, owner, spent[part]) for part, owner in BY_DEPRIVED.items())
        left_ns = interval.duration_ns - sum(spent[part] for part in BY_DEPRIVED)
        if interval.stage not in _DIVIDED and interval.cause is not Cause.STEP_IN_FLIGHT:
            yield interval, stated(interval), left_ns
            continue
        own_ns = min(own_prompt_ns, spent[Part.PROMPTS]) if interval.stage in (Stage.PREFILL, Stage.RECOMPUTE) else 0.0
        own_prompt_ns -= own_ns
        spent[Part.PROMPTS] -= own_ns
        divided = [(interval, owner, spent[part]) for part, owner in _BY_PART.items()]
        yield from divided
        yield interval, stated(interval), left_ns - sum(ns for _, _, ns in divided)


def stated(interval: StageInterval) -> Owner:
    """Returns whose a piece of time is by what was stated of it."""
    if interval.stage is Stage.PREEMPTED:
        return Computed.PREEMPTED
    return interval.cause if interval.cause is not None else interval.stage


def meaning(owner: Owner) -> str:
    """Says in words what it means that time belongs to this owner."""
    return _WORDS.get(owner, owner)


def waits(found: Attribution) -> Sequence[tuple[Owner, float]]:
    """Owners beside computing, the largest first. Others' prompts are none: in steps of the size that was asked for
    they are computed beside a request's own tokens; `prefill_interference` tells longer ones, and if nobody asked."""
    return [(owner, share) for owner, share in found.largest() if owner not in (*COMPUTING, Computed.OTHERS_PROMPTS)]
