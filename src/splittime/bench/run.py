"""Carries out a schedule and tells the truth about it: the whole of a run, from the first probe to the `Run`.

    open_arm (recognise, probe, scrape) -> load, sampled and watched -> close_arm (scrape, its own book) -> audit

`Conductor` looks after the middle. The load is made in this process, or by processes of its own, so that neither a
display nor the reading of metrics makes it late (`RunOptions.workers`; the command line asks for that).

A run ends when its schedule is done, when `stop` is set (Ctrl-C), when one of its processes died, or when the test of
`saturation` says that going on tells nothing new; `Run.stopped` says which. Cool-down requests that are still open when
the last measured one has ended are hung up: they only kept the load up.

What was measured is not lost to what comes after it: if `stop` is set while the servers are asked about the load, they
are asked no more; if it was set before, they have `PATIENCE_S`; and what goes wrong with their answers is a note.
`tests/bench/test_interruption.py` checks it. Set before the load began, `stop` leaves nothing to be told: an error.

One run while it goes on: the parts that make its load, their counts, the server's gauges, and when to stop.

Each wait of a run outside its load goes through `unless` or `before_the_load`, so that it can be ended.
"""

import asyncio
import bisect
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from splittime.bench import event_loop, servers
from splittime.bench.audit import audit, audit_steal, stolen
from splittime.bench.book.metrics import lags_by_statistic
from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, RunCheck, Sample
from splittime.bench.event_loop import no_garbage_collection
from splittime.bench.load import Load
from splittime.bench.schedule import Job, Schedule, jobs_of, split
from splittime.bench.share import LoadCounts, LoadShare, OnProgress, Progress, Vitals
from splittime.bench.workers import WorkerProcess, num_workers
from splittime.core.errors import ConfigError, EngineError
from splittime.present.terminal import clipped
from splittime.stats import saturation
from splittime.wire.target import Interleave, RunOptions, Target

now_ns = time.monotonic_ns
LEAD_NS = 50_000_000  # from "all are ready" to the run's begin
WATCH_S = 0.1


LoadPart = Load | WorkerProcess  # one process' share of the load, with the same five methods


