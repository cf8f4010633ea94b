"""An engine that plans ahead, whose steps take the time that they are said to take, and compute nothing.

    host      (host_gap) plan 2, tell | wait for 1 | end 1, host_gap | plan 3, tell | wait for 2 | ..
    device    [ launch, moves, device, sample: step 1 ][ step 2 ..

The device begins with a step when it was told of it and is done with the one before. So from one end to the next it
takes what the host takes to plan, or what the device takes, whichever is longer. `host_gap_ns` is what the host does
from a step's end until it plans again, `commit_ns` among it.
"""

from collections import deque
from collections.abc import Callable

from splittime.core.clock import VirtualClock
from splittime.core.step import StepPlan, StepResult
from splittime.engine.engine import Engine
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.costed import Answers, PlanTime, result_of
from splittime.simulate.shape import StepTime


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
    """Time passes for its plans."""

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
    """Returns what `costed.costed_engine` does, of an engine that plans ahead."""
    device = CostedDevice(clock, execution)
    engine = PlanningAhead(scheduler, time_of, device, clock)
    return engine, device, lambda: device.ended.commit_ns + device.ended.host_gap_ns
