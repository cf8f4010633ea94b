"""A runner whose results bring drafts: the seam where speculation goes in.

A `Drafter` guesses what follows a request's tokens, and `DraftingRunner` puts the guesses into the results of the
runner that it wraps. The scheduler passes them on into the next rows, and that runner verifies them. Guesses cost time
and change no token: what is accepted is what would have been sampled anyway.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.step import AsyncRunner, RowResult, Runner, StepPlan, StepResult


class Drafter(Protocol):
    def draft(self, request_id: str, token_ids: Sequence[int]) -> Iterable[int]:
        """Guesses what follows these tokens, prompt and outputs; () where there is nothing to go by."""
        ...


class DraftingRunner:
    """Implements `core.step.Runner`, and `AsyncRunner` where the runner that it wraps has one.

    ahead: what carries out the runner's steps while the next are planned.
    """

    verifies_drafts = True

    def __init__(self, runner: Runner, drafter: Drafter, ahead: AsyncRunner | None = None) -> None:
        """Raises `ConfigError` if the runner does not verify drafts."""
        if not runner.verifies_drafts:
            name = type(runner).__name__
            raise ConfigError(f"{name} does not verify drafts", hint="run the model on a CPU in one process")
        self._runner, self._ahead, self._drafter = runner, ahead, drafter
        self._launched: deque[StepPlan] = deque()
        self._tokens: dict[str, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        return self._with_drafts(plan, self._runner.run(plan))

    def launch(self, plan: StepPlan) -> None:
        assert self._ahead is not None, "there is nothing to launch steps with"
        self._ahead.launch(plan)
        self._launched.append(plan)

    def collect(self) -> StepResult:
        assert self._ahead is not None, "there is nothing to launch steps with"
        result = self._ahead.collect()
        return self._with_drafts(self._launched.popleft(), result)

    def _with_drafts(self, plan: StepPlan, result: StepResult) -> StepResult:
        for request_id in plan.released:
            self._tokens.pop(request_id, None)
        self._tokens.update((admitted.request_id, list(admitted.token_ids)) for admitted in plan.admitted)
        return msgspec.structs.replace(result, rows=tuple(map(self._drafted, result.rows)))

    def _drafted(self, row: RowResult) -> RowResult:
        if row.error is not None or not row.token_ids:
            return row
        tokens = self._tokens[row.request_id]
        tokens += row.token_ids
        drafts = tuple(self._drafter.draft(row.request_id, tokens))
        return msgspec.structs.replace(row, draft_token_ids=drafts) if drafts else row