class Conductor:
    """`carry_out` does it all; what was found stands in the public attributes then."""

    def __init__(
        self,
        schedule: Schedule,
        jobs: Sequence[Job],
        targets: Sequence[Target],
        arms: Sequence[Arm],
        options: RunOptions,
        session: aiohttp.ClientSession,
        on_progress: OnProgress | None,
    ) -> None:
        self._schedule, self._jobs, self._targets, self._arms = schedule, jobs, targets, arms
        self._options, self._session, self._on_progress = options, session, on_progress
        self.begin_ns = self.begin_unix_ns = 0
        self.outcomes: list[Outcome] = []
        self.vitals: list[Vitals] = []
        self.samples: list[Sample] = []
        self.steal: RunCheck | None = None
        self.stopped: str | None = None
        self._tally = LoadCounts()
        self._in_flight = [0] * len(arms)
        self._judge = saturation.Judge()
        self._run_id = f"bench-{secrets.token_hex(6)}"
        self._instants = sorted(job.at_ns for job in jobs if job.at_ns is not None)
        self._parts = self._make_parts()

    def _make_parts(self) -> list[LoadPart]:
        limits = [limit for limit in (self._schedule.concurrency, self._options.max_in_flight) if limit is not None]
        count = min(num_workers(self._options.workers, self._jobs), *limits, len(self._jobs))
        shares = [self._share(jobs, place, count) for place, jobs in enumerate(split(self._jobs, count))]
        event_loop.allow()
        event_loop.check(shares)
        if self._options.workers == 0:
            return [Load(shares[0])]
        return [WorkerProcess(share) for share in shares]

    def _share(self, jobs: Sequence[Job], worker: int, count: int) -> LoadShare:
        """Concurrency and the cap on requests in flight are dealt out too."""

        def dealt(whole: int | None) -> int | None:
            return None if whole is None else whole // count + (worker < whole % count)

        return LoadShare(
            jobs=tuple(jobs),
            concurrency=dealt(self._schedule.concurrency),
            duration_ns=self._schedule.duration_ns,
            targets=tuple(self._targets),
            kinds=tuple(arm.kind for arm in self._arms),
            models=tuple(t.model or arm.model for t, arm in zip(self._targets, self._arms, strict=True)),
            run_id=self._run_id,
            timeout_s=self._options.timeout_s,
            max_in_flight=dealt(self._options.max_in_flight),
            worker=worker,
        )

    # ---- while it goes on

    async def carry_out(self, stop: asyncio.Event | None) -> None:
        with no_garbage_collection():
            try:
                await before_the_load(stop, self._prepare())
                await self._carry_out(stop)
            finally:
                await asyncio.gather(*(part.close() for part in self._parts))

    async def _prepare(self) -> bool:
        await asyncio.gather(*(part.prepare() for part in self._parts))
        return True

    async def _carry_out(self, stop: asyncio.Event | None) -> None:
        self.begin_ns = now_ns() + LEAD_NS
        self.begin_unix_ns = time.time_ns() + LEAD_NS
        running = [asyncio.create_task(self._run(part)) for part in self._parts]
        watching = [asyncio.create_task(self._watch(stop)), asyncio.create_task(self._sample())]
        stolen_before = stolen()
        try:
            done = await asyncio.gather(*running)
            self.steal = audit_steal(stolen_before, stolen())
        finally:
            for task in (*watching, *running):
                task.cancel()
            troubles = await asyncio.gather(*watching, *running, return_exceptions=True)
        for trouble in troubles:
            if isinstance(trouble, Exception):
                raise trouble
        self._take_news()
        self.outcomes = sorted((o for found, _ in done for o in found), key=lambda o: (o.index, o.arm))
        self.vitals = [vitals for _, vitals in done]

    async def _run(self, part: LoadPart) -> tuple[list[Outcome], Vitals]:
        """A part's outcomes. One that died voids the run: the others need not go on."""
        outcomes, vitals = await part.run(self.begin_ns)
        if vitals.died is not None:
            self._end(vitals.died)
        return outcomes, vitals

    async def _watch(self, stop: asyncio.Event | None) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            is_measured_done = self._take_news()
            if is_measured_done:
                self._stop_all("the run was over")
            elif stop is not None and stop.is_set():
                self._end("interrupted")
            elif self._options.stop_on_saturation and self._schedule.concurrency is None:
                verdict = self._judge.look(self._elapsed_ns())
                if verdict is not None:
                    self._end(verdict)
            self._show()

    def _show(self) -> None:
        """The run goes on without its display if that is gone."""
        if self._on_progress is not None:
            try:
                self._on_progress(self._progress())
            except OSError:
                self._on_progress = None

    def _take_news(self) -> bool:
        """Returns whether every process has all its measured outcomes."""
        counts = [part.take_counts() for part in self._parts]
        for one in counts:
            self._tally.add(one)
            self._judge.add_ttft(one.ttft_ns)
        for arm in range(len(self._arms)):
            self._in_flight[arm] = sum(one.in_flight[arm] for one in counts if one.in_flight)
        self._judge.add_in_flight(self._elapsed_ns(), sum(self._in_flight))
        return all(one.is_measured_done for one in counts)

    def _end(self, why: str) -> None:
        if self.stopped is None:
            self.stopped = why
            self._stop_all(f"the run was stopped: {why}")

    def _stop_all(self, why: str) -> None:
        for part in self._parts:
            part.stop(why)

    async def _sample(self) -> None:
        """Ask each server's metrics now and then. One that answers slowly is asked less often."""
        while True:
            await asyncio.sleep(self._options.sample_interval_s)
            for place, (arm, target) in enumerate(zip(self._arms, self._targets, strict=True)):
                at_ns, in_flight = self._elapsed_ns(), self._in_flight[place]
                gauges = await servers.sample(self._session, arm, target)
                self.samples.append(Sample(at_ns=at_ns, arm=place, in_flight=in_flight, **gauges._asdict()))

    def _elapsed_ns(self) -> int:
        return now_ns() - self.begin_ns

    def _progress(self) -> Progress:
        elapsed_ns, tally = max(0, self._elapsed_ns()), self._tally
        last_ns = self._instants[-1] if self._instants else self._schedule.duration_ns
        return Progress(
            elapsed_s=elapsed_ns / 1e9,
            planned=len(self._jobs),
            due=bisect.bisect_right(self._instants, elapsed_ns) if self._instants else tally.begun,
            begun=tally.begun,
            ended=tally.ended,
            failed=tally.failed,
            in_flight=sum(self._in_flight),
            output_tokens=tally.output_tokens,
            ttft_p50_s=tally.latest_ttft_s(50),
            ttft_p99_s=tally.latest_ttft_s(99),
            ends_at_s=None if last_ns is None else last_ns / 1e9,
        )


Result = TypeVar("Result")


