"""A runner whose results bring drafts: the seam where speculation goes in.

A `Drafter` guesses what follows the requests' tokens, and `DraftingRunner` puts the guesses into the results of the
runner that it wraps. The scheduler says how many of them the next rows get (`scheduler.speculation`), and that runner
verifies them. Guesses cost time and change no token: what is accepted is what would have been sampled anyway.

Looking for drafts costs time too. A share of the model's time is there for it, and a share of what right drafts have
saved. While there is plenty, the drafter may look at all rows; while there is some, where it has reason to; and when it
is used up, nowhere. So where steps are long, or guesses right, every row is searched in every step, and where nothing
repeats itself, a small model loses no more than that share.
"""

import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.step import THOUSAND, Admitted, RowResult, Runner, StepPlan, StepResult

FREE_SHARE = 0.006  # of the model's time
EARNED_SHARE = 0.25  # of the time that right drafts saved
LONGEST_NS = 4_000_000  # what takes longer was the machine's doing
MOST_KEPT_NS = 1_000_000  # of time that was not used
PLENTY_NS = MOST_KEPT_NS // 2
MOST_OWED_NS = 20_000_000  # what was used beyond is forgotten
drafts_of: Callable[[Any], tuple[int, ...]] = attrgetter("draft_token_ids")


class Look(IntEnum):
    """Which rows there is time to search."""

    NOWHERE = 0
    WHERE_DUE = 1
    EVERYWHERE = 2


class Draft(NamedTuple):
    """survival: for each token the chance that it and all before it are right."""

    token_ids: tuple[int, ...]
    survival: tuple[float, ...]


class Drafter(Protocol):
    def admit(self, admitted: Admitted) -> None:
        """Takes in a request, with all tokens known so far."""
        ...

    def release(self, request_id: str, is_preempted: bool = False) -> None:
        """Forgets a request; one that it does not know is no error. is_preempted: its answer has not ended."""
        ...

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        """Takes in how many of the request's last drafts were verified, and right."""
        ...

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        """Takes in a step and the new tokens of its rows, and guesses what follows, where there is something to go by.
        None: it did not look. What is less likely than `plan.least_survival` would not pay."""
        ...

    def forget(self) -> None:
        """Forgets what is kept of requests that have ended, while there are no others."""
        ...


class DraftingRunner:
    """Implements `core.step.Runner`. now_ns: reads the clock."""

    verifies_drafts = True

    def __init__(self, runner: Runner, drafter: Drafter, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises `ConfigError` if the runner does not verify drafts."""
        if not runner.verifies_drafts:
            name = type(runner).__name__
            raise ConfigError(f"{name} does not verify drafts", hint="run the model on a CPU in one process")
        self._runner, self._drafter, self._now_ns = runner, drafter, now_ns
        self._sure: set[str] = set()  # whose last drafts the runner told itself
        self._free_ns = float(MOST_KEPT_NS)  # to look for drafts

    def forget(self) -> None:
        """Forgets what is kept of requests that have ended, while there are no others."""
        self._drafter.forget()

    def run(self, plan: StepPlan) -> StepResult:
        took_ns = self._take_in(plan)
        return self._with_drafts(plan, self._runner.run(plan), took_ns)

    def _take_in(self, plan: StepPlan) -> int:
        """Forgets and learns requests, also those of a step that will fail. Returns how long it took."""
        begin_ns = self._now_ns()
        self._sure.difference_update(plan.released)
        for request_id in plan.released:
            self._drafter.release(request_id, request_id in plan.preempted)
        for admitted in plan.admitted:
            self._drafter.admit(admitted)
        return self._now_ns() - begin_ns

    def _with_drafts(self, plan: StepPlan, result: StepResult, took_ns: int) -> StepResult:
        begin_ns = self._now_ns()
        num_right = self._learn(plan, result) if any(map(drafts_of, plan.rows)) else 0
        self._note_sure(result)
        drafts = self._drafter.draft(plan, result, self._look())
        rows = tuple([_with_draft(row, drafts.get(row.request_id)) for row in result.rows]) if drafts else result.rows
        draft_ns = self._now_ns() - begin_ns
        self._free_ns += FREE_SHARE * result.device_ns
        if drafts is not None:
            self._free_ns -= min(draft_ns, LONGEST_NS)
        if num_right:
            self._free_ns += EARNED_SHARE * result.device_ns * num_right / len(rows)
        self._free_ns = max(-MOST_OWED_NS, min(self._free_ns, MOST_KEPT_NS))
        return msgspec.structs.replace(result, rows=rows, draft_ns=took_ns + draft_ns)

    def _look(self) -> Look:
        if self._free_ns > PLENTY_NS:
            return Look.EVERYWHERE
        return Look.WHERE_DUE if self._free_ns > 0 else Look.NOWHERE

    def _note_sure(self, result: StepResult) -> None:
        if self._sure:
            self._sure.difference_update(row.request_id for row in result.rows)
        self._sure.update(row.request_id for row in result.rows if row.draft_token_ids)

    def _learn(self, plan: StepPlan, result: StepResult) -> int:
        """Returns how many drafts were right, of those that the drafter told."""
        num_right = 0
        for row, one in zip(plan.rows, result.rows, strict=True):
            if one.error is not None or one.is_late:  # nobody looked at its drafts
                continue
            if row.draft_token_ids and row.request_id not in self._sure:
                self._drafter.learn(row.request_id, len(row.draft_token_ids), len(one.token_ids) - 1)
                num_right += len(one.token_ids) - 1
        return num_right


def _with_draft(row: RowResult, draft: Draft | None) -> RowResult:
    if draft is None or row.draft_token_ids:  # what the runner tells itself is sure
        return row
    survival = tuple([round(THOUSAND * chance) / THOUSAND for chance in draft.survival])
    return msgspec.structs.replace(row, draft_token_ids=draft.token_ids, draft_survival=survival)
