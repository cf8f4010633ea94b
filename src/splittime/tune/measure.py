"""One run of the load on a server with these settings: taken from the notebook, or made and written there.

Each run has prompts of its own, of the same sizes at the same instants, so that no run finds another's in the prefix
cache. Ctrl-C and SIGTERM end a run; what was changed on the server is undone on the way out.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from splittime.bench.book.records import Run
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import interrupted, run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Schedule
from splittime.bench.share import Progress
from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.simulate.recorded import Recorded
from splittime.tune.goal import Goal, Score, fault_of, score_of
from splittime.tune.knobs import words
from splittime.tune.notebook import Notebook
from splittime.tune.search import Say
from splittime.tune.servers import OwnServers, Servers
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import RunOptions, Target


class TimeBudget:
    """Runs from now on."""

    def __init__(self, minutes: float) -> None:
        self._begin_s, self._whole_s = time.monotonic(), minutes * 60

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._whole_s - self.spent_s)

    def __str__(self) -> str:
        left_s = self.left_s
        return f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"


USUAL = {"duration_s": 20.0, "warm_up_s": 2.0}
TRIES = 2  # of a run until it is not void
Load = Callable[[ServerLimits], Schedule]


class VoidRun(EngineError):
    """The client was at fault in each try, so nobody knows what the server did."""


class DrawnLoad:
    """A load of `bench`, by the fields of its `LoadSpec`."""

    def __init__(self, load: Mapping[str, Any]) -> None:
        says_length = {"duration_s", "num_requests", "trace"} & set(load)
        usual = {name: value for name, value in USUAL.items() if name != "duration_s" or not says_length}
        if "warm_up_requests" in load:
            usual.pop("warm_up_s")
        self.about = {**usual, "seed": 0, **load}

    def __call__(self, limits: ServerLimits) -> Schedule:
        return draw_for(self.about, limits)


class Maker(Protocol):
    """Makes a run with changes to the settings. is_live: only what a running server takes can be changed."""

    is_live: bool

    def make(self, changes: Mapping[str, Any], number: int) -> Run: ...

    def learn(self, run: Run) -> None:
        """Takes from a run, new or from the notebook, what the next ones need."""
        ...


class Measurer:
    """seconds: what the last run cost, its server's start included; None before the first."""

    def __init__(self, maker: Maker, goal: Goal, notebook: Notebook) -> None:
        self.maker, self.goal, self.notebook = maker, goal, notebook
        self.seconds: float | None = None

    def run(self, changes: Mapping[str, Any], number: int) -> Run:
        """Returns the run of this number with these changes. Raises VoidRun, and what making it raises."""
        run = self.notebook.run(changes, number)
        if run is None:
            run = self._made(changes, number)
        self.maker.learn(run)
        return run

    def _made(self, changes: Mapping[str, Any], number: int) -> Run:
        """Returns a new run, which is in the notebook then. A void one is made again, and never kept."""
        for _ in range(TRIES):
            begin_s = time.monotonic()
            run = self.maker.make(changes, number)
            self.seconds = time.monotonic() - begin_s
            fault = fault_of(run, self.goal)
            if fault is None:
                self.notebook.add_run(changes, number, run, score_of(run, self.goal), self.seconds)
                return run
        hint = "Stop what else runs on this machine, or ask for less: a lower --rate."
        raise VoidRun(f"{TRIES} runs of {words(changes)} were void: {fault}", value=fault, hint=hint)

    def scores(self, changes: Mapping[str, Any]) -> list[Score]:
        """Returns those of all runs with these changes."""
        return [one.score for one in self.notebook.measured if one.changes == changes]


class RealRuns:
    """Makes runs on real servers."""

    def __init__(self, servers: Servers, load: Load, goal: Goal, say: Say) -> None:
        self._servers, self._load, self._goal, self._say = servers, load, goal, say
        self.is_live = servers.is_live

    def make(self, changes: Mapping[str, Any], number: int) -> Run:
        """Raises KeyboardInterrupt if it was interrupted, and what the server's start and `run_schedule` raise."""
        self._say(f"{'turning the knobs' if self.is_live else 'starting a server'}: {words(changes)}", None)
        with self._servers.serving(changes) as target:
            return run_until_interrupted(lambda stop: self._sent(target, changes, number, stop))

    def learn(self, run: Run) -> None:
        """Keeps the size of a block, by which more of them are asked for."""
        facts = run.arms[0].facts
        if isinstance(self._servers, OwnServers) and facts is not None:
            self._servers.block_bytes = facts.settings.get("kv_bytes_per_block")

    async def _sent(self, target: Target, changes: Mapping[str, Any], number: int, stop: asyncio.Event) -> Run:
        schedule = self._load(await server_limits(target))
        name = f"run {number + 1} of {words(changes)}"

        def on_progress(progress: Progress) -> None:
            share = progress.elapsed_s / progress.ends_at_s if progress.ends_at_s else None
            self._say(name, share)

        options = RunOptions(workers=None, slo=self._goal.slo, label=words(changes))
        return await run_schedule(schedule, [target], options, on_progress, stop)


def run_until_interrupted(work: Callable[[asyncio.Event], Any]) -> Run:
    """Returns what the work returns. Raises KeyboardInterrupt if Ctrl-C or SIGTERM came before its loop was closed."""
    stops: list[asyncio.Event] = []

    async def watched() -> Run | None:
        stops.append(stop := interrupted())
        try:
            run = await work(stop)
        except SplittimeError:
            if stop.is_set():
                return None
            raise
        return run

    found = run_loop(watched())
    if found is None or stops[0].is_set():  # it may come while the loop is being closed, too
        raise KeyboardInterrupt
    return found


def recorded_of(run: Run) -> Recorded:
    """Returns the server's own book of a run. Raises EngineError for a server without one."""
    arm = run.arms[0]
    if arm.facts is None or not arm.steps:
        hint = "Only a splittime server keeps the books that a prediction is made from."
        raise EngineError(f"{arm.url} has no ledger of the run", hint=hint)
    return Recorded(arm.accounts, arm.steps, arm.facts)


def recorded_of_all(run: Run, others: Iterable[Run]) -> Recorded:
    """Returns the book of a run with the steps of other runs, of servers whose steps take as long as this one's: those
    of one run after those of another, in the order in which they were made."""
    recorded = recorded_of(run)
    books = {each.arms[0].steps[:1]: each.arms[0].steps for each in (*others, run) if each.arms[0].steps}
    ordered = sorted(books.values(), key=lambda steps: steps[0].begin_ns)
    return msgspec.structs.replace(recorded, steps=[step for steps in ordered for step in steps])


def limits_of_run(run: Run) -> ServerLimits:
    """Returns what the server said of itself then. Raises ConfigError for a server that tells nothing."""
    facts = run.arms[0].facts
    if facts is None:
        raise ConfigError("the run has no facts of its server", param="run")
    settings = facts.settings
    found = {name: settings.get(name) for name in ("vocab_size", "block_size")}
    return msgspec.convert({**found, "max_model_len": facts.max_model_len}, ServerLimits)
