"""Carries out a schedule and tells the truth about it: the whole of a run, from the first probe to the `Run`.

    open_arm (recognise, probe, scrape) -> load, sampled and watched -> close_arm (scrape, its own book) -> audit

`conductor` looks after the middle. The load is made in this process, or by processes of its own, so that neither a
display nor the reading of metrics makes it late (`RunOptions.workers`; the command line asks for that).

A run ends when its schedule is done, when `stop` is set (Ctrl-C), when one of its processes died, or when the test of
`saturation` says that going on tells nothing new; `Run.stopped` says which. Cool-down requests that are still open when
the last measured one has ended are hung up: they only kept the load up.

What was measured is not lost to what comes after it: if `stop` is set while the servers are asked about the load, they
are asked no more; if it was set before, they have `PATIENCE_S`; and what goes wrong with their answers is a note.
`tests/bench/test_interruption.py` checks it. Set before the load began, `stop` leaves nothing to be told: an error.
"""

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from splittime.bench import servers
from splittime.bench.audit import audit
from splittime.bench.book.metrics import lags_by_statistic
from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.bench.conductor import Conductor, before_the_load, unless
from splittime.bench.jobs import jobs_of
from splittime.bench.schedule import Schedule
from splittime.bench.share import OnProgress, Vitals
from splittime.core.errors import ConfigError
from splittime.present.terminal import clipped
from splittime.wire.target import Interleave, RunOptions, Target

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
