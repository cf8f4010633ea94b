"""An engine whose steps take the time that they are said to take, and compute nothing.

    clock = VirtualClock()
    engine, runner = costed_engine(Scheduler(config), by_shape(costs), clock)
    Crank(EngineParts(engine, runner), clock)

The scheduler, the cache, the engine and the crank are the real ones. `StepCosts` says what each step takes: a cost
model, or a recorded ledger. A step's own parts pass while it is planned, run and committed, so that its record shows
them where a real one does; what lies between two steps is its driver's to wait for (`after_step_ns`).

A request samples what `Answers` says of it, and else one and the same token in each step, which follows from its id:
two runs of the same requests make the same tokens, whatever else differs, and what one run has in its prefix cache is
worth as much as what the other has. Where drafts were recorded, they are told again (`simulate.drafts`).
"""

import random
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol
from zlib import crc32

import numpy as np

from splittime.core.clock import VirtualClock
from splittime.core.step import THOUSAND, Row, RowResult, StepPlan, StepResult
from splittime.engine.engine import Engine
from splittime.ledger.steps import Told
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.drafts import RequestDrafts
from splittime.simulate.shape import StepShape, StepTime, shape_of_plan

GUESSED = 0  # in the place of a guessed token: how many are right is known without
SPREAD, GOLDEN, SHIFT = 0x2545F4914F6CDD1D, np.uint64(0x9E3779B97F4A7C15), np.uint64(34)


class StepCosts(Protocol):
    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        """Returns what a step takes that computes this, and begins now. Asked once for each step, in order."""
        ...


PlanTime = Callable[[StepPlan, int], StepTime]


def by_shape(costs: StepCosts, execution: str = "host") -> PlanTime:
    """Returns what says how long the step takes that a plan describes."""
    return lambda plan, now_ns: costs.of(shape_of_plan(plan, execution), now_ns)


class Answers:
    """The tokens that simulated requests sample, by their place behind the prompt's beginning, and the drafts that are
    told there. seed: of how many drafts are right, where nobody knows."""

    def __init__(self, seed: int = 0) -> None:
        self._known: dict[str, tuple[int, tuple[int, ...]]] = {}  # where the answer begins, and its first tokens
        self._drafts: dict[str, RequestDrafts] = {}
        self._seed = seed

    def learn(self, request_id: str, begin: int, tokens: tuple[int, ...], drafts: RequestDrafts | None = None) -> None:
        if tokens:
            self._known[request_id] = begin, tokens
        if drafts is not None:
            self._drafts[request_id] = drafts

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._drafts.pop(request_id, None)

    def tokens(self, request_id: str, begin: int, count: int) -> list[int]:
        """Returns those from this place on."""
        if request_id not in self._known:
            return [output_token(request_id)] * count
        first, known = self._known[request_id]
        tokens = list(known[begin - first : begin - first + count])
        return tokens + [output_token(request_id)] * (count - len(tokens))

    def result(self, row: Row) -> RowResult:
        request_id = row.request_id
        if not row.num_samples:
            return RowResult(request_id)
        drafts = self._drafts.get(request_id)
        if drafts is not None:
            place, num_right = row.start + len(row.token_ids), 0
            if row.draft_token_ids:
                rng = random.Random(f"{self._seed} {place} {row.request_id}")
                num_right = drafts.at(place).right_of(len(row.draft_token_ids), drafts.usual, rng)
            return self.accepted(row, num_right, drafts.at(place + 1 + num_right).told)
        if request_id not in self._known:
            return _sampled(request_id)
        return RowResult(request_id, tuple(self.tokens(request_id, row.start + row.num_tokens, 1)))

    def accepted(self, row: Row, num_right: int, told: Told) -> RowResult:
        """Returns the result of a row so many of whose drafts are right. told: of drafts for the next row."""
        tokens = tuple(self.tokens(row.request_id, row.start + len(row.token_ids), 1 + num_right))
        if isinstance(told, int):
            return RowResult(row.request_id, tokens, draft_token_ids=(GUESSED,) * told)
        chances = tuple([chance / THOUSAND for chance in told])
        return RowResult(row.request_id, tokens, draft_token_ids=(GUESSED,) * len(told), draft_survival=chances)


class CurrentStep:
    """What the step in hand takes, for the engine that plans it and the runner that runs it."""

    def __init__(self, time_of: PlanTime) -> None:
        self.time_of = time_of
        self.time = StepTime()


class CostedEngine(Engine):
    """The engine, for whose planning and committing time passes."""

    def __init__(self, scheduler: Scheduler, step: CurrentStep, clock: VirtualClock) -> None:
        super().__init__(scheduler)
        self._step, self._clock = step, clock

    def begin(self, now_ns: int) -> StepPlan | None:
        plan = super().begin(now_ns)
        if plan is not None:
            self._step.time = self._step.time_of(plan, now_ns)
            self._clock.advance(self._step.time.plan_ns)
        return plan

    def end(self, result: StepResult, now_ns: int) -> None:
        super().end(result, now_ns)
        self._clock.advance(self._step.time.commit_ns)


