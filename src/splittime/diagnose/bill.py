"""Who made a request wait, and whom it made wait: each nanosecond has one name.

    bill(account, books)         by who had what it waited for; it sums to the request's waits with `==`
    billed_to(account, books)    the lines of others' bills that have its name, with theirs instead
    between_keys(books)          what the requests of one key waited for those of another

Waits are the stages in which no step computes the request; and of those that do, what the steps took for others'
prompts (`attribution`). They are charged to the rows of the steps that ran meanwhile, the gap before a step with it,
divided as `SHARED` says: alike, by tokens or by positions held. What no step covers, what its own rows have of it, and
what the engine's thread lost, has no name. Of several answers (`n`) each is a request.

Each kind of division is a running sum over the steps for each request, so that a wait of a thousand steps costs as much
as one of two.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec
import numpy
from numpy.typing import NDArray

from splittime.diagnose.attribution import DEPRIVED, Computed, Owned, Owner, Told, owned, stated, told_as
from splittime.diagnose.books import Books, once
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

WAITS = (Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)
ALIKE, TOKENS, POSITIONS, PROMPTS = range(4)
BY_TOKENS = (Cause.TOKEN_BUDGET, Cause.STEP_IN_FLIGHT)
SHARED: dict[Owner, int] = {
    **dict.fromkeys((Cause.BATCH_SLOTS, Cause.LORA_SLOTS, Cause.POLICY), ALIKE),
    **dict.fromkeys(BY_TOKENS, TOKENS),
    **dict.fromkeys((Cause.KV_BLOCKS, Computed.PREEMPTED), POSITIONS),
    Computed.OTHERS_PROMPTS: PROMPTS,  # by tokens of rows with more than one, of what prompts took of the step
}
Array = NDArray[numpy.float64]


class Charge(msgspec.Struct, frozen=True):
    """Who is charged, or has waited: a request and the name of its key, each "" for nobody. why: a cause, or an
    owner of `attribution`."""

    request_id: str
    tenant: str
    why: Owner
    ns: int


def bill(account: ClosedAccount, books: Books, of: Told | None = None) -> list[Charge]:
    """Returns whom it waited for, the longest first. of: in this stage, for this cause, alone."""
    pieces = [piece for piece in next(owned(books, [account])) if of is None or told_as(piece) == of]
    return _charges(account.request_id, pieces, books)


def billed_to(account: ClosedAccount, books: Books) -> list[Charge]:
    """Returns who waited for it, the longest first."""
    return sorted(_waiting(books)[account.request_id], key=lambda charge: -charge.ns)


class KeyWait(msgspec.Struct, frozen=True):
    """What the requests of one key waited for those of another (`had_it`). share: of all requests' time."""

    waited: str
    had_it: str
    ns: int
    share: float


def between_keys(books: Books) -> tuple[KeyWait, ...]:
    """Returns who waited for whom, the longest first; empty where all have one key."""
    keys, found = _tenants(books), Counter[tuple[str, str]]()
    for request_id, charges in _waiting(books).items() if len(set(keys.values())) > 1 else ():
        for charge in charges:
            if request_id in keys and keys[request_id] != charge.tenant:
                found[charge.tenant, keys[request_id]] += charge.ns
    all_ns = max(1, sum(account.end_ns - account.start_ns for account in books.accounts))
    return tuple(KeyWait(*key, ns, ns / all_ns) for key, ns in found.most_common())


@once
def _waiting(books: Books) -> defaultdict[str, list[Charge]]:
    """Returns by request who waited for it."""
    found: defaultdict[str, list[Charge]] = defaultdict(list)
    for account, pieces in zip(books.accounts, owned(books, books.accounts), strict=True):
        for charge in _charges(account.request_id, pieces, books):
            found[charge.request_id].append(Charge(account.request_id, account.tenant, charge.why, charge.ns))
    return found


