"""Why a request of vLLM's scheduler waits, or runs without a row in a plan.

It follows from where vLLM's loop over the waiting stopped, in the loop's own order: budget, slots, then what the first
of the queue lacks. That keys and values had no room is not inferred: `allocate_slots` is watched. Who stands behind a
first that lacks blocks waits by the policy (nobody overtakes), as in our own engine.
"""

from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from splittime.attach.engine_books import EngineBooks
from splittime.ledger.stages import Cause

MANY_WAITING = 64  # of more, nothing is said again that was said before
OWN_CAUSES = {
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: Cause.GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KVS: Cause.KV_TRANSFER,
    RequestStatus.WAITING_FOR_STREAMING_REQ: None,
}


class StatesCauses:
    """The part of vLLM's scheduler with books that states causes; a plan has just been made. It reads the attributes
    of vLLM's scheduler, and these of ours: whom `allocate_slots` refused last in the plan, and whether the plan has
    preempted somebody."""

    running: list[Any]
    waiting: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    _pause_state: PauseState
    _st_books: EngineBooks
    _st_lacking: str | None
    _st_has_preempted: bool
    _st_said: object = None

    @property
    def _is_paused(self) -> bool:
        return self._pause_state != PauseState.UNPAUSED

    def _waiting(self) -> list[Request]:
        """Everybody who waits, the first first."""
        return [*getattr(self, "kv_holding_waiting", ()), *getattr(self, "skipped_waiting", ()), *self.waiting]

    def _num_waiting(self) -> int:
        others = (getattr(self, name, ()) for name in ("kv_holding_waiting", "skipped_waiting"))
        return len(self.waiting) + sum(map(len, others))

    def _first_waiting(self, deferred: Collection[Request]) -> Request | None:
        """Returns whom vLLM would admit next. Of nobody deferred it is the queue's first, which costs no copy of it."""
        if not deferred and self.waiting and not getattr(self, "kv_holding_waiting", ()):
            first = self.waiting.peek_request()
            if first.status not in OWN_CAUSES:
                return first
        return next((each for each in self._waiting() if each not in deferred and each.status not in OWN_CAUSES), None)

    def _why(self, output: Any, num_waiting: int) -> list[tuple[str, Cause | None]]:
        """Who waits for what; nothing where a long queue was told the same before."""
        deferred = getattr(self, "deferred_waiting", None) or set(getattr(self, "skipped_waiting", ()))
        first = self._first_waiting(deferred)
        cause = self._obstacle(output, first)
        said = (cause, "" if first is None else first.request_id, self._st_books.num_changes, len(deferred))
        if num_waiting > MANY_WAITING and said == self._st_said:
            return []
        self._st_said = said
        rest = Cause.POLICY if cause is Cause.KV_BLOCKS else cause
        return [
            (each.request_id, self._own_cause(each, each is first, each in deferred, cause, rest))
            for each in self._waiting()
        ]

    def _own_cause(
        self, request: Request, is_first: bool, is_deferred: bool, cause: Cause | None, rest: Cause | None
    ) -> Cause | None:
        if request.status in OWN_CAUSES:
            return OWN_CAUSES[request.status]
        if not is_deferred:
            return cause if is_first else rest
        if getattr(request, "num_stale_output_tokens", 0):
            return Cause.STEP_IN_FLIGHT
        if request.lora_request is not None:
            return Cause.LORA_SLOTS
        has_transfers = getattr(self, "connector", None) or getattr(self, "ec_connector", None)
        return Cause.KV_TRANSFER if has_transfers else None

    def _obstacle(self, output: Any, first: Request | None) -> Cause | None:
        """What ended the loop over the waiting, in the order in which it looks."""
        if self._is_paused:
            return Cause.PAUSED
        if self._st_has_preempted:  # a plan that preempts admits nobody
            return Cause.KV_BLOCKS
        if output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens:
            return Cause.TOKEN_BUDGET
        most = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
        if len(self.running) + getattr(self, "num_waiting_for_streaming_input", 0) >= most:
            return Cause.BATCH_SLOTS
        if first is not None and self._st_lacking == first.request_id:
            return Cause.KV_BLOCKS
        if first is not None and first.has_encoder_inputs:
            return Cause.ENCODER_BUDGET
        return Cause.TOKEN_BUDGET  # a prompt that must go whole and does not fit, or drafts that take its place

    def _stalled(self, counts: dict[str, int]) -> list[tuple[str, Cause | None]]:
        """Who runs without a row in this plan, and has none in a step that runs."""
        idle = [each for each in self.running if each.request_id not in counts and not is_in_flight(each)]
        return [(each.request_id, self._why_no_row(each)) for each in idle]

    def _why_no_row(self, request: Request) -> Cause | None:
        if self._pause_state == PauseState.PAUSED_ALL:
            return Cause.PAUSED
        if self._st_lacking is not None:
            return Cause.KV_BLOCKS
        return Cause.ENCODER_BUDGET if request.has_encoder_inputs else Cause.TOKEN_BUDGET


def is_in_flight(request: Request) -> bool:
    """Returns whether a step that runs computes some of its tokens (where steps are planned ahead)."""
    return bool(request.num_output_placeholders or getattr(request, "num_in_flight_tokens", 0))