class CostedRunner:
    """A `Runner` that lets the step's time pass."""

    verifies_drafts = True

    def __init__(self, step: CurrentStep, clock: VirtualClock, execution: str = "host") -> None:
        self.answers = Answers()
        self._step, self._clock, self._execution = step, clock, execution

    def run(self, plan: StepPlan) -> StepResult:
        time = self._step.time
        self._clock.advance(time.launch_ns + time.moves_ns + time.device_ns + time.sample_ns)
        return result_of(plan, time, self.answers, self._execution)


def result_of(plan: StepPlan, time: StepTime, answers: Answers, execution: str) -> StepResult:
    """Returns what comes of a step that takes this time."""
    offload_ns = time.offload_ns(len(plan.offloads), len(plan.restores))
    return StepResult(
        plan.step_id,
        tuple([answers.result(row) for row in plan.rows]),
        time.device_ns,
        time.sample_ns,
        execution,
        offload_ns=offload_ns,
        restore_ns=time.moves_ns - offload_ns,
    )


def costed_engine(
    scheduler: Scheduler, time_of: PlanTime, clock: VirtualClock, execution: str = "host"
) -> tuple[Engine, CostedRunner, Callable[[], int]]:
    """Returns an engine, its runner, and what tells how long after a step the next may begin."""
    step = CurrentStep(time_of)
    return CostedEngine(scheduler, step, clock), CostedRunner(step, clock, execution), lambda: step.time.host_gap_ns


@lru_cache(4096)
def output_token(request_id: str) -> int:
    """Returns the token that a simulated request samples wherever its answer is not known."""
    return mixed_tokens(crc32(request_id.encode()), 0, 1)[0]


@lru_cache(4096)
def _sampled(request_id: str) -> RowResult:
    return RowResult(request_id, (output_token(request_id),))


def mixed_tokens(seed: int, begin: int, end: int) -> list[int]:
    """Returns for each index from a first to another a number of 30 bits that depends on all of it and of the seed
    (Fibonacci hashing: Knuth, volume 3, 6.4)."""
    first = np.uint64(seed * SPREAD + begin & 0xFFFFFFFFFFFFFFFF)
    return (((np.arange(end - begin, dtype=np.uint64) + first) * GOLDEN) >> SHIFT).tolist()


class CostedDevice:
    """An `AsyncRunner`: what it was told last is told by how long it takes (`tell`)."""

    def __init__(self, clock: VirtualClock, execution: str) -> None:
        self.answers, self.ended = Answers(), StepTime()
        self._clock, self._execution = clock, execution
        self._told: deque[StepTime] = deque()
        self._launched: deque[tuple[StepPlan, StepTime, int]] = deque()  # and when it is done
        self._free_ns = 0

    def tell(self, time: StepTime) -> None:
        self._told.append(time)

    def launch(self, plan: StepPlan) -> None:
        time, begin_ns = self._told.popleft(), max(self._free_ns, self._clock.now_ns())
        self._free_ns = begin_ns + time.launch_ns + time.moves_ns + time.device_ns + time.sample_ns
        self._launched.append((plan, time, self._free_ns))

    def collect(self) -> StepResult:
        plan, self.ended, done_ns = self._launched.popleft()
        self._clock.advance_to(done_ns)
        return result_of(plan, self.ended, self.answers, self._execution)


class PlanningAhead(Engine):
    """Time passes for its plans. The device begins with a step when it was told of it and is done with the one before:

        host      (host_gap) plan 2, tell | wait for 1 | end 1, host_gap | plan 3, tell | wait for 2 | ..
        device    [ launch, moves, device, sample: step 1 ][ step 2 ..

    So from one end to the next it takes what the host takes to plan, or what the device takes, whichever is longer.
    `host_gap_ns` is what the host does from a step's end until it plans again, `commit_ns` among it.
    """

    def __init__(self, scheduler: Scheduler, time_of: PlanTime, device: CostedDevice, clock: VirtualClock) -> None:
        super().__init__(scheduler, plans_ahead=True)
        self._time_of, self._device, self._clock = time_of, device, clock

    def begin(self, now_ns: int) -> StepPlan | None:
        plan = super().begin(now_ns)
        if plan is not None:
            time = self._time_of(plan, now_ns)
            self._device.tell(time)
            self._clock.advance(time.plan_ns)
        return plan


def costed_engine_ahead(
    scheduler: Scheduler, time_of: PlanTime, clock: VirtualClock, execution: str = "host"
) -> tuple[Engine, CostedDevice, Callable[[], int]]:
    """Returns what `costed_engine` does, of an engine that plans ahead."""
    device = CostedDevice(clock, execution)
    engine = PlanningAhead(scheduler, time_of, device, clock)
    return engine, device, lambda: device.ended.commit_ns + device.ended.host_gap_ns
