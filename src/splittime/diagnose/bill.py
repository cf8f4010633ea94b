"""Who made a request wait, and whom it made wait: each nanosecond has one name.

    bill(account, books)         by who had what it waited for; it sums to the request's waits with `==`
    billed_to(account, books)    the lines of others' bills that have its name, with theirs instead

Waits are the stages in which no step computes the request; and of those that do, what the steps took for others'
prompts (`attribution`). They are charged to the other rows of the steps that ran meanwhile, the gap before a step with
it, divided

    by tokens                for the token budget and a step in flight; of prompts alone, for others' prompts
    by positions held        for KV blocks, and for a preemption
    alike                    for slots, adapters' slots and the policy

What no step of others covers, and what the engine's thread lost, has no name. A single row of several (`n`) is another
request to its like.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from splittime.diagnose.attribution import DEPRIVED, Computed, Owned, Owner, Told, owned, stated, told_as
from splittime.diagnose.books import Books, once
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

WAITS = (Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)
ALIKE = (Cause.BATCH_SLOTS, Cause.LORA_SLOTS, Cause.POLICY)
BY_TOKENS = (Cause.TOKEN_BUDGET, Cause.STEP_IN_FLIGHT)
BY_POSITIONS: tuple[Owner, ...] = (Cause.KV_BLOCKS, Computed.PREEMPTED)


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


@once
def _waiting(books: Books) -> defaultdict[str, list[Charge]]:
    found: defaultdict[str, list[Charge]] = defaultdict(list)
    for account, pieces in zip(books.accounts, owned(books, books.accounts), strict=True):
        for charge in _charges(account.request_id, pieces, books):
            found[charge.request_id].append(Charge(account.request_id, account.tenant, charge.why, charge.ns))
    return found


def _charges(request_id: str, pieces: Iterable[Owned], books: Books) -> list[Charge]:
    shares: Counter[tuple[str, Owner]] = Counter()
    total_ns = 0.0
    for piece in pieces:
        interval, owner, ns = piece
        if interval.stage in WAITS:
            owner = owner if owner in DEPRIVED else stated(interval)
        elif owner != Computed.OTHERS_PROMPTS:
            continue
        total_ns += ns
        for who, share_ns in _who_had_it(request_id, piece, owner, books).items():
            shares[who, str(owner)] += share_ns  # type: ignore[assignment]
    exact = derive.apportion(round(total_ns), {key: round(ns) for key, ns in shares.items() if ns >= 0.5})
    tenants = _tenants(books)
    found = [Charge(who, tenants.get(who, ""), why, ns) for (who, why), ns in exact.items()]
    return sorted(found, key=lambda charge: -charge.ns)


def _who_had_it(request_id: str, piece: Owned, owner: Owner, books: Books) -> dict[str, float]:
    """Returns by request, "" for nobody, its share of a piece of a wait."""
    interval, _, ns = piece
    shares: Counter[str] = Counter()
    begins = _begins(books)
    at = max(0, bisect_right(begins, interval.begin_ns) - 1)
    while at < len(begins) and begins[at] < interval.end_ns:
        step = books.steps[at]
        covered_ns = float(min(step.end_ns, interval.end_ns) - max(begins[at], interval.begin_ns))
        if owner == Computed.OTHERS_PROMPTS:
            covered_ns *= timeline(books).by_step[at][Part.PROMPTS] / max(1, step.end_ns - begins[at])
        weights = {row[0]: weight for row in step.rows if row[0] != request_id and (weight := _weight(owner, row))}
        for who, weight in weights.items() if covered_ns > 0 else ():
            shares[who] += covered_ns * weight / sum(weights.values())  # type: ignore[assignment]
        at += 1
    named_ns = sum(shares.values())
    if owner != Computed.OTHERS_PROMPTS or not named_ns:  # of which only a part of the steps is
        shares[""] = max(0.0, interval.duration_ns - named_ns)  # type: ignore[assignment]
    scale = ns / (sum(shares.values()) or 1.0)
    return {who: share * scale for who, share in shares.items()}


def _weight(owner: Owner, row: tuple[str, int, int]) -> int:
    _, start, num_tokens = row
    if owner in BY_POSITIONS:
        return start + num_tokens
    if owner == Computed.OTHERS_PROMPTS:
        return num_tokens if num_tokens > 1 else 0
    return num_tokens if owner in BY_TOKENS else int(owner in ALIKE)


@once
def _begins(books: Books) -> Sequence[int]:
    return [step.begin_ns - step.host_gap_ns for step in books.steps]


@once
def _tenants(books: Books) -> dict[str, str]:
    return {account.request_id: account.tenant for account in books.accounts}
