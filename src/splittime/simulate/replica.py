"""What a simulation needs of a server, beside the requests: settings, what steps take, what lies around the engine.

    replica = replica_of(recorded)                    from the ledger of a server
    replica.run(requests, Change({"max_num_seqs": 32}), seed=0)

A replica is a value: it can be saved, loaded on another machine, and planned with (`splittime plan`). One that comes
from a recorded run keeps the machine's pace second by second; `steady` is the same machine at its mean pace, for
requests that belong to no recorded time.
"""

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from splittime.core.errors import ConfigError, NotFound
from splittime.core.facts import Machine, TokenCost
from splittime.core.files import write_whole
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.steps import EXECUTIONS, StepRecord
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.change import LIMITS, Change, changed
from splittime.simulate.cost import MOST_NS, CostModel, Law, Noise, Pace, PaceOf, are_times
from splittime.simulate.drafts import require_known_drafts
from splittime.simulate.figures import Figures, RunningFigures
from splittime.simulate.recorded import Mix, Recorded, mix_of, plans_ahead, require_sound_accounts
from splittime.simulate.replay import scheduler_config
from splittime.simulate.run import Delivery, OnAccount, OnStep, SimulatedBooks, simulate_each
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest, at_speed

MOST_SHOWN = 100  # characters of a value
MOST_START_UP_NS = 10**14  # a day
TIMES = f"times from 0 to {MOST_NS:g} ns"

FORMAT = 2
UNBOUNDED = 2**40
MIN_REQUESTS = 20
STEADY = Pace(PaceOf(), PaceOf())
TEXT_STAGES = (Stage.RECEIVE, Stage.TOKENIZE_QUEUE, Stage.TOKENIZE)
HANDING_STAGES = (Stage.ADMIT, Stage.HANDOFF)


class Approach(NamedTuple):
    """What a request takes from its arrival to admission (a part of it for each prompt token), and from there to the
    engine."""

    to_admission_ns: int = 0
    per_prompt_token_ns: float = 0.0
    to_engine_ns: int = 0


class ModelCosts:
    """What the steps of a run cost, by a cost model, on a machine of this pace, with noise like that of the recorded
    steps. speed: how many times as fast requests come as they were recorded, by which the pace's times are scaled."""

    def __init__(self, model: CostModel, pace: Pace, seed: int, speed: float) -> None:
        self._model, self._pace, self._speed = model, pace, speed
        self._begin_ns = min(pace.decode.begins_ns[0], pace.prompts.begins_ns[0])
        self._noise = Noise(random.Random(seed), model.persistence)
        self._apart = random.Random(f"pauses {seed}")

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        recorded_ns = self._begin_ns + round((now_ns - self._begin_ns) * self._speed)
        pace, noise = self._pace.at(recorded_ns, shape), self._noise.next()
        return self._model.step_time(shape, pace, noise, self._apart.gauss(0.0, 1.0))


