"""Carries out a schedule and tells the truth about it: the whole of a run, from the first probe to the `Run`.

    open_arm (recognise, probe, scrape) -> load, sampled and watched -> close_arm (scrape, its own book) -> audit

`conductor` looks after the middle. The load is made in this process, or by processes of its own, so that neither a
display nor the reading of metrics makes it late (`RunOptions.workers`; the command line asks for that).

A run ends when its schedule is done, when `stop` is set (Ctrl-C), or when the test of `saturation` says that going on
tells nothing new; `Run.stopped` says which. Cool-down requests that are still open when the last measured one has ended
are hung up: they only kept the load up.
"""

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from splittime.core.errors import ConfigError
from splittime.ledger.client_book import Arm, Ending, Outcome, Phase, Run
from splittime.loadgen import servers
from splittime.loadgen.audit import audit
from splittime.loadgen.conductor import Conductor
from splittime.loadgen.jobs import jobs_of
from splittime.loadgen.progress import OnProgress
from splittime.loadgen.schedule import Schedule
from splittime.loadgen.target import Interleave, RunOptions, Target


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
        arms = [await servers.open_arm(session, target) for target in targets]
        conductor = Conductor(schedule, jobs, targets, arms, options, session, on_progress)
        await conductor.carry_out(stop)
        outcomes = conductor.outcomes
        arms = [
            await servers.close_arm(session, arm, target, [o for o in outcomes if o.arm == place])
            for place, (arm, target) in enumerate(zip(arms, targets, strict=True))
        ]
    return book(schedule, options, conductor, arms)


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
    return msgspec.structs.replace(run, checks=audit(run, conductor.vitals))


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
