"""The load that one process makes: its share of the jobs, sent by `open_loop` or `closed_loop`, and how it fared.

Open loop: each request at its intended instant, whatever became of the others. A slow server is asked no less.

A session's turns follow one another: a later one is sent at its intended instant, or `think_ns` after the turn before
has really ended, if that is later. Its intended start stays: see `schedule`.

Closed loop: so many workers, each takes the next request when its last has ended. A request's intended start is the
instant it is taken, so this load never sees a queue longer than its own concurrency: it is for capacity, not for what
users feel.

A session's later turn may be taken `think_ns` after the turn before has ended; until then workers take others, and wait
if there are none.

`Load.run` returns one outcome for each job of its share (of a closed loop that is ended by the clock: for each that was
begun). Whatever stops it early, what was not sent is UNSENT and what was in flight is hung up. The garbage collector
ought to be off meanwhile (`no_garbage_collection`): a full collection would stop all reading for its while.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from splittime.bench import event_loop
from splittime.bench.alarm import Alarm
from splittime.bench.book.records import Ending, Outcome
from splittime.bench.client import Client, unsent
from splittime.bench.schedule import Job
from splittime.bench.share import LoadCounts, LoadShare, Vitals

now_ns = time.monotonic_ns
LAG_PROBE_NS = 5_000_000
HANG_UP_S = 0.2  # for what is in flight to say so
FAILURES = (Ending.FAILED, Ending.REFUSED, Ending.TIMED_OUT)


class Load:
    """`send` is for the two loops; `take_counts` and `stop` are for whoever watches."""

    def __init__(self, share: LoadShare, *, is_alone: bool = True) -> None:
        self.share, self._is_alone = share, is_alone
        self.begin_ns = 0
        self.alarm = Alarm()
        self.clients = [Client(share, arm, self.alarm) for arm in range(len(share.targets))]
        self.is_over = False
        self._over = asyncio.Event()
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._measured_left = sum(job.is_measured for job in share.jobs)
        self._tasks: set[asyncio.Task[object]] = set()
        self._room = asyncio.Semaphore(share.max_in_flight) if share.max_in_flight else None
        self._counts = LoadCounts()
        self._why = ""
        self._lag_ns: list[int] = []
        self._cpu_share = 0.0

    # ---- for the loops

    def spawn(self, job: Job, intended_ns: int) -> asyncio.Task[object]:
        """Send a job now, whatever became of the others."""
        return self.spawn_work(self.send(job, intended_ns, intended_ns))

    def spawn_work(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def send(self, job: Job, intended_ns: int, due_ns: int) -> Outcome:
        """Send a job and note its outcome. due_ns: since when nothing but a cap held it back."""
        held_ns = max(0, due_ns - intended_ns)
        if self._room is not None:
            waits_from_ns = now_ns()
            await self._room.acquire()
            held_ns += now_ns() - waits_from_ns
        try:
            self._counts.begun += 1
            outcome = await self.clients[job.arm].send(job, intended_ns, held_ns)
        finally:
            if self._room is not None:
                self._room.release()
        self._note(job, outcome)
        return outcome

    def _note(self, job: Job, outcome: Outcome) -> None:
        self._outcomes[job.planned.index, job.arm] = outcome
        counts = self._counts
        counts.ended += 1
        counts.failed += outcome.ending in FAILURES
        counts.output_tokens += outcome.output_tokens or 0
        self._measured_left -= job.is_measured
        if self._measured_left == 0 and self._is_alone:
            self.stop("the run was over")  # what is left only kept the load up

    # ---- for whoever watches

    def take_counts(self) -> LoadCounts:
        in_flight = tuple(len(client.in_flight) for client in self.clients)
        counts, self._counts = self._counts, LoadCounts()
        for client in self.clients:
            counts.ttft_ns += client.first_chunks
            client.first_chunks.clear()
        return msgspec.structs.replace(counts, in_flight=in_flight, is_measured_done=self._measured_left == 0)

    def stop(self, why: str) -> None:
        """Begin nothing more and hang up."""
        if not self.is_over:
            self.is_over, self._why = True, why
            self._over.set()

    # ---- the whole

    async def prepare(self) -> None:
        """What would be late if it were done after the begin. Raises `ConfigError` if a server takes no connection."""
        await asyncio.gather(*(client.pool.look_up() for client in self.clients))

    async def run(self, begin_ns: int) -> tuple[list[Outcome], Vitals]:
        self.begin_ns = begin_ns
        for client in self.clients:
            client.begin_ns = begin_ns
        probe = asyncio.create_task(self._probe_lag())
        begin_cpu_s, begin_s = time.process_time(), time.monotonic()
        try:
            await self._carry_out()
        finally:
            probe.cancel()
            self._cpu_share = (time.process_time() - begin_cpu_s) / max(1e-9, time.monotonic() - begin_s)
            await self.close()
        return self._all_outcomes(), self._vitals()

    async def close(self) -> None:
        for client in self.clients:
            client.pool.close()
        self.alarm.close()

    async def _carry_out(self) -> None:
        share = self.share
        pacing = asyncio.create_task(
            open_loop(self, share.jobs) if share.concurrency is None else closed_loop(self, share.jobs)
        )
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({pacing, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            await self._hang_up()
            pacing.cancel()
            await asyncio.gather(pacing, over, return_exceptions=True)
        if not pacing.cancelled() and pacing.exception() is not None:
            raise pacing.exception()  # type: ignore[misc]

    async def _hang_up(self) -> None:
        self.is_over = True
        for client in self.clients:
            client.hang_up_all(self._why or "the run was stopped")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=HANG_UP_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _all_outcomes(self) -> list[Outcome]:
        ends_by_clock = self.share.concurrency is not None and self.share.duration_ns is not None
        outcomes = []
        for job in self.share.jobs:
            outcome = self._outcomes.get((job.planned.index, job.arm))
            if outcome is not None:
                outcomes.append(outcome)
            elif not ends_by_clock:
                at_ns = job.at_ns if job.at_ns is not None else now_ns() - self.begin_ns
                outcomes.append(unsent(job, self.share, at_ns))
        return outcomes

    async def _probe_lag(self) -> None:
        await self.alarm.sleep_until(self.begin_ns)
        due_ns = now_ns()
        while True:
            due_ns = max(due_ns + LAG_PROBE_NS, now_ns())
            await self.alarm.sleep_until(due_ns)
            self._lag_ns.append(now_ns() - due_ns)

    def _vitals(self) -> Vitals:
        pools = [client.pool for client in self.clients]
        return Vitals(
            worker=self.share.worker,
            loop_lag_ns=tuple(self._lag_ns),
            cpu_share=self._cpu_share,
            most_sockets=sum(pool.most_open for pool in pools),
            sockets_limit=event_loop.limit(),
            out_of_sockets=sum(pool.out_of_sockets for pool in pools),
            sockets_without_nodelay=sum(pool.sockets_without_nodelay for pool in pools),
        )


async def open_loop(load: Load, jobs: Sequence[Job]) -> None:
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


async def _session(load: Load, turns: Sequence[Job]) -> None:
    ended_ns = 0
    for job in turns:
        if load.is_over:
            return
        intended_ns = load.begin_ns + (job.at_ns or 0)
        due_ns = max(intended_ns, ended_ns + job.planned.think_ns) if ended_ns else intended_ns
        await load.alarm.sleep_until(due_ns)
        await load.send(job, intended_ns, due_ns)
        ended_ns = now_ns()


async def closed_loop(load: Load, jobs: Sequence[Job]) -> None:
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


async def _worker(load: Load, queue: _JobQueue) -> None:
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