class EngineConfig(Protocol):
    """What is asked of any engine's settings."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...


class AnyReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A server that can be simulated, whichever engine it has; a subclass knows how. pace: how fast its machine was at
    each time. mix: lengths of its users' requests. settings, token_cost, machine: what the server says of itself.
    start_up_ns: from its processes' start until it could serve. source: where the costs come from, for people."""

    config: EngineConfig
    costs: CostModel
    pace: Pace = STEADY
    approach: Approach = Approach()
    delivery: Delivery = Delivery()
    mix: Mix | None = None
    settings: dict[str, Any] = {}
    token_cost: TokenCost | None = None
    machine: Machine | None = None
    start_up_ns: int | None = None
    source: str

    @property
    def guesses_ahead(self) -> bool:
        """Whether the server guessed tokens ahead. Of requests that it never had, nobody knows what it would guess."""
        return bool(self.settings.get("speculative_config"))

    def with_settings(self, settings: dict[str, Any]) -> Self:
        """Returns the same server with other settings. Raises ConfigError for some that cannot be."""
        raise NotImplementedError

    def steady(self) -> Self:
        """Returns the same server at its machine's mean pace."""
        return msgspec.structs.replace(self, pace=STEADY)

    def drawn(self, factor: float, rng: random.Random) -> Self:
        """Returns another server that fits the record as well: its coefficients are drawn from what the fit leaves
        open, and everything takes `factor` times as long."""
        return msgspec.structs.replace(self, costs=self.costs.sample(rng)).slower(factor)

    def slower(self, factor: float) -> Self:
        """Returns the same server on a machine where everything takes `factor` times as long."""
        return msgspec.structs.replace(self, pace=self.pace.times(factor))

    def require(self, change: Change) -> None:
        """Raises ConfigError for a change that cannot be."""
        raise NotImplementedError

    def run(self, requests: Sequence[TracedRequest], change: Change, seed: int) -> SimulatedBooks:
        """Returns the ledger of a run. seed: of the steps' noise. Raises ConfigError for a change that cannot be."""
        books = SimulatedBooks([], [])
        self.run_each(requests, change, seed, books.accounts.append, books.steps.append)
        return books

    def figures(self, requests: Sequence[TracedRequest], change: Change, seed: int) -> Figures:
        """Returns the figures of a run, whose ledger nobody keeps."""
        running = RunningFigures()
        self.run_each(requests, change, seed, running.add_account, running.add_step)
        return running.figures()

    def run_each(
        self, requests: Sequence[TracedRequest], change: Change, seed: int, on_account: OnAccount, on_step: OnStep
    ) -> None:
        """Hands over each account and each step of a run as it is closed. Raises as `run` does."""
        raise NotImplementedError


class Replica(AnyReplica, frozen=True, kw_only=True):
    """One of ours."""

    format: int = FORMAT
    config: SchedulerConfig
    limits: QueueLimits
    execution: str = "host"
    plans_ahead: bool = False

    @property
    def facts(self) -> ServerFacts:
        """What the server would say of itself, so far as it is known."""
        config, about = msgspec.to_builtins(self.config), self.costs.about
        return ServerFacts(
            version=about.get("version", ""),
            model=about.get("model", ""),
            max_model_len=self.config.max_model_len,
            settings={**self.settings, **config},
            cost=self.token_cost,
            machine=self.machine,
        )

    def require(self, change: Change) -> None:
        changed(self.config, self.limits, change)

    def with_settings(self, settings: dict[str, Any]) -> Self:
        config, limits = changed(self.config, self.limits, Change(settings))
        return msgspec.structs.replace(self, config=config, limits=limits)

    def run_each(
        self, requests: Sequence[TracedRequest], change: Change, seed: int, on_account: OnAccount, on_step: OnStep
    ) -> None:
        config, limits = changed(self.config, self.limits, change)
        costs, requests = ModelCosts(self.costs, self.pace, seed, change.speed), at_speed(requests, change.speed)
        drafts_seed = seed if any(traced.drafts for traced in requests) else None
        how = self.delivery, self.execution, True, self.plans_ahead, drafts_seed
        simulate_each(requests, config, costs, limits, on_account, on_step, *how)


def replica_of(recorded: Recorded) -> Replica:
    """Returns the server of ours that wrote this ledger. Raises ConfigError for another engine's, for a ledger that
    says too little, and for an engine that cannot be simulated."""
    if recorded.facts.engine:
        hint = f"In the environment of {recorded.facts.engine}, splittime simulate does it with that scheduler."
        words = f"the books are of {recorded.facts.engine}, whose scheduler is not ours"
        raise ConfigError(words, param="ledger", hint=hint)
    times, settings = measured(recorded), recorded.facts.settings
    return Replica(
        config=scheduler_config(recorded.facts),
        limits=QueueLimits(*(settings.get(name, UNBOUNDED) for name in LIMITS)),
        execution=statistics.mode(step.execution for step in recorded.steps),
        plans_ahead=plans_ahead(recorded),
        **times,
    )


