"""Who made a request wait in the engine, and whom it made wait there.

    bill(account, books)         who had what it waited for: it sums to these waits, to the nanosecond
    billed_to(account, books)    what the bills of others in these books charge it, with their names
    between_keys(books)          what the requests of one key waited for those of another

Counted are the stages of `HELD`, in which the engine has the request and no step computes it, and what the steps that
do compute it took for others' prompts (`attribution`). They are charged to the rows of the steps that ran meanwhile,
each step with the gap before it, and divided as `SHARES` says. Nobody is charged for what no step covers, for what the
engine's thread lost, or for a cause of which the steps do not say who had it. Each answer of a request (`n`) has a
bill.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy
from numpy.typing import NDArray

from splittime.diagnose.attribution import DEPRIVED, Computed, Owned, Owner, Told, owned, stated, told_as
from splittime.diagnose.books import Books
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

HELD = (Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)
ALIKE, TOKENS, POSITIONS, PROMPTS = range(4)
BY_TOKENS = (Cause.TOKEN_BUDGET, Cause.STEP_IN_FLIGHT)
SHARES: dict[Owner, int] = {
    Cause.BATCH_SLOTS: ALIKE,
    **dict.fromkeys(BY_TOKENS, TOKENS),
    **dict.fromkeys((Cause.KV_BLOCKS, Computed.PREEMPTED), POSITIONS),  # those of a row's request, shared ones too
    Computed.OTHERS_PROMPTS: PROMPTS,  # by the tokens of rows that compute a prompt
}
Array = NDArray[numpy.float64]


class Charge(msgspec.Struct, frozen=True):
    """Who is charged, or has waited: a request and the name of its key, each "" for nobody. The key is "" too where its
    account is not in the books. why: a cause, or an owner of `attribution`."""

    request_id: str
    tenant: str
    why: Owner
    ns: int


def bill(account: ClosedAccount, books: Books, of: Told | None = None) -> list[Charge]:
    """Returns whom it waited for, the longest first. of: in this stage, for this cause, alone."""
    pieces = [piece for piece in next(owned(books, [account])) if of is None or told_as(piece) == of]
    return _charges(account.request_id, pieces, _Rows(books, [account]))


def billed_to(account: ClosedAccount, books: Books) -> list[Charge]:
    """Returns who waited for it in its time, the longest first. (Clients may give two requests one id.)"""
    its = [step for step in books.steps if account.start_ns <= step.begin_ns < account.end_ns]
    then = _span([(step.begin_ns - step.host_gap_ns, step.end_ns) for step in its])  # with the gap, which others count
    others = [other for other in books.accounts if other.start_ns < then[1] and then[0] < other.end_ns]
    found, rows = list[Charge](), _Rows(books, others)
    for other, pieces in zip(others, owned(books, others), strict=True):
        for charge in _charges(other.request_id, pieces, rows, then):
            if charge.request_id == account.request_id:
                found.append(Charge(other.request_id, other.tenant, charge.why, charge.ns))
    return sorted(found, key=lambda charge: -charge.ns)


class KeyWait(msgspec.Struct, frozen=True):
    """What the requests of one key waited for those of another (`had_it`). share: of all requests' time."""

    waited: str
    had_it: str
    ns: int
    share: float


def between_keys(books: Books) -> tuple[KeyWait, ...]:
    """Returns who waited for whom, the longest first; empty where all have one key."""
    found = Counter[tuple[str, str]]()
    accounts = books.accounts if len({account.tenant for account in books.accounts}) > 1 else ()
    rows = _Rows(books, accounts)
    for account, pieces in zip(accounts, owned(books, accounts), strict=True):
        for charge in _charges(account.request_id, pieces, rows):
            if charge.request_id in rows.tenants and charge.tenant != account.tenant:
                found[account.tenant, charge.tenant] += charge.ns
    all_ns = max(1, sum(account.end_ns - account.start_ns for account in accounts))
    return tuple(KeyWait(*key, ns, ns / all_ns) for key, ns in found.most_common())


