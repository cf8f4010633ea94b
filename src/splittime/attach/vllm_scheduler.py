"""vLLM's own scheduler, with books: `vllm serve MODEL --scheduler-cls splittime.attach.vllm_scheduler.scheduler`.

A subclass of whichever scheduler vLLM would have used, synchronous or asynchronous. It calls vLLM's method first and
reads what came of it; it changes no decision. A fault of ours ends the books, never a request: it is logged once, told
to the API process, and vLLM goes on.
What a plan says is read in `ReadsPlans`, why a request waits in `waiting_causes`.

Why a request of vLLM's scheduler waits, or runs without a row in a plan.

It follows from where vLLM's loop over the waiting stopped, in the loop's own order: budget, slots, then what the first
of the queue lacks. That keys and values had no room is not inferred: `allocate_slots` is watched. Who stands behind one
that lacks blocks waits by the policy (nobody overtakes), as in our own engine. Of all who stand behind the point where
the loop stopped one cause is said, and nobody among them is looked at.

vLLM keeps whom it passed over among the deferred, and their status as it was, until it looks at them again, which it
does not while slots are full. So what they waited for is asked itself: a grammar that is made, or a transfer that is
done, is no cause any more, and such a request waits for what its neighbours wait for.
"""

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import wraps
from itertools import chain
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from splittime.attach.engine_books import BegunStep, DecidedPlan, EngineBooks
from splittime.attach.mail import Sender, TakesMail, name_folder
from splittime.attach.request_book import AskedRequest
from splittime.attach.versions import engine_alone, facts_of, require_known
from splittime.core.errors import ConfigError
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


now_ns = time.monotonic_ns
RECEIVED_NS = "_splittime_received_ns"  # an attribute of vLLM's request

log = logging.getLogger("splittime.attach")


