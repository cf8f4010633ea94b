"""Steps that are computed one after the other, for a driver that launches and collects them."""

from splittime.core.step import Runner, StepPlan, StepResult


class InTurn:
    """A `Runner` as an `AsyncRunner`: a step is computed when its result is asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "no step was launched"
        return self._runner.run(plan)