def _charges(request_id: str, pieces: Iterable[Owned], books: Books) -> list[Charge]:
    shares: Counter[tuple[str, Owner]] = Counter()
    total_ns = 0.0
    for interval, owner, ns in pieces:
        if interval.stage in WAITS:
            owner = owner if owner in DEPRIVED else stated(interval)
        elif owner != Computed.OTHERS_PROMPTS:
            continue
        total_ns += ns
        had = _running(books).between(SHARED.get(owner), interval.begin_ns, interval.end_ns)
        had.pop(request_id, None)
        had_ns = sum(had.values())
        # a wait is as long as it is; of the steps that compute the request, others' prompts are a part
        of_ns = max(had_ns, 1e-9) if owner == Computed.OTHERS_PROMPTS else max(interval.duration_ns, had_ns, 1e-9)
        for who, share_ns in had.items():
            shares[who, owner] += share_ns * ns / of_ns  # type: ignore[assignment]
        shares["", owner] += max(0.0, ns - had_ns * ns / of_ns)  # type: ignore[assignment]
    exact = derive.apportion(round(total_ns), {key: round(ns) for key, ns in shares.items() if ns >= 0.5})
    tenants = _tenants(books)
    found = [Charge(who, tenants.get(who, ""), str(why), ns) for (who, why), ns in exact.items()]
    return sorted(found, key=lambda charge: -charge.ns)


class _Running:
    """The steps' time by who had it, for each kind of division a running sum over the steps of each request."""

    def __init__(self, books: Books) -> None:
        steps = books.steps
        self._begins = numpy.array([step.begin_ns - step.host_gap_ns for step in steps], numpy.int64)
        self._spans = numpy.array([step.end_ns for step in steps], numpy.int64) - self._begins
        self._names = list({row[0]: None for step in steps for row in step.rows})
        numbers = {name: number for number, name in enumerate(self._names)}
        rows = [(numbers[who], at, start, num) for at, step in enumerate(steps) for who, start, num in step.rows]
        table = numpy.array(sorted(rows), numpy.int64).reshape(-1, 4)
        who, at, starts, tokens = table.T
        self._keys = who * (len(steps) + 1) + at
        self._firsts = numpy.arange(len(self._names)) * (len(steps) + 1)
        weights = (numpy.ones(len(table)), tokens, starts + tokens, numpy.where(tokens > 1, tokens, 0))
        of_prompts = timeline(books).by_step[:, Part.PROMPTS] if steps else numpy.zeros(0)
        self._sums = [
            self._running_sum(at, weight.astype(float), of_prompts if kind == PROMPTS else self._spans.astype(float))
            for kind, weight in enumerate(weights)
        ]

    def _running_sum(self, at: NDArray[numpy.int64], weights: Array, spans_ns: Array) -> Array:
        of_step = numpy.bincount(at, weights, len(spans_ns))
        shares = weights * (spans_ns / numpy.maximum(of_step, 1.0))[at]
        return numpy.concatenate([[0.0], numpy.cumsum(shares)])

    def between(self, kind: int | None, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Returns by request what it had of the steps' time from then to then, in ns."""
        if kind is None or not len(self._begins):
            return {}
        had = self._until(kind, end_ns) - self._until(kind, begin_ns)
        return {self._names[number]: float(had[number]) for number in numpy.flatnonzero(had > 0)}

    def _until(self, kind: int, at_ns: int) -> Array:
        """Returns for each request its running sum up to an instant, counted from the sum of those before it."""
        at = int(numpy.searchsorted(self._begins, at_ns, side="right")) - 1
        sums = self._sums[kind]
        before, after = (sums[numpy.searchsorted(self._keys, self._firsts + max(0, to))] for to in (at, at + 1))
        part = min(1.0, (at_ns - int(self._begins[at])) / max(1, int(self._spans[at]))) if at >= 0 else 0.0
        return before + part * (after - before)


@once
def _running(books: Books) -> _Running:
    return _Running(books)


@once
def _tenants(books: Books) -> dict[str, str]:
    return {account.request_id: account.tenant for account in books.accounts}
