"""One run of the load on a server with these settings: taken from the notebook, or made and written there.

Each run has prompts of its own, of the same sizes at the same instants, so that no run finds another's in the prefix
cache. Ctrl-C and SIGTERM end a run; what was changed on the server is undone on the way out.

Three profiles: each a stated set of settings to begin with, and the figure that counts once the SLO is kept. Each
states the same knobs, so that none has what a server or a ledger happened to have. What a user sets goes before it.

The load of a ledger file: its busiest stretch is sent again. A ledger has no texts: prompts of other tokens are made,
equal where the recorded ones were equal (`simulate.trace`).
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from splittime.bench.book.figures import summary
from splittime.bench.book.metrics import value_of
from splittime.bench.book.records import Phase, Run
from splittime.bench.book.slo import limits_of
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import interrupted, run_loop
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule
from splittime.bench.share import Progress
from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.ledger.facts import ServerFacts
from splittime.simulate.recorded import Recorded, latest_run
from splittime.simulate.trace import TracedRequest
from splittime.simulate.what_if import requests_of
from splittime.tune.goal import Goal, Score, fault_of, score_of
from splittime.tune.knobs import KNOBS, words
from splittime.tune.notebook import Notebook
from splittime.tune.search import Say
from splittime.tune.servers import OwnServers, Servers
from splittime.wire.scrape import ServerLimits, server_limits
from splittime.wire.target import RunOptions, Target

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_mean", "throughput")
REPEATS = 3
MIN_REQUESTS = 20
WARM_UP_SHARE = 0.1
SECONDS = 30.0
USUAL_VOCAB_SIZE = 1_000
NEEDED = ("max_model_len", "block_size", "kv_cache_memory_bytes")


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


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """settings: of `splittime serve`, by name; reasons: why each. seeks: a metric of `bench.book.metrics`."""

    name: str
    seeks: str
    purpose: str
    settings: dict[str, Any]
    reasons: dict[str, str]


LATENCY = Profile(
    name="latency",
    seeks="e2e_mean",
    purpose="each request ends as soon as it can",
    settings={
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_prefill_tokens": 64,
        "policy": "shortest_prefill",
    },
    reasons={
        "max_num_seqs": "a step of fewer rows is shorter, so each token comes sooner",
        "max_num_batched_tokens": "the server's default: fewer rows and shorter pieces of prompts never fill it",
        "max_prefill_tokens": "a prompt makes those who are answered wait for a short piece of it at a time",
        "policy": "a short prompt does not wait for a long one",
    },
)
THROUGHPUT = Profile(
    name="throughput",
    seeks="throughput",
    purpose="as many tokens a second as the machine can write",
    settings={"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_prefill_tokens": 2048, "policy": "fcfs"},
    reasons={
        "max_num_seqs": "the weights are read once for more rows",
        "max_num_batched_tokens": "whole prompts fit into a step beside all rows",
        "max_prefill_tokens": "a prompt takes few steps: products of many rows use the processor well",
        "policy": "nobody is overtaken, so nothing is held back for later",
    },
)
BALANCED = Profile(
    name="balanced",
    seeks="throughput",
    purpose="the server's own defaults: many rows, and prompts in pieces that the others hardly feel",
    settings={"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_prefill_tokens": None, "policy": "fcfs"},
    reasons={
        "max_num_seqs": "more rows gain little more from reading the weights once",
        "max_num_batched_tokens": "the longest step stays within what a reader feels as even",
        "max_prefill_tokens": "measured when a server starts; one that runs already takes as many as fit into a step",
        "policy": "in the order in which they came",
    },
)
PROFILES = {profile.name: profile for profile in (LATENCY, THROUGHPUT, BALANCED)}


class ProfileFigures(msgspec.Struct, frozen=True, kw_only=True):
    """figures: of each run, by the metric's name, in base units. kept: of each run, whether it kept the SLO."""

    name: str
    purpose: str
    settings: dict[str, Any]
    kept: tuple[bool, ...]
    figures: dict[str, tuple[float, ...]]


def compare_profiles(
    measurer: Measurer, asked: Mapping[str, Any], budget: TimeBudget, repeats: int = REPEATS
) -> list[ProfileFigures]:
    """Returns what each profile does, from `repeats` runs in rotation, or fewer if time is up before. asked: settings
    that go before a profile's."""
    profiles = list(PROFILES.values())
    for number in range(repeats):
        if number and budget.left_s < len(profiles) * (measurer.seconds or 0.0):
            break
        for profile in profiles[number:] + profiles[:number]:
            measurer.run(_changes(profile, asked), number)
    return [_figures(measurer, profile, asked) for profile in profiles]


def _changes(profile: Profile, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in profile.settings.items() if name not in asked}


