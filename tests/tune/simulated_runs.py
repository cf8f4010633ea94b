"""Runs on a server whose truth is known: a replica with known costs, simulated, so that a whole tune takes seconds."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import known_replicas
import msgspec

from splittime.bench.book.records import Run, RunCheck
from splittime.bench.draw import draw_for
from splittime.core.facts import Machine
from splittime.ledger.facts import ServerFacts
from splittime.plan.capacity import run_of
from splittime.plan.load import asked_of, asked_requests
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.change import Change
from splittime.simulate.replica import Approach, Replica
from splittime.tune.goal import Goal
from splittime.tune.measure import DrawnLoad, Measurer
from splittime.tune.notebook import Notebook
from splittime.wire.scrape import ServerLimits

COSTS = msgspec.structs.replace(known_replicas.COSTS, device=(1e6, 0.0, 2e5, 2e4, 10.0, 0.0))
HEALTHY = SchedulerConfig(max_model_len=1024, num_blocks=2048, block_size=16, max_num_seqs=64)
LOAD = {"rate": 40.0, "duration_s": 2.5, "warm_up_s": 0.3, "input_tokens": "64", "output_tokens": "24", "seed": 3}
MEASURED_ONLY = ("num_threads", "quantization", "kv_cache_dtype")


def replica_with(config: SchedulerConfig, factor: float = 1.0) -> Replica:
    """Returns a server whose steps take `factor` times as long."""
    costs = msgspec.structs.replace(COSTS, device=tuple(one * factor for one in COSTS.device))
    return Replica(
        config=config,
        limits=QueueLimits(10**9, 10**12),
        costs=costs,
        approach=Approach(1_000, 10.0, 500),
        source="test",
    )


class SimulatedRuns:
    """A maker of runs. factors: how long steps take with a value of a knob that only measuring can judge."""

    is_live = False
    load: ClassVar[dict[str, Any]] = LOAD

    def __init__(self, config: SchedulerConfig, goal: Goal, factors: Mapping[tuple[str, Any], float] | None = None):
        self.config, self.goal, self.factors = config, goal, dict(factors or {})
        self.made: list[tuple[dict[str, Any], int]] = []
        self.stops_at: int | None = None

    def make(self, changes: Mapping[str, Any], number: int) -> Run:
        if self.stops_at == len(self.made):
            raise KeyboardInterrupt
        self.made.append((dict(changes), number))
        predicted = {name: value for name, value in changes.items() if name not in MEASURED_ONLY}
        factor = 1.0
        for item in changes.items():
            factor *= self.factors.get(item, 1.0)
        rng = random.Random(f"{changes} {number}")
        replica = replica_with(self.config, factor * rng.uniform(0.99, 1.01))
        limits = ServerLimits(vocab_size=1000, max_model_len=self.config.max_model_len, block_size=16)
        schedule = draw_for(self.load, limits)
        requests = list(asked_requests(asked_of(schedule), replica.approach, self.config.max_model_len))
        books = replica.run(requests, Change(predicted), seed=number)
        run = run_of(books, self.goal.slo, self.load["warm_up_s"] / (self.load["warm_up_s"] + self.load["duration_s"]))
        return self._with_facts(run, changes, {p.index: p.output_tokens for p in schedule.requests})

    def _with_facts(self, run: Run, changes: Mapping[str, Any], asked: Mapping[int, int]) -> Run:
        settings = {"num_threads": 1, "quantization": None, "kv_cache_dtype": "auto", "vocab_size": 1000}
        settings |= {**msgspec.structs.asdict(self.config), **changes}
        machine = Machine(cpu="test", threads=1)
        facts = ServerFacts(version="0", model="test", max_model_len=1024, settings=settings, machine=machine)
        arm = msgspec.structs.replace(run.arms[0], facts=facts)
        outcomes = [msgspec.structs.replace(o, expected_output_tokens=asked[o.index]) for o in run.outcomes]
        return msgspec.structs.replace(run, arms=(arm,), outcomes=tuple(outcomes))

    def learn(self, run: Run) -> None:
        pass


class VoidRuns(SimulatedRuns):
    """The first tries of the run of this number with changes (of the settings as they are, without) are void."""

    def __init__(self, *given: Any, number: int, has_changes: bool, tries: int) -> None:
        super().__init__(*given)
        self._number, self._has_changes, self._left = number, has_changes, tries

    def make(self, changes: Mapping[str, Any], number: int) -> Run:
        run = super().make(changes, number)
        if self._left == 0 or number != self._number or bool(changes) != self._has_changes:
            return run
        self._left -= 1
        died = RunCheck(name="workers", ok=False, sentence="a worker died")
        return msgspec.structs.replace(run, checks=(died,))


def measurer(runs: SimulatedRuns, path: Path | None = None) -> Measurer:
    about = {"load": LOAD, "goal": runs.goal, "settings": msgspec.structs.asdict(runs.config)}
    return Measurer(runs, runs.goal, Notebook(path, about))


def load() -> DrawnLoad:
    return DrawnLoad(LOAD)
