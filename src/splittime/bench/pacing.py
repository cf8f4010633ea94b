"""The two ways to pace a load: `open_loop` and `closed_loop`.

Open loop: each request at its intended instant, whatever became of the others. A slow server is asked no less.

A session's turns follow one another: a later one is sent at its intended instant, or `think_ns` after the turn before
has really ended, if that is later. Its intended start stays: see `schedule`.

Closed loop: so many workers, each takes the next request when its last has ended. A request's intended start is the
instant it is taken, so this load never sees a queue longer than its own concurrency: it is for capacity, not for what
users feel.

A session's later turn may be taken `think_ns` after the turn before has ended; until then workers take others, and wait
if there are none.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittime.bench.jobs import Job

if TYPE_CHECKING:
    from splittime.bench.load import Load

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


async def closed_loop(load: "Load", jobs: Sequence[Job]) -> None:
    """Each arm has workers of its own."""
    await load.alarm.sleep_until(load.begin_ns)
    workers = []
    for arm in range(len(load.clients)):
        queue = _JobQueue([job for job in jobs if job.arm == arm])
        workers += [load.spawn_work(_worker(load, queue)) for _ in range(load.share.concurrency or 1)]
    await asyncio.gather(*workers)


class _JobQueue:
    """The jobs of one arm that may be taken, in order of their index; a later turn joins when its time has come."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._ready = [job for job in jobs if job.planned.session is None or job.planned.turn == 0][::-1]
        self._turns: dict[tuple[int, int], Job] = {}
        for job in jobs:
            if job.planned.session is not None and job.planned.turn > 0:
                self._turns[job.planned.session, job.planned.turn] = job
        self._thinking: list[tuple[int, int, Job]] = []
        self._left = len(jobs)

    def take(self) -> Job | int | None:
        """A job; or the instant to ask again; or None for no more."""
        if not self._left:
            return None
        self._thinking.sort()
        if self._thinking and self._thinking[0][0] <= now_ns():
            self._left -= 1
            return self._thinking.pop(0)[2]
        if self._ready:
            self._left -= 1
            return self._ready.pop()
        return self._thinking[0][0] if self._thinking else now_ns() + 1_000_000

    def note_end(self, job: Job) -> None:
        planned = job.planned
        if planned.session is None:
            return
        after = self._turns.pop((planned.session, planned.turn + 1), None)
        if after is not None:
            self._thinking.append((now_ns() + after.planned.think_ns, after.planned.index, after))


async def _worker(load: "Load", queue: _JobQueue) -> None:
    duration_ns = load.share.duration_ns
    until_ns = None if duration_ns is None else load.begin_ns + duration_ns
    while not load.is_over and (until_ns is None or now_ns() < until_ns):
        found = queue.take()
        if found is None:
            return
        if isinstance(found, int):
            await load.alarm.sleep_until(found)
            continue
        intended_ns = now_ns()
        await load.send(found, intended_ns, intended_ns)
        queue.note_end(found)