def measured(recorded: Recorded) -> dict[str, Any]:
    """Returns what a ledger says of a server's times, by fields of `AnyReplica`. Raises as `replica_of` does."""
    from splittime.simulate.fit import fit  # scipy: half a second

    require_known_drafts(recorded.steps, recorded.facts.max_model_len)
    served = [account for account in recorded.accounts if not account.is_refused]
    if len(served) < MIN_REQUESTS:
        hint = "Record more: splittime serve --ledger-file FILE."
        raise ConfigError(f"{len(served)} requests are too few to go by", param="ledger", limit=MIN_REQUESTS, hint=hint)
    require_sound_accounts(recorded.accounts)
    costs, pace = fit(recorded.steps, recorded.facts)
    return {
        "costs": costs,
        "pace": pace,
        "approach": _approach(served),
        "delivery": _delivery(served, recorded.steps),
        "mix": mix_of(served),
        "settings": recorded.facts.settings,
        "token_cost": recorded.facts.cost,
        "machine": recorded.facts.machine,
        "start_up_ns": _start_up_ns(recorded.facts),
        "source": f"a ledger of {len(recorded.steps):,} steps",
    }


def replica_with(settings: dict[str, Any], costs: CostModel, approach: Approach, source: str) -> Replica:
    """Returns a server of which nobody has a ledger, and that refuses nobody. settings: of its scheduler, by name.
    source: where the costs come from, for people. Raises ConfigError for settings that cannot be."""
    try:
        config = msgspec.convert(settings, SchedulerConfig).validate()
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}", value=str(settings)) from None
    limits = QueueLimits(UNBOUNDED, UNBOUNDED)
    told = msgspec.to_builtins(config)
    return Replica(config=config, limits=limits, costs=costs, approach=approach, settings=told, source=source)


def save_replica(replica: Replica, path: Path) -> None:
    """Writes a file that `load_replica` reads, whole or not at all. Raises ConfigError where it cannot be written."""
    write_whole(path, msgspec.json.encode(replica) + b"\n")


def load_replica(path: Path) -> Replica:
    """Returns the server of a file. Raises NotFound, and ConfigError for a file that describes none."""
    try:
        replica = msgspec.json.decode(path.read_bytes(), type=Replica)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", param="replica", value=str(path)) from None
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "splittime calibrate writes such a file; serve --ledger-file a ledger."
        raise ConfigError(f"{path} does not describe a server: {error}", param="replica", hint=hint) from None
    replica.config.validate()
    if replica.format != FORMAT:
        words = f"{path} is of format {replica.format}; this version reads {FORMAT}"
        raise ConfigError(words, param="replica", hint="Calibrate the server again.")
    require_sound_replica(replica, path)
    return replica


def _start_up_ns(facts: ServerFacts) -> int | None:
    ready_ns = [process.ready_ns for process in facts.processes if process.ready_ns is not None]
    return max(ready_ns) - min(process.started_ns for process in facts.processes) if ready_ns else None


