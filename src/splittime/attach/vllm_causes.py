"""Why a request of vLLM's scheduler waits, or runs without a row in a plan.

It follows from where vLLM's loop over the waiting stopped, in the loop's own order: budget, slots, then what the first
of the queue lacks. That keys and values had no room is not inferred: `allocate_slots` is watched. Who stands behind one
that lacks blocks waits by the policy (nobody overtakes), as in our own engine. Of all who stand behind the point where
the loop stopped one cause is said, and nobody among them is looked at.

vLLM keeps whom it passed over among the deferred, and their status as it was, until it looks at them again, which it
does not while slots are full. So what they waited for is asked itself: a grammar that is made, or a transfer that is
done, is no cause any more, and such a request waits for what its neighbours wait for.
"""

from collections.abc import Collection
from concurrent.futures import Future
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
    of vLLM's scheduler, and these of ours: which of the waiting `allocate_slots` refused last in the plan, whether it
    refused one that runs, whether the plan has preempted somebody, and whether it left prompts to other engines."""

    running: list[Any]
    waiting: Any
    requests: dict[str, Request]
    finished_recving_kv_req_ids: set[str]
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    _pause_state: PauseState
    _st_lacking: str | None
    _st_lacks_running: bool
    _st_has_preempted: bool
    _st_is_throttled: bool

    @property
    def _is_paused(self) -> bool:
        return self._pause_state != PauseState.UNPAUSED

    def _num_waiting(self) -> int:
        others = (getattr(self, name, ()) for name in ("kv_holding_waiting", "skipped_waiting"))
        return len(self.waiting) + sum(map(len, others))

    def _deferred(self) -> set[Request]:
        """Whom the loop passed over, or would: they wait for something of their own."""
        passed_over: Any = getattr(self, "deferred_waiting", None) or getattr(self, "skipped_waiting", ())
        return {each for each in passed_over if self._is_deferred(each)}

    def _is_deferred(self, request: Request) -> bool:
        if request.request_id == self._st_lacking:  # the loop has come to it in this plan
            return False
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return not _has_grammar(request)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id not in self.finished_recving_kv_req_ids
        return request.status in OWN_CAUSES or self._may_wait_for_more(request)

    def _may_wait_for_more(self, request: Request) -> bool:
        """Whether a request that waits as all do was passed over for what its status does not say."""
        return bool(getattr(request, "num_stale_output_tokens", 0) or request.lora_request or self._has_transfers())

    def _has_transfers(self) -> bool:
        return bool(getattr(self, "connector", None) or getattr(self, "ec_connector", None))

    def _first_waiting(self, deferred: Collection[Request]) -> Request | None:
        """Returns whom the loop stopped at, or would come to next. It looks at nobody behind that one."""
        queues = (getattr(self, "kv_holding_waiting", ()), getattr(self, "skipped_waiting", ()))
        if self._st_lacking is not None:
            return self.requests.get(self._st_lacking)
        if not deferred and not any(queues):  # looking through a queue by priority copies it
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
        return Cause.KV_TRANSFER if self._has_transfers() else None

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
        if self._st_lacking is not None:
            return Cause.KV_BLOCKS
        if self._st_is_throttled:
            return None  # data-parallel engines take turns with prompts, for which the books have no word
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
        if self._st_lacks_running:
            return Cause.KV_BLOCKS
        if request.has_encoder_inputs:
            return Cause.ENCODER_BUDGET
        return None if self._st_is_throttled else Cause.TOKEN_BUDGET


def _has_grammar(request: Request) -> bool:
    """Returns whether the grammar of its answer is there. Asking for vLLM's own `grammar` would change the request."""
    asked = request.structured_output_request
    grammar = None if asked is None else asked._grammar
    return grammar.done() if isinstance(grammar, Future) else grammar is not None


def is_in_flight(request: Request) -> bool:
    """Returns whether a step that runs computes some of its tokens (where steps are planned ahead)."""
    return bool(request.num_output_placeholders or getattr(request, "num_in_flight_tokens", 0))