def _charges(
    request_id: str, pieces: Iterable[Owned], rows: "_Rows", then: tuple[int, int] | None = None
) -> list[Charge]:
    """then: what steps did before and after is nobody's."""
    shares: Counter[tuple[str, Owner]] = Counter()
    total_ns = 0.0
    for interval, owner, ns in pieces:
        if interval.stage in HELD:
            owner = owner if owner in DEPRIVED else stated(interval)
        elif owner != Computed.OTHERS_PROMPTS:
            continue
        total_ns += ns
        begin_ns, end_ns = interval.begin_ns, interval.end_ns
        had = rows.between(SHARES.get(owner), begin_ns, end_ns)
        had.pop(request_id, None)
        # a wait is as long as it is; of the steps that compute the request, others' prompts are a part
        had_ns = sum(had.values())
        of_ns = had_ns if owner == Computed.OTHERS_PROMPTS else max(interval.duration_ns, had_ns)
        scale = ns / of_ns if of_ns else 0.0
        if then is not None and (begin_ns < then[0] or end_ns > then[1]):
            had = rows.between(SHARES.get(owner), max(begin_ns, then[0]), min(end_ns, then[1]))
            had.pop(request_id, None)
        shares.update({(who, owner): share_ns * scale for who, share_ns in had.items()})  # type: ignore[arg-type]
        shares["", owner] += max(0.0, ns - scale * sum(had.values()))  # type: ignore[assignment]
    exact = derive.apportion(round(total_ns), {key: round(ns) for key, ns in shares.items()})
    found = [Charge(who, rows.tenants.get(who, ""), str(why), ns) for (who, why), ns in exact.items() if ns]
    return sorted(found, key=lambda charge: -charge.ns)


class _Rows:
    """The rows of the steps in the time of some accounts, and what each has of its step's time by each kind of shares.
    Of steps that overlap the earlier one has the instants of both, as in `timeline`."""

    def __init__(self, books: Books, accounts: Sequence[ClosedAccount]) -> None:
        self.tenants = {account.request_id: account.tenant for account in books.accounts}
        from_ns, until_ns = _span([(account.start_ns, account.end_ns) for account in accounts])
        within = [
            at
            for at, step in enumerate(books.steps)
            if step.end_ns > from_ns and step.begin_ns - step.host_gap_ns < until_ns
        ]
        steps, numbers = [books.steps[at] for at in within], dict[str, int]()
        rows = [row for step in steps for row in step.rows]
        guessing = {(at, name) for at, step in enumerate(steps) for name, _, _ in step.verified}
        counts = numpy.fromiter((len(step.rows) for step in steps), numpy.int64, len(steps))
        self._firsts = numpy.concatenate([[0], numpy.cumsum(counts)])
        self._steps = numpy.repeat(numpy.arange(len(steps)), counts)
        self._who = numpy.fromiter((numbers.setdefault(row[0], len(numbers)) for row in rows), numpy.int64, len(rows))
        self._names = list(numbers)
        ends = numpy.maximum.accumulate(numpy.fromiter((step.end_ns for step in steps), float, len(steps)))
        begins = numpy.fromiter((step.begin_ns - step.host_gap_ns for step in steps), float, len(steps))
        begins[1:] = numpy.maximum(begins[1:], ends[:-1])
        self._begins, self._ends = numpy.minimum(begins, ends), ends
        starts = numpy.fromiter((row[1] for row in rows), float, len(rows))
        tokens = numpy.fromiter((row[2] for row in rows), float, len(rows))
        is_prompt = tokens > 1
        if guessing:  # more tokens in a row, and no prompt
            drafts = ((at, row[0]) in guessing for at, row in zip(self._steps.tolist(), rows, strict=True))
            is_prompt &= ~numpy.fromiter(drafts, bool, len(rows))
        spans, prompts = self._ends - self._begins, timeline(books).by_step[within, Part.PROMPTS]
        weights = (numpy.ones(len(rows)), tokens, starts + tokens, tokens * is_prompt)
        self._shares = [self._divided(each, prompts if kind == PROMPTS else spans) for kind, each in enumerate(weights)]

    def _divided(self, weights: Array, spans_ns: Array) -> Array:
        of_step = numpy.bincount(self._steps, weights, len(spans_ns))
        return weights * (spans_ns / numpy.maximum(of_step, 1.0))[self._steps]

    def between(self, kind: int | None, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Returns by request what it had of the steps' time from then to then, in ns. kind: None: nobody had any."""
        first = int(numpy.searchsorted(self._ends, begin_ns, side="right"))
        last = int(numpy.searchsorted(self._begins, end_ns, side="left"))
        if kind is None or first >= last:
            return {}
        begins, ends = self._begins[first:last], self._ends[first:last]
        covered = numpy.minimum(ends, end_ns) - numpy.maximum(begins, begin_ns)
        parts = numpy.maximum(0.0, covered) / numpy.maximum(1.0, ends - begins)
        rows = slice(self._firsts[first], self._firsts[last])
        who = self._who[rows]
        if not len(who):
            return {}
        least = int(who.min())
        had = numpy.bincount(who - least, self._shares[kind][rows] * parts[self._steps[rows] - first])
        return {self._names[least + number]: float(had[number]) for number in numpy.flatnonzero(had)}


def _span(times: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min((begin for begin, _ in times), default=0), max((end for _, end in times), default=0)