def _approach(served: Iterable[ClosedAccount]) -> Approach:
    """Medians of what lay before the engine. What texts took grows with the prompt: twice the tokens, twice the time,
    beyond what the shortest fifth of the prompts took."""
    ordered = sorted((account for account in served if account.prompt_tokens), key=lambda each: each.prompt_tokens)
    if not ordered:
        return Approach()
    fifth = max(1, len(ordered) // 5)
    (short_tokens, short_ns), (long_tokens, long_ns) = (
        _text_time(some) for some in (ordered[:fifth], ordered[-fifth:])
    )
    slope = max(0.0, (long_ns - short_ns) / (long_tokens - short_tokens)) if long_tokens > short_tokens else 0.0
    to_engine = statistics.median(_time_in(account, HANDING_STAGES) for account in ordered)
    return Approach(max(0, round(short_ns - slope * short_tokens)), slope, round(to_engine))


def _text_time(some: Sequence[ClosedAccount]) -> tuple[float, float]:
    """Returns the median number of prompt tokens, and the median of ns until admission."""
    tokens = statistics.median(account.prompt_tokens for account in some)
    return tokens, statistics.median(_time_in(account, TEXT_STAGES) for account in some)


def _time_in(account: ClosedAccount, stages: Sequence[Stage]) -> int:
    spent_ns = derive.stage_ns(account)
    return sum(spent_ns.get(stage, 0) for stage in stages)


def _delivery(served: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> Delivery:
    """Medians of what the server took to send, to end an answer, and its engine to wake up."""
    lags = [lag for account in served for lag in derive.send_lag_ns(account)]
    ends = [derive.stage_ns(account).get(Stage.DELIVER, 0) for account in served]
    wakes = [step.host_gap_ns for step in steps if step.idle_ns]
    return Delivery(*(int(statistics.median(values)) if values else 0 for values in (lags, ends, wakes)))


class _About(msgspec.Struct):
    """What a model says of itself, as others read it; it may say more."""

    model: str = ""
    version: str = ""
    kv_formula: str = ""


class _AboutRuns(_About, kw_only=True):
    """What a model of runs that were seen from outside says of itself (`plan.seen_steps`)."""

    off: dict[str, float]
    runs: int
    void: int


def require_sound_replica(replica: Replica, path: Path) -> None:
    """Raises ConfigError for what is not as it must be. path: of the file."""
    for law in _laws(replica):
        if not law.holds:
            value = str(attrgetter(law.field)(replica))[:MOST_SHOWN]
            words = f"{path} has costs that cannot be: {law.field} is {value}; it must be {law.must_be}"
            hint = "Calibrate the server again."
            raise ConfigError(words, param=law.field, value=value, limit=law.must_be, hint=hint)


def _laws(replica: Replica) -> Iterator[Law]:
    start_up_ns, limits = replica.start_up_ns or 0, msgspec.to_builtins(replica.limits).values()
    yield from (law._replace(field=f"costs.{law.field}") for law in replica.costs.laws())
    yield Law("costs.about", "what a calibration says of itself", _is_about(replica.costs.about))
    for name in ("decode", "prompts"):
        kind = getattr(replica.pace, name)
        yield Law(f"pace.{name}", "factors above 0, one for each of begins_ns, which rise", kind.is_sound)
    yield Law("approach", TIMES, are_times(replica.approach))
    yield Law("delivery", TIMES, are_times(replica.delivery))
    yield Law("limits", "0 or more", all(one >= 0 for one in limits))
    yield Law("execution", ", ".join(EXECUTIONS), replica.execution in EXECUTIONS)
    yield Law("start_up_ns", f"0 to {MOST_START_UP_NS:g} ns", 0 <= start_up_ns <= MOST_START_UP_NS)
    if replica.token_cost is not None:
        yield from _laws_of_cost(replica.token_cost)
    if replica.machine is not None:
        yield from _laws_of_machine(replica.machine)


def _laws_of_cost(cost: TokenCost) -> Iterator[Law]:
    for name, value in msgspec.structs.asdict(cost).items():
        yield Law(f"token_cost.{name}", "0 or more", value is None or _is_amount(value))
    yield Law("token_cost.windowed_share", "0 to 1", cost.windowed_share <= 1)
    chosen = f"at most num_experts ({cost.num_experts})"
    yield Law("token_cost.chosen_experts", chosen, cost.chosen_experts <= cost.num_experts)


def _laws_of_machine(machine: Machine) -> Iterator[Law]:
    for name, value in msgspec.structs.asdict(machine).items():
        if isinstance(value, (int, float)):
            yield Law(f"machine.{name}", "0 or more", _is_amount(value))
    are_rates = all(_is_amount(one) for pair in machine.read_rates for one in pair)
    yield Law("machine.read_rates", "sizes and rates of 0 or more", are_rates)


def _is_amount(value: float) -> bool:
    return 0 <= value < math.inf


def _is_about(about: dict[str, Any]) -> bool:
    try:
        msgspec.convert(about, _AboutRuns if "off" in about else _About)
    except msgspec.ValidationError:
        return False
    return True
