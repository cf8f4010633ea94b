"""Open loop: each request at its intended instant, whatever became of the others. A slow server is asked no less.

A session's turns follow one another: a later one is sent at its intended instant, or `think_ns` after the turn before
has really ended, if that is later. Its intended start stays: see `schedule`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittime.loadgen.jobs import Job

if TYPE_CHECKING:
    from splittime.loadgen.load import Load

now_ns = time.monotonic_ns


async def open_loop(load: "Load", jobs: Sequence[Job]) -> None:
    """Send all jobs, in the order of their instants, and wait for their ends."""
    tasks = []
    for turns in first_comes_first(jobs):
        at_ns = load.begin_ns + (turns[0].at_ns or 0)
        if at_ns > now_ns():
            await load.alarm.sleep_until(at_ns)
        else:
            await asyncio.sleep(0)  # late: let those begin that were due before
        if load.is_over:
            break
        if len(turns) == 1:
            tasks.append(load.spawn(turns[0], at_ns))
        else:
            tasks.append(load.spawn_work(_session(load, turns)))
    await asyncio.gather(*tasks)


def first_comes_first(jobs: Sequence[Job]) -> list[list[Job]]:
    """Sessions as lists of turns, other requests as lists of one, by the instant of the first."""
    groups: dict[tuple[int, int, int], list[Job]] = {}
    for job in jobs:
        planned = job.planned
        key = (0, planned.index, job.arm) if planned.session is None else (1, planned.session, job.arm)
        groups.setdefault(key, []).append(job)
    for turns in groups.values():
        turns.sort(key=lambda job: job.planned.turn)
    return sorted(groups.values(), key=lambda turns: turns[0].at_ns or 0)


async def _session(load: "Load", turns: Sequence[Job]) -> None:
    ended_ns = 0
    for job in turns:
        if load.is_over:
            return
        intended_ns = load.begin_ns + (job.at_ns or 0)
        due_ns = max(intended_ns, ended_ns + job.planned.think_ns) if ended_ns else intended_ns
        await load.alarm.sleep_until(due_ns)
        await load.send(job, intended_ns, due_ns)
        ended_ns = now_ns()
