"""Why a request of vLLM's scheduler waits, or runs without a row in a plan.

It follows from where vLLM's loop over the waiting stopped, in the loop's own order: budget, slots, then what the first
of the queue lacks. That keys and values had no room is not inferred: `allocate_slots` is watched. Who stands behind a
first that lacks blocks waits by the policy (nobody overtakes), as in our own engine. Of all who stand behind the point
where the loop stopped one cause is said, and nobody among them is looked at.
"""

from collections.abc import Collection
from itertools import chain
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from splittime.ledger.stages import Cause

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
    _st_lacking: str | None
    _st_has_preempted: bool

    @property
    def _is_paused(self) -> bool:
        return self._pause_state != PauseState.UNPAUSED

    def _num_waiting(self) -> int:
        others = (getattr(self, name, ()) for name in ("kv_holding_waiting", "skipped_waiting"))
        return len(self.waiting) + sum(map(len, others))

    def _deferred(self) -> Collection[Request]:
        """Whom the loop passed over, or would: they wait for something of their own."""
        return getattr(self, "deferred_waiting", None) or set(getattr(self, "skipped_waiting", ()))

    def _first_waiting(self, deferred: Collection[Request]) -> Request | None:
        """Returns whom vLLM would admit next. It looks at nobody behind that one."""
        queues = (getattr(self, "kv_holding_waiting", ()), getattr(self, "skipped_waiting", ()))
        if not deferred and not any(queues):  # a queue by priority is copied where it is looked through
            return self.waiting.peek_request() if self.waiting else None
        return next((each for each in chain(*queues, self.waiting) if each not in deferred), None)

    def _why(self, output: Any) -> tuple[list[tuple[str, Cause | None]], Cause | None]:
        """Who waits for something of its own, and what all others wait for."""
        deferred = self._deferred()
        first = self._first_waiting(deferred)
        cause = self._obstacle(output, first)
        told = [(each.request_id, self._own_cause(each)) for each in deferred]
        if first is not None:
            told.append((first.request_id, cause))
        return told, Cause.POLICY if cause is Cause.KV_BLOCKS else cause

    def _own_cause(self, request: Request) -> Cause | None:
        if request.status in OWN_CAUSES:
            return OWN_CAUSES[request.status]
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
