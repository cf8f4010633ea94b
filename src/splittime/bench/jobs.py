"""Which request goes to which server and when: a schedule over one or two servers, and over processes.

A job is a planned request with its place in this run. One server: the schedule as it is. Two: `target.Interleave` says
how; no request is lost and none is made up, so each arm gets every request of the schedule exactly once.
"""

from collections.abc import Sequence

import msgspec

from splittime.bench.book.records import Phase
from splittime.bench.schedule import Planned, Schedule
from splittime.core.errors import ConfigError
from splittime.wire.target import Interleave


class Job(msgspec.Struct, frozen=True, gc=False):
    """`at_ns`: the intended start from the run's begin; None in a closed loop."""

    planned: Planned
    arm: int
    at_ns: int | None

    @property
    def is_measured(self) -> bool:
        return self.planned.phase is Phase.MEASURED


def jobs_of(schedule: Schedule, num_arms: int, interleave: Interleave, block_ns: int) -> list[Job]:
    """All jobs, in the order in which they are to be begun."""
    requests = with_instants(schedule)
    if num_arms == 1:
        jobs = [Job(planned, 0, planned.at_ns) for planned in requests]
    elif interleave is Interleave.PAIRED:
        jobs = [Job(p, arm, p.at_ns) for p in requests for arm in in_turn(p.index, num_arms)]
    elif schedule.concurrency is None:
        jobs = in_blocks(requests, num_arms, block_ns)
    else:
        hint = "give a rate, or compare the two paired"
        raise ConfigError("blocks need an open loop: a closed loop has no instants", param="interleave", hint=hint)
    if schedule.concurrency is None:
        jobs.sort(key=lambda job: job.at_ns or 0)
    return jobs


def with_instants(schedule: Schedule) -> list[Planned]:
    """The requests; of an open loop each with its intended start, also a session's later turns (see `schedule`)."""
    if schedule.concurrency is not None:
        return [msgspec.structs.replace(p, at_ns=None) if p.at_ns is not None else p for p in schedule.requests]
    before: dict[int, Planned] = {}
    requests = []
    for planned in schedule.requests:
        last = before.get(planned.session) if planned.session is not None else None
        if planned.at_ns is None:
            if last is None or last.at_ns is None:
                what = f"request {planned.index} of an open loop has no intended start"
                raise ConfigError(what, param="schedule", hint="give it at_ns, or the schedule a concurrency")
            at_ns = last.at_ns + last.expected_ns + planned.think_ns
            planned = msgspec.structs.replace(planned, at_ns=at_ns)
        if planned.session is not None:
            before[planned.session] = planned
        requests.append(planned)
    return requests


def in_turn(index: int, num_arms: int) -> list[int]:
    """The arms in the order of this index: A B, B A, A B, ..."""
    return [(index + step) % num_arms for step in range(num_arms)]


def in_blocks(requests: Sequence[Planned], num_arms: int, block_ns: int) -> list[Job]:
    """Each stretch of `block_ns` of the schedule to every arm, one after the other. A session stays with its first
    turn's block."""
    session_block: dict[int, int] = {}
    jobs = []
    for planned in requests:
        at_ns = planned.at_ns or 0
        block = at_ns // block_ns
        if planned.session is not None:
            block = session_block.setdefault(planned.session, block)
        for place, arm in enumerate(in_turn(block, num_arms)):
            jobs.append(Job(planned, arm, at_ns + (block * (num_arms - 1) + place) * block_ns))
    return jobs


def split(jobs: Sequence[Job], workers: int) -> list[list[Job]]:
    """The jobs of each process, dealt out in turn; a session, and a request's two arms, stay together."""
    parts: list[list[Job]] = [[] for _ in range(workers)]
    for job in jobs:
        planned = job.planned
        parts[(planned.index if planned.session is None else planned.session) % workers].append(job)
    return parts