def _figures(measurer: Measurer, profile: Profile, asked: Mapping[str, Any]) -> ProfileFigures:
    changes = _changes(profile, asked)
    runs = [measurer.run(changes, number) for number in range(len(measurer.scores(changes)))]
    goal = Goal(slo=measurer.goal.slo, seeks=profile.seeks)
    found = [summary(run, limits=limits_of(goal.slo, run.slo)) for run in runs]
    values = {name: tuple(v for each in found if (v := value_of(each, name)) is not None) for name in FIGURES}
    kept = tuple(score_of(run, goal).keeps for run in runs)
    return ProfileFigures(name=profile.name, purpose=profile.purpose, settings=changes, kept=kept, figures=values)


class RecordedLoad:
    """about: what tells it from other loads."""

    def __init__(self, recorded: Recorded, version: str, cores: int) -> None:
        """Raises ConfigError for a ledger that is too thin, simulated, from another version or of another machine."""
        _refuse_another(recorded, version, cores)
        recorded = latest_run(recorded)
        came = requests_of(recorded, recorded.facts.max_model_len)
        self._requests = busiest(came, round(SECONDS * 1e9))
        if len(self._requests) < MIN_REQUESTS:
            what = f"the ledger's busiest {SECONDS:g} s have {len(self._requests)} requests"
            hint = "Record more: splittime serve --ledger-file FILE."
            raise ConfigError(what, param="ledger", value=len(self._requests), limit=MIN_REQUESTS, hint=hint)
        first = self._requests[0]
        self.about = {"requests": len(self._requests), "first": first.request.request_id, "seconds": SECONDS}

    def __call__(self, limits: ServerLimits) -> Schedule:
        vocab_size = limits.vocab_size or USUAL_VOCAB_SIZE
        begin_ns = self._requests[0].arrived_ns
        end_ns = self._requests[-1].arrived_ns - begin_ns + 1
        from_ns, renaming = round(end_ns * WARM_UP_SHARE), _renaming(vocab_size)
        return Schedule(
            seed=0,
            measured_from_ns=from_ns,
            measured_until_ns=end_ns,
            settings=self.about,
            requests=tuple(
                _planned(index, one, one.arrived_ns - begin_ns, from_ns, renaming)
                for index, one in enumerate(self._requests)
            ),
        )


def recorded_settings(facts: ServerFacts, known: Container[str]) -> dict[str, Any]:
    """Returns the settings of a ledger's server that a tune turns, or that these depend on, by name. known: the names
    that a server can be started with."""
    names = (*(name for name in KNOBS if name in known), *NEEDED)
    return {name: value for name in names if (value := facts.settings.get(name)) is not None}


def busiest(requests: Sequence[TracedRequest], length_ns: int) -> list[TracedRequest]:
    """Returns the requests of the stretch of this length in which most came, by arrival."""
    ordered = sorted(requests, key=lambda one: one.arrived_ns)
    best, end = (0, 0), 0
    for begin, one in enumerate(ordered):
        while end < len(ordered) and ordered[end].arrived_ns < one.arrived_ns + length_ns:
            end += 1
        best = max(best, (begin, end), key=lambda both: both[1] - both[0])
    return ordered[best[0] : best[1]]


def _renaming(vocab_size: int) -> Callable[[int], int]:
    """Returns another token for each, a different one for each. A mere shift would not do: prompts made for a trace are
    sequences with one step, and a shifted one may begin as another."""
    factor, shift = vocab_size, secrets.randbelow(vocab_size)
    while math.gcd(factor, vocab_size) > 1:
        factor = 1 + secrets.randbelow(vocab_size)
    return lambda token: (factor * token + shift) % vocab_size


def _planned(index: int, one: TracedRequest, at_ns: int, from_ns: int, renaming: Callable[[int], int]) -> Planned:
    prompt = tuple(map(renaming, one.request.prompt_token_ids))
    return Planned(
        index=index,
        at_ns=at_ns,
        output_tokens=max(1, one.request.sampling.max_tokens or one.account.output_tokens),
        prompt=prompt,
        phase=Phase.MEASURED if at_ns >= from_ns else Phase.WARM_UP,
        expected_prompt_tokens=len(prompt),
    )


def _refuse_another(recorded: Recorded, version: str, cores: int) -> None:
    facts = recorded.facts
    if facts.simulated:
        raise ConfigError("the ledger is simulated", param="ledger", value=facts.simulated, hint="Give a real one.")
    there = facts.machine.cores if facts.machine is not None else None
    for what, found, wanted in (("version", facts.version, version), ("number of cores", there, cores)):
        if found is not None and found != wanted:
            hint = "Record it with this version, on this machine: splittime serve --ledger-file FILE."
            message = f"the ledger is of another {what}: {found} there, {wanted} here"
            raise ConfigError(message, param="ledger", value=found, limit=wanted, hint=hint)
