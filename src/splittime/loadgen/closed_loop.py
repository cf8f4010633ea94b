"""Closed loop: so many workers, each takes the next request when its last has ended. A request's intended start is the
instant it is taken, so this load never sees a queue longer than its own concurrency: it is for capacity, not for what
users feel.

A session's later turn may be taken `think_ns` after the turn before has ended; until then workers take others, and wait
if there are none.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittime.loadgen.jobs import Job

if TYPE_CHECKING:
    from splittime.loadgen.load import Load

now_ns = time.monotonic_ns


async def closed_loop(load: "Load", jobs: Sequence[Job]) -> None:
    """Each arm has workers of its own."""
    await load.alarm.sleep_until(load.begin_ns)
    workers = []
    for arm in range(len(load.clients)):
        line = _Line([job for job in jobs if job.arm == arm])
        workers += [load.spawn_work(_worker(load, line)) for _ in range(load.share.concurrency or 1)]
    await asyncio.gather(*workers)


class _Line:
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


async def _worker(load: "Load", line: _Line) -> None:
    duration_ns = load.share.duration_ns
    until_ns = None if duration_ns is None else load.begin_ns + duration_ns
    while not load.is_over and (until_ns is None or now_ns() < until_ns):
        found = line.take()
        if found is None:
            return
        if isinstance(found, int):
            await load.alarm.sleep_until(found)
            continue
        intended_ns = now_ns()
        await load.send(found, intended_ns, intended_ns)
        line.note_end(found)