async def unless(stop: asyncio.Event | None, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Returns what the work gives; None, and the work cancelled, if `stop` is set first."""
    if stop is None:
        return await work
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def before_the_load(stop: asyncio.Event | None, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns what the work gives. Raises `EngineError` if `stop` is set first: there is nothing to keep yet."""
    found = await unless(stop, work)
    if found is None:
        raise EngineError("interrupted before the load began: nothing was measured", code="interrupted")
    return found


PATIENCE_S = 10.0


async def run_schedule(
    schedule: Schedule,
    targets: Sequence[Target],
    options: RunOptions | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Carry out a schedule on one or two servers. Raises `ConfigError` and `EngineError` before the load only."""
    options = options or RunOptions()
    options.validate()
    if not schedule.requests or not 1 <= len(targets) <= 2:
        what = "a run needs at least one request and one or two servers"
        raise ConfigError(what, param="schedule", value=f"{len(schedule.requests)} requests, {len(targets)} servers")
    if not any(planned.phase is Phase.MEASURED for planned in schedule.requests):
        raise ConfigError("no request of the schedule is measured", param="schedule", hint="give one phase 'measured'")
    jobs = jobs_of(schedule, len(targets), options.interleave, int(options.block_s * 1e9))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        arms = await before_the_load(stop, _open(session, targets))
        conductor = Conductor(schedule, jobs, targets, arms, options, session, on_progress)
        await conductor.carry_out(stop)
        arms = [
            await _close(session, arm, target, [o for o in conductor.outcomes if o.arm == place], stop)
            for place, (arm, target) in enumerate(zip(arms, targets, strict=True))
        ]
    return book(schedule, options, conductor, arms)


async def _open(session: aiohttp.ClientSession, targets: Sequence[Target]) -> list[Arm]:
    return [await servers.open_arm(session, target) for target in targets]


async def _close(
    session: aiohttp.ClientSession, arm: Arm, target: Target, outcomes: Sequence[Outcome], stop: asyncio.Event | None
) -> Arm:
    """The arm with what its server says after the load, or with a note of why not."""
    work = servers.close_arm(session, arm, target, outcomes)
    try:
        if stop is not None and stop.is_set():
            closed: Arm | None = await asyncio.wait_for(work, PATIENCE_S)
        else:
            closed = await unless(stop, work)
        why = "the run was interrupted"
    except TimeoutError:
        closed, why = None, f"the run was interrupted, and it did not answer within {PATIENCE_S:g} s"
    except Exception as error:  # whatever it is, the load is over, and its outcomes are not to be lost
        closed, why = None, clipped(f"{type(error).__name__}: {error}")
    if closed is not None:
        return closed
    note = f"What the server says of itself after the load is not here: {why}."
    return msgspec.structs.replace(arm, notes=(*arm.notes, note))


def book(schedule: Schedule, options: RunOptions, conductor: Conductor, arms: Sequence[Arm]) -> Run:
    """The run, with what the client says of itself."""
    in_blocks = len(arms) > 1 and options.interleave is Interleave.BLOCKS
    from_ns, until_ns = measured_window(schedule, conductor.outcomes, in_blocks)
    interleave = {"interleave": str(options.interleave)} if len(arms) > 1 else {}
    run = Run(
        label=options.label,
        begin_ns=conductor.begin_ns,
        begin_unix_ns=conductor.begin_unix_ns,
        measured_from_ns=from_ns,
        measured_until_ns=until_ns,
        settings={**schedule.settings, **interleave, **options.settings},
        schedule_digest=schedule.digest,
        seed=schedule.seed,
        slo=options.slo,
        arms=tuple(arms),
        outcomes=tuple(conductor.outcomes),
        samples=tuple(conductor.samples),
        stopped=conductor.stopped,
    )
    checks = audit(run, conductor.vitals, conductor.steal, schedule.concurrency)
    return msgspec.structs.replace(run, checks=checks, loop_lag_ns=_loop_lag_ns(conductor.vitals))


def _loop_lag_ns(vitals: Sequence[Vitals]) -> dict[str, float]:
    """By statistic, each of the process that was worst in it."""
    known = [lags_by_statistic(one.loop_lag_ns) for one in vitals]
    return {
        name: max(one.get(name, 0.0) for one in known) for name in dict.fromkeys(name for one in known for name in one)
    }


def measured_window(schedule: Schedule, outcomes: Sequence[Outcome], in_blocks: bool = False) -> tuple[int, int]:
    """[from, until) of intended starts; of a closed loop from the first measured start to the last measured end. In
    blocks the schedule's window is stretched, so it is from the first measured start to the last."""
    measured = [o for o in outcomes if o.phase is Phase.MEASURED and o.ending is not Ending.UNSENT]
    from_ns, until_ns = schedule.measured_from_ns, schedule.measured_until_ns
    if from_ns is not None and until_ns is not None and not in_blocks:
        return from_ns, until_ns
    if not measured:
        return 0, 0
    last_ns = max(o.intended_ns for o in measured) + 1
    if schedule.concurrency is not None:
        last_ns = max(last_ns, *(o.end_ns or 0 for o in measured))
    return min(o.intended_ns for o in measured), last_ns
