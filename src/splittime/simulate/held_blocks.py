"""How many blocks requests held after a recorded step, as far as a ledger tells.

A lease has room for all tokens that were known when its request was admitted, and for what was computed since. Where
the next step was planned meanwhile, its rows had their blocks too. A block that was found in the cache is held once, by
all who found it and by who computed it: prompts that begin alike (`trace.StandIns`).

Not told: what a request found that was admitted again after a preemption, and whose copy of a block was found where
several had computed the same. Without a prefix cache the number is exact; with one it is near.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from splittime.core.request import Request
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.host_parts import is_queued
from splittime.simulate.trace import TracedRequest


class HeldLease(NamedTuple):
    """The blocks of one request. num_found: of them, those that it found in the cache. names: of full ones."""

    num_blocks: int
    num_found: int
    names: tuple[int, ...]


def num_held(leases: Collection[HeldLease]) -> int:
    """Returns how many blocks these hold together."""
    computed = {name for lease in leases for name in lease.names[lease.num_found :]}
    found = {name for lease in leases for name in lease.names[: lease.num_found]}
    return sum(lease.num_blocks - lease.num_found for lease in leases) + len(found - computed)


def leases_after(
    records: Sequence[StepRecord],
    step: StepRecord,
    named: Mapping[str, TracedRequest],
    num_running: int,
    block_size: int,
) -> dict[str, HeldLease]:
    """Returns the leases after this step of those that ran then, by request. named: who had come and not ended, of
    whom so many ran: who is of a static batch may have no row yet."""
    leases: dict[str, HeldLease] = {}
    victims: set[str] = set()
    for record in _latest_first(records, step):
        for name, start, count in record.rows:
            if name in named and name not in victims and name not in leases:
                end = start + count - (record.unverified_drafts(name) if record.step_id <= step.step_id else 0)
                leases[name] = _lease(named[name], record.step_id, end, block_size)
        victims.update(record.victims)
        if len(leases) == num_running:
            return leases
    rest = [name for name in named if name not in leases and name not in victims]
    without_row = [name for name in rest if _is_admitted(named[name], step.end_ns)]
    return leases | {name: _lease(named[name], step.step_id, 0, block_size) for name in without_row}


def _is_admitted(traced: TracedRequest, at_ns: int) -> bool:
    """Whether it had been admitted, and was not back in the queue."""
    before = [each.stage for each in traced.account.intervals if each.begin_ns <= at_ns]
    return bool(before) and before[-1] in (Stage.PREFILL, Stage.PREFILL_STALL)


def _latest_first(records: Sequence[StepRecord], step: StepRecord) -> Iterator[StepRecord]:
    """Yields the steps that had been planned by the end of this one."""
    if step.step_id < len(records) and is_queued(step, records[step.step_id]):
        yield records[step.step_id]
    yield from (records[index] for index in range(step.step_id - 1, -1, -1))


def _lease(traced: TracedRequest, step_id: int, end: int, block_size: int) -> HeldLease:
    """Returns the lease of a request whose latest row was of this step, and ended there."""
    request, account = traced.request, traced.account
    num_known = len(request.prompt_token_ids) + sum(each < step_id for each in account.token_steps)
    num_blocks = -(-max(end, num_known) // block_size)
    return HeldLease(
        num_blocks,
        min(num_blocks, account.cached_tokens // block_size),
        tuple(_names(request, (*request.prompt_token_ids, *traced.answer)[: num_blocks * block_size], block_size)),
    )


def _names(request: Request, tokens: Sequence[int], block_size: int) -> Iterable[int]:
    name = hash(request.cache_salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        name = hash((name, tokens[end - block_size : end]))
        yield name
