"""Masks that are late, for tests: rows that were to sample and give nothing."""

from collections.abc import Callable

import msgspec

from splittime.core.step import Row, Runner, StepPlan, StepResult


class LateRunner:
    """Has another runner compute, and keeps what rows sampled to itself where they are late. rows: of each step, whose
    they were."""

    verifies_drafts = True

    def __init__(self, runner: Runner, is_late: Callable[[Row], bool]) -> None:
        self.rows: list[tuple[str, ...]] = []
        self._runner, self._is_late = runner, is_late

    def run(self, plan: StepPlan) -> StepResult:
        self.rows.append(tuple(row.request_id for row in plan.rows))
        result = self._runner.run(plan)
        told = [
            msgspec.structs.replace(one, token_ids=(), is_late=True) if row.num_samples and self._is_late(row) else one
            for row, one in zip(plan.rows, result.rows, strict=True)
        ]
        return msgspec.structs.replace(result, rows=tuple(told))
