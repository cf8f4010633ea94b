"""A runner made a `core.step.AsyncRunner`: a thread of its own carries out the steps in order, while the engine plans.

Worth it where the runner leaves the interpreter alone while it computes, as native kernels do. What the runner raises
comes out of `collect`, then and ever after, since there is no step after it. The thread ends when its `RunnerThread` is
forgotten, and lets go of the runner; or when the process exits, and whoever still waits for a step then is told.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from splittime.core.errors import EngineError
from splittime.core.step import StepPlan, StepResult

Plans = SimpleQueue[StepPlan | None]  # None: end
Results = SimpleQueue[StepResult | BaseException]
END_PATIENCE_S = 10.0  # for the steps that were launched, when the process exits
_alive: "weakref.WeakSet[RunnerThread]" = weakref.WeakSet()


class RunnerThread:
    """prepare: called first in the thread, for what a library keeps by thread (its number of threads, say)."""

    def __init__(self, run: Callable[[StepPlan], StepResult], prepare: Callable[[], None] = lambda: None) -> None:
        self._plans: Plans = SimpleQueue()
        self._results: Results = SimpleQueue()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=_work, args=(run, prepare, self._plans, self._results), name="runner", daemon=True
        )
        self.thread.start()
        weakref.finalize(self, self._plans.put, None).atexit = False
        _alive.add(self)

    def launch(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        if self._failure is None:
            result = self._results.get()
            if not isinstance(result, BaseException):
                return result
            self._failure = result
        raise self._failure

    def end(self) -> None:
        """After what was launched; from now on `collect` raises."""
        self._plans.put(None)
        self._failure = self._failure or _ended()
        self.thread.join(END_PATIENCE_S)


@atexit.register
def _end_all() -> None:
    """The interpreter would freeze the threads where they are, and whoever waits for one would wait for ever."""
    for ahead in list(_alive):
        ahead.end()


def _ended() -> EngineError:
    return EngineError("the runner's thread has ended")


def _work(run: Callable[[StepPlan], StepResult], prepare: Callable[[], None], plans: Plans, results: Results) -> None:
    try:
        prepare()
        while (plan := plans.get()) is not None:
            results.put(run(plan))
        results.put(_ended())
    except BaseException as error:  # whoever waits in `collect` must hear of it, whatever it is
        results.put(error)
