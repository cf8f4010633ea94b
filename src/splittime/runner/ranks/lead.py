"""What the first of several ranks does for a step besides its own part: it hands the plan on to the others, and watches
them.

When a rank fails, the step raises an `EngineError` that names it, all ranks are ended, and every later step raises the
same: an engine dies of it and is started anew. Between steps `watch` tells.
"""

from collections.abc import Callable

import msgspec

from splittime.core.errors import EngineError, SplittimeError
from splittime.core.step import PENDING, StepPlan, StepResult
from splittime.runner.batch import Slots
from splittime.runner.ranks.channel import encode
from splittime.runner.ranks.group import RankGroup, RankLost
from splittime.runner.ranks.members import Members


class Lead:
    """The other ranks, as the runner of the first one has them."""

    def __init__(self, members: Members, group: RankGroup) -> None:
        self.members, self.group = members, group
        self.failure: SplittimeError | None = None

    def run(self, plan: StepPlan, slots: Slots, run: Callable[[StepPlan], StepResult]) -> StepResult:
        """run: carries out this rank's part of the step."""
        if self.failure is not None:
            raise self.failure
        try:
            plan = _with_tokens(plan, slots)
            self.members.send(encode(plan))
            result = run(plan)
            self.members.check()
            return msgspec.structs.replace(result, collective_ns=self.group.take_ns())
        except BaseException as error:  # an interrupt too: the others are in the middle of this step
            why = self._end(error)
            if why is error:
                raise
            raise why from error

    def watch(self, tell: Callable[[SplittimeError], None]) -> None:
        """Be told, in another thread, when a rank ends that was not meant to."""
        self.members.watch(tell)

    def close(self) -> None:
        """End the other ranks."""
        self.failure = self.failure or EngineError("this model has been closed")
        self.members.end()

    def _end(self, error: BaseException) -> BaseException:
        """End the other ranks; what to raise for `error`, and for every later step."""
        if isinstance(error, RankLost | OSError) or (isinstance(error, Exception) and self.members.has_dead):
            error = self.members.cause()
        why = error if isinstance(error, SplittimeError) else EngineError(f"a step was not finished: {error!r}")
        self.failure = why
        self.members.end()
        return error


def _with_tokens(plan: StepPlan, slots: Slots) -> StepPlan:
    """Returns the plan with the tokens that were chosen here, where it could not know them: those count."""
    if all(row.token_ids != (PENDING,) for row in plan.rows):
        return plan
    rows = (row if row.token_ids != (PENDING,) else slots[row.request_id].known(row) for row in plan.rows)
    known = tuple(new or row for new, row in zip(rows, plan.rows, strict=True))
    return msgspec.structs.replace(plan, rows=known)