class ReadsPlans(StatesCauses):
    """The part of vLLM's scheduler with books that reads a plan which has just been made. Of our own attributes it
    reads who was preempted since the last."""

    requests: dict[str, Any]
    kv_cache_manager: Any
    _st_victims: list[str]

    def _planned(self, output: Any) -> DecidedPlan:
        counts = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        rows, decode_tokens, kv_tokens_read = [], 0, 0
        for name, count in counts.items():
            request = self.requests[name]
            end = request.num_computed_tokens  # this plan's tokens are among them
            rows.append((name, end - count, count))
            kv_tokens_read += end
            if not request.is_prefill_chunk and count == 1 + (len(drafts[name]) if name in drafts else 0):
                decode_tokens += count
        running, num_waiting = self.running, self._num_waiting()
        waiting, rest = self._why(output) if num_waiting else ((), None)
        pool = self.kv_cache_manager.block_pool
        return DecidedPlan(
            rows=tuple(rows),
            decode_tokens=decode_tokens,
            kv_tokens_read=kv_tokens_read,
            stalled=self._stalled(counts) if len(running) > len(rows) else (),
            waiting=waiting,
            hits=[(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs],
            victims=tuple(self._st_victims),
            blocks_used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is the null block
            num_running=len(running),
            num_waiting=num_waiting,
            drafts=tuple((name, len(ids)) for name, ids in drafts.items()) if drafts else (),
            rest=rest,
        )


def asked_of(request: Request) -> AskedRequest:
    """Returns what was asked of the engine."""
    params = request.sampling_params
    return AskedRequest(
        request.request_id,
        request.client_index,
        request.num_prompt_tokens,
        request.max_tokens,
        request.priority,
        params is not None and params.prompt_logprobs is not None,
        request.output_token_ids,
    )


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Returns the scheduler that vLLM asks for, with books."""
    require_known()
    name_folder()
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if getattr(config, "diffusion_config", None) is not None:
        message, hint = "no books are kept of a diffusion model: its scheduler is another", "start vLLM as it is"
        raise ConfigError(message, param="attach", hint=hint)
    _note_arrivals()
    return (_async_class() if config.scheduler_config.async_scheduling else _plain_class())(*args, **kwargs)


def _plain_class() -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    return type("SchedulerWithBooks", (Bookkeeping, Scheduler), {})


def _async_class() -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return type("AsyncSchedulerWithBooks", (Bookkeeping, AsyncScheduler), {})


def _note_arrivals() -> None:
    """Have each request know when the engine's process read it: it may wait for a step's end to be taken in."""
    read = EngineCore.preprocess_add_request
    if getattr(read, RECEIVED_NS, False):
        return

    @wraps(read)
    def noted(self: Any, request: Any) -> Any:
        received_ns = now_ns()
        taken = read(self, request)
        setattr(taken[0], RECEIVED_NS, received_ns)
        return taken

    setattr(noted, RECEIVED_NS, True)
    EngineCore.preprocess_add_request = noted


def _guarded(work: Callable[..., Any]) -> Callable[..., Any]:
    """A fault of ours ends the books."""

    @wraps(work)
    def guarded(self: Any, *args: Any) -> Any:
        if self._st_mail is None:
            return None
        try:
            return work(self, *args)
        except Exception as error:
            self._st_fail(error)
            return None

    return guarded


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Bookkeeping(ReadsPlans):
    """The part of the class that keeps books; the other base is vLLM's scheduler, whose attributes it reads. Where no
    server runs (`vllm_offline`) it has another clock, other takers of its mail, and a fault of ours is raised."""

    _st_now = staticmethod(now_ns)

    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._st_books = EngineBooks(bool(self.vllm_config.scheduler_config.async_scheduling))
        self._st_flights: dict[int, tuple[Any, BegunStep]] = {}  # by the id of vLLM's plan, with the plan
        self._st_victims: list[str] = []  # preempted since the last plan was told of, in this one or before it
        self._st_is_planning = self._st_has_preempted = False  # has_preempted: in this plan
        self._st_lacking: str | None = None  # which of the waiting `allocate_slots` refused last in this plan
        self._st_lacks_running = self._st_is_throttled = False  # one that runs was refused; other engines go first
        self._st_mail: TakesMail | None = None
        try:
            self._st_mail = self._st_open_mail()
            self._watch_allocations()
        except Exception as error:  # a fault of ours ends the books, also before they begin
            self._st_fail(error)

    def _st_open_mail(self) -> TakesMail:
        number = self.vllm_config.parallel_config.data_parallel_index
        try:
            facts = facts_of(self)
        except Exception as error:
            Sender(number, engine_alone()).stop(reason_of(error))  # else nobody would be told
            raise
        return Sender(number, facts, self._st_books.waiting_for)

    def _st_fail(self, error: Exception) -> None:
        """The books end here, and vLLM goes on."""
        log.exception("the books of this engine end here; it goes on without them")
        if self._st_mail is not None:
            self._st_mail.stop(reason_of(error))
            self._st_mail = None

    def _watch_allocations(self) -> None:
        manager = self.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, *args, **kwargs)
            if blocks is None and request.status == RequestStatus.RUNNING:
                self._st_lacks_running = True
            elif blocks is None:
                self._st_lacking = request.request_id
            return blocks

        manager.allocate_slots = allocate_slots

    # ---- vLLM's methods

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._receive(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begin_ns = self._st_now()
        self._st_lacking, self._st_has_preempted, self._st_is_planning = None, False, True
        may_throttle = kwargs.get("throttle_prefills", args[0] if args else False)
        self._st_lacks_running = False
        self._st_is_throttled = bool(may_throttle) and not getattr(self, "prefill_capacity_bound", False)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._st_is_planning = False
        self._begin(output, begin_ns)
        return output

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        self._pause()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ready_ns = self._st_now()
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._commit(scheduler_output, outputs, ready_ns)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        names = self._named(request_ids)
        request_ids = None if request_ids is None else names
        ended = {name: self.requests[name] for name in names if name in self.requests}
        result = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._end_all(ended)
        return result

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        num_computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._note_preempted(request.request_id, num_computed)

    def shutdown(self) -> None:
        if self._st_mail is not None:
            self._st_mail.close()
        super().shutdown()  # type: ignore[misc]

    # ---- what it means for the books

    @_guarded
    def _note_preempted(self, request_id: str, num_computed: int) -> None:
        self._st_victims.append(request_id)
        self._st_books.preempt(request_id, num_computed)
        if self._st_is_planning:
            self._st_has_preempted = True
        else:  # the cache was reset, for which the books have no word
            cause = Cause.PAUSED if self._is_paused else None
            self._st_books.set_back(request_id, cause, self._st_now())

    @_guarded
    def _pause(self) -> None:
        """vLLM makes no plan while it is paused: what a pause means is said when it begins."""
        if not self._is_paused:
            self._st_books.resume()
            return
        is_for_all = self._pause_state == PauseState.PAUSED_ALL
        running = [each.request_id for each in self.running if is_for_all and not is_in_flight(each)]
        self._st_books.pause("all" if is_for_all else "new", running, self._st_now())

    @_guarded
    def _receive(self, request: Request) -> None:
        is_known = request.request_id in self._st_books.books  # more input of a session
        if is_known or request.request_id not in self.requests:  # or a session's end, for which vLLM schedules nothing
            return
        added_ns = self._st_now()
        received_ns = getattr(request, RECEIVED_NS, added_ns)
        self._st_books.receive(asked_of(request), received_ns, added_ns, is_paused=self._is_paused)

    @_guarded
    def _begin(self, output: Any, begin_ns: int) -> None:
        flight = self._st_books.begin(self._planned(output), begin_ns, self._st_now())
        self._st_victims = []
        if flight is not None:
            self._st_flights[id(output)] = output, flight

    # ---- results and ends

    @_guarded
    def _commit(self, scheduler_output: Any, outputs: Any, ready_ns: int) -> None:
        flight = self._take_flight(scheduler_output)
        told = [each for of_client in outputs.values() for each in of_client.outputs]
        mail = self._st_mail
        assert mail is not None
        if flight is not None:
            sampled = [(each.request_id, len(each.new_token_ids)) for each in told]
            for client, first in self._st_books.commit(flight, sampled, ready_ns):
                mail.book(client, first)
        for each in told:
            if each.finish_reason is not None:
                self._end(each.request_id, str(each.finish_reason), ready_ns)
        if flight is not None:
            accepted = {name: count - 1 for name, count in sampled} if flight.plan.drafts else {}
            mail.step(self._st_books.end_step(flight, accepted, ready_ns, self._st_now()))

    def _take_flight(self, output: Any) -> BegunStep | None:
        """Returns the step that began with this plan. Those before it are forgotten: their results were dropped when
        vLLM recovered from a fault."""
        _, flight = self._st_flights.pop(id(output), (None, None))
        if flight is not None and self._st_flights:
            later = {key: kept for key, kept in self._st_flights.items() if kept[1].step_id > flight.step_id}
            self._st_flights = later
        return flight

    def _named(self, request_ids: Any) -> list[str]:
        if request_ids is None:
            return list(self.requests)
        return [request_ids] if isinstance(request_ids, str) else list(request_ids)

    @_guarded
    def _end_all(self, ended: dict[str, Request]) -> None:
        at_ns = self._st_now()
        for name, request in ended.items():
            self._end(name, str(request.get_finished_reason()), at_ns)

    def _end(self, request_id: str, reason: str, at_ns: int) -> None:
        book = self._st_books.books.get(request_id)
        if book is None or self._st_mail is None:
            return
        ended = self._st_books.end(request_id, reason, at_ns)
        if ended is not None:
            self._st_mail.book(book.asked.client, ended)
