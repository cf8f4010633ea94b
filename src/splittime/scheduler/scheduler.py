"""The scheduler: owner of every request in the engine. `plan` says what a step computes, `commit` what came of it.

There is no prefill phase and no decode phase: a request has known tokens and computed tokens, and a row lets it catch
up. A plan is made in three passes over one token budget:

    1. decode      running requests with one pending token, best rank first; prefills cannot hold them up.
                   A request that needs a block and finds none preempts the worst-ranked running request (itself, if it
                   is the worst), which gives all its blocks back and waits to be admitted again.
    2. prefill     running requests with more pending tokens, in chunks of what the budget leaves.
    3. admission   from the queue, while there are slots, budget, and blocks for all its known tokens (so a prefill is
                   never stopped half-way for want of blocks). The first that does not fit ends the admission: nobody
                   overtakes it, so nobody starves.

The next step may be planned before the one before it is committed (one step ahead, no more): what is planned counts as
computed at once, and a token that is still being sampled stands in the next row as `PENDING`. A request that turns out
to have ended, or was preempted, leaves its row in the air: what comes of that is dropped. Its blocks may be given away
at once, since steps run in order.

Every request that waits, and every running one that gets no row, gets its cause at this moment. The scheduler reads no
clock: `now_ns` is told to it. `check` verifies its books against the cache's.
"""

import bisect
import heapq
from typing import Any

from splittime.core.errors import Conflict, ErrorInfo
from splittime.core.plan import PENDING, Admitted, Row, RowResult, StepPlan, StepResult, TokenLogprob
from splittime.core.request import FinishReason, Request
from splittime.kv.cache import KVCache
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler import news
from splittime.scheduler.budget import StepBudget
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.policy import is_overdue, rank
from splittime.scheduler.queue import WaitingQueue
from splittime.scheduler.state import RequestState
from splittime.scheduler.turns import SWEEP_FROM


def _rank_of(state: RequestState) -> Any:
    return state.rank


class Scheduler:
    """See the module's docstring. Not thread-safe: the loop that owns it is the only caller."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config.validate()
        self.cache = KVCache(config.num_blocks, config.block_size, config.enable_prefix_caching, config.num_host_slots)
        self.queue = WaitingQueue()
        self.running: list[RequestState] = []  # best rank first
        self._states: dict[str, RequestState] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._released: list[str] = []
        self._num_arrived = 0
        self._step_id = 0
        self._in_flight: dict[int, list[RequestState | None]] = {}  # by step, whose rows it has; None: of no interest
        self._last_commit_ns = 0
        self.victims: list[str] = []  # preempted by the latest plan
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefix_host_hit_tokens = 0  # of these
        self.prompt_tokens = 0
        self.output_tokens = 0

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, received_ns: int, measured_ns: int = 0) -> None:
        """Take a request in. Raises RequestError, with nothing changed, if it can never be served.

        measured_ns: until when the caller last did what no step is: measured the machine.
        """
        self._check_servable(request)
        self._num_arrived += 1
        arrival = self._num_arrived
        state = RequestState(request, arrival, rank(self.config.policy, request, arrival), self.config.max_model_len)
        cause = Cause.STEP_IN_FLIGHT if received_ns < self._last_commit_ns else Cause.ENGINE_LOOP
        if received_ns < measured_ns and measured_ns > self._last_commit_ns:
            cause = Cause.MEASURING
        queued_ns = max(received_ns, request.submitted_ns)
        state.account.enter(Stage.QUEUE, queued_ns, cause)
        self._states[request.request_id] = state
        self.queue.push(state, queued_ns)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, arrival, request.request_id))
            self._forget_old_deadlines()

    def abort(self, request_id: str, now_ns: int) -> RequestOutput | None:
        """End a request; its blocks are free on return. None if it is not here (it has ended already)."""
        state = self._states.get(request_id)
        return None if state is None else self._finish(state, FinishReason.ABORT, now_ns)

    def expire(self, now_ns: int) -> list[RequestOutput]:
        """End the requests whose deadline has passed."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, arrival, request_id = heapq.heappop(self._deadlines)
            state = self._states.get(request_id)
            if state is not None and state.arrival == arrival:
                error = news.deadline_error(state, now_ns - deadline_ns)
                outputs.append(self._finish(state, FinishReason.DEADLINE, now_ns, error))
        return outputs

    def _forget_old_deadlines(self) -> None:
        """Those of requests that have ended, once they are the most: some deadlines are months away."""
        if len(self._deadlines) <= 2 * len(self._states) + SWEEP_FROM:
            return
        states = self._states
        alive = [entry for entry in self._deadlines if entry[2] in states and states[entry[2]].arrival == entry[1]]
        self._deadlines = alive
        heapq.heapify(self._deadlines)

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do at the earliest."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def has_requests(self) -> bool:
        return bool(self._states)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def configure(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change live knobs; returns all of them. Raises ConfigError with nothing changed."""
        self.config = self.config.with_knobs(knobs)
        if "enable_prefix_caching" in knobs:
            self.cache.set_prefix_caching(self.config.enable_prefix_caching)
        if "policy" in knobs:
            self.queue.rerank(self._rank)
            for state in self.running:
                state.rank = self._rank(state)
            self.running.sort(key=_rank_of)
        return self.config.knobs()

    # ---- plan -----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """What to compute now, or None if there is nothing to do."""
        self.victims = []
        if self.config.paused:
            self._stand_still(now_ns)
            return None
        may_admit = self.config.batching == "continuous" or not self.running
        rows: list[Row] = []
        behind = self._plan_decodes(rows, now_ns)
        budget = StepBudget(self.config.prefill_tokens(len(rows)), self.config.enable_chunked_prefill)
        self._plan_prefills(behind, rows, budget, now_ns)
        admitted = self._plan_admissions(rows, budget, may_admit, now_ns)
        if not rows:
            return None
        self._step_id += 1
        self._in_flight[self._step_id] = [self._states[row.request_id] for row in rows]
        released, self._released = tuple(self._released), []
        offloads, restores = self.cache.take_moves()
        return StepPlan(self._step_id, tuple(rows), admitted, released, offloads=offloads, restores=restores)

    def _plan_decodes(self, rows: list[Row], now_ns: int) -> list[RequestState]:
        """A row for each running request with one pending token, which needs a new block at a block's edge only.
        Returns those with more to catch up. A victim never has a row yet, and is none of those: best rank first."""
        running, block_size = self.running, self.config.block_size
        behind: list[RequestState] = []
        position = 0
        while position < len(running):
            state = running[position]
            num_computed, num_promised = state.num_computed, state.num_promised
            num_tokens = len(state.token_ids) + num_promised
            if num_tokens - num_computed > 1:
                behind.append(state)
            elif num_tokens < state.max_num_tokens:  # else its last token is being sampled
                lease = state.lease
                if num_computed == len(lease.block_ids) * block_size and not self.cache.reserve(lease, num_tokens):
                    self._preempt(running[-1], now_ns)
                    continue  # this one again; if it was the worst itself, that was the end
                new_block_ids = lease.unsent() if lease.num_sent < len(lease.block_ids) else ()
                if state.account.stage is Stage.DECODE_STALL:
                    state.account.enter(Stage.DECODE, now_ns)
                elif state.account.stage is Stage.PREFILL_STALL:  # one token of its prompt is left
                    state.account.enter(state.computing_stage, now_ns)
                token_id = PENDING if num_promised else state.token_ids[-1]
                state.num_computed, state.num_promised = num_tokens, num_promised + 1
                rows.append(Row(state.request_id, num_computed, (token_id,), new_block_ids, True))
            position += 1
        return behind

    def _preempt(self, victim: RequestState, now_ns: int) -> None:
        """Take its blocks back; what it had computed is computed again, but for what the prefix cache still has. Why
        it waits from now on is said where this plan admits."""
        self.running.remove(victim)
        self._take_back(victim)
        victim.recompute_until = max(victim.recompute_until, victim.num_computed)
        victim.num_computed = victim.num_promised = 0
        self._leave_in_the_air(victim)
        victim.num_preemptions += 1
        self.queue.push(victim, now_ns)
        self.victims.append(victim.request_id)
        self.num_preemptions += 1

    def _plan_prefills(self, behind: list[RequestState], rows: list[Row], budget: StepBudget, now_ns: int) -> None:
        """Chunks for those that have more than one token to catch up."""
        for state in behind:
            num_tokens = budget.chunk(state.num_pending)
            if num_tokens == 0:
                state.stall(Cause.TOKEN_BUDGET, now_ns)
                continue
            state.account.enter(state.computing_stage, now_ns)
            rows.append(state.next_row(num_tokens))
            budget.spend(num_tokens)

    def _plan_admissions(
        self, rows: list[Row], budget: StepBudget, may_admit: bool, now_ns: int
    ) -> tuple[Admitted, ...]:
        """Admit until something is missing, and say to all who stay what it was."""
        admitted: list[Admitted] = []
        bound_ns = self.config.starvation_bound_ms * 1e6
        while (state := self.queue.peek(now_ns, bound_ns)) is not None:
            cause = self._obstacle(budget, may_admit) or self._find_blocks(state, budget)
            if cause is not None:
                rest_cause = Cause.POLICY if cause is Cause.KV_BLOCKS else cause
                self.queue.wait(now_ns, state, cause, rest_cause)
                break
            admitted.append(self._admit(state))
            self._plan_first_row(state, rows, budget, now_ns)
        return tuple(admitted)

    def _obstacle(self, budget: StepBudget, may_admit: bool) -> Cause | None:
        """What keeps any request from being admitted now."""
        if not may_admit:
            return Cause.POLICY
        if len(self.running) >= self.config.max_num_seqs:
            return Cause.BATCH_SLOTS
        if budget.tokens == 0 and self.config.batching == "continuous":
            return Cause.TOKEN_BUDGET
        return None

    def _find_blocks(self, state: RequestState, budget: StepBudget) -> Cause | None:
        """Lease the cached prefix, with room for all its known tokens; or why not, with nothing changed."""
        keep_free = max(1, self.config.num_blocks // 100) if self.running else 0
        if state.request.sampling.prompt_logprobs is None:  # else every position must be computed
            state.num_computed = self.cache.match(state.lease, state.token_ids)
        cause = None
        if not self.cache.has_room(state.lease, len(state.token_ids), keep_free):
            cause = Cause.KV_BLOCKS
        elif self.config.batching == "continuous" and budget.chunk(state.num_pending) == 0:
            cause = Cause.TOKEN_BUDGET
        if cause is not None:
            self.cache.free(state.lease)
            state.num_computed = 0
        elif state.num_cached_tokens is None:
            state.num_host_tokens = len(state.lease.in_host) * self.config.block_size
        return cause

    def _admit(self, state: RequestState) -> Admitted:
        """From the queue to the running, with blocks for all its known tokens."""
        self.cache.reserve(state.lease, len(state.token_ids))
        num_cached_tokens, state.num_computed = state.num_computed, 0  # the queue counts pending tokens from scratch
        self.queue.admit(state)
        state.num_computed = num_cached_tokens
        bisect.insort(self.running, state, key=_rank_of)
        if state.num_cached_tokens is None:
            state.num_cached_tokens = num_cached_tokens
            self.prefix_query_tokens += state.num_prompt
            self.prefix_hit_tokens += num_cached_tokens
            self.prefix_host_hit_tokens += state.num_host_tokens
            self.prompt_tokens += state.num_prompt
        state.is_known_to_runner = True
        sampling = state.request.sampling
        return Admitted(state.request_id, tuple(state.token_ids), state.num_output, sampling, tuple(state.stop_ids))

    def _plan_first_row(self, state: RequestState, rows: list[Row], budget: StepBudget, now_ns: int) -> None:
        """Its row in the step that admits it. Only a static batch may be admitted without one."""
        num_tokens = budget.chunk(state.num_pending)
        state.account.enter(state.computing_stage, now_ns)
        if num_tokens == 0:
            state.stall(Cause.TOKEN_BUDGET, now_ns)
            return
        rows.append(state.next_row(num_tokens))
        budget.spend(num_tokens)

    def _stand_still(self, now_ns: int) -> None:
        """Paused: say so to everybody but those whose rows still run."""
        flying = [state for flight in self._in_flight.values() for state in flight]
        first = self.queue.peek(now_ns, float("inf"))
        if first is not None:
            self.queue.wait(now_ns, first, Cause.PAUSED, Cause.PAUSED)
        for state in self.running:
            if state not in flying:
                state.stall(Cause.PAUSED, now_ns)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[RequestOutput]:
        """Take the step's tokens over; returns the news of each request that has any."""
        self._last_commit_ns = now_ns
        outputs: list[RequestOutput] = []
        flight, block_size = self._in_flight.pop(plan.step_id), self.config.block_size
        for state, row, row_result in zip(flight, plan.rows, result.rows, strict=True):
            if state is None:
                continue
            if row_result.error is not None:
                error = news.row_error(row_result)
                outputs.append(self._finish(state, FinishReason.ERROR, now_ns, error))
                continue
            num_computed = row.start + len(row.token_ids)
            if num_computed // block_size > state.lease.num_indexed:
                self.cache.commit(state.lease, state.token_ids, num_computed)
            output = self._take_tokens(state, row, row_result, now_ns)
            if output is not None:
                outputs.append(output)
        if self.config.paused:
            self._stand_still(now_ns)
        return outputs

    def _take_tokens(self, state: RequestState, row: Row, row_result: RowResult, now_ns: int) -> RequestOutput | None:
        """Append a row's tokens up to the one that ends the request; returns its news, if there are any."""
        prompt_logprobs = state.new_prompt_logprobs(row, row_result) if row_result.prompt_logprobs else ()
        if not row.samples:
            is_caught_up = row.start + len(row.token_ids) >= state.recompute_until
            if state.account.stage is Stage.RECOMPUTE and is_caught_up:
                state.account.enter(Stage.PREFILL, now_ns)
            has_news = prompt_logprobs or state.num_marks_sent < len(state.account.marks)
            return news.progress(state, (), (), prompt_logprobs) if has_news else None
        state.num_promised -= 1
        reason = None
        num_accepted = 0
        token_ids, stop_ids, max_num_tokens = state.token_ids, state.stop_ids, state.max_num_tokens
        for token_id in row_result.token_ids:
            token_ids.append(token_id)
            num_accepted += 1
            if token_id in stop_ids and state.num_output >= state.request.sampling.min_tokens:
                reason = FinishReason.STOP
                break
            if len(token_ids) >= max_num_tokens:
                reason = FinishReason.LENGTH
                break
        self.output_tokens += num_accepted
        accepted, logprobs = row_result.token_ids[:num_accepted], row_result.logprobs[:num_accepted]
        if reason is not None:
            return self._finish(state, reason, now_ns, None, accepted, logprobs, prompt_logprobs)
        if state.account.stage is not Stage.DECODE:
            state.account.enter(Stage.DECODE, now_ns)
            return news.progress(state, accepted, logprobs, prompt_logprobs)
        return RequestOutput(state.request_id, accepted, logprobs)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        now_ns: int,
        error: ErrorInfo | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        """The one way out: blocks freed, account closed, runner told, terminal event made."""
        if state.pushed:
            self.queue.remove(state)
        else:
            self.running.remove(state)
        self._take_back(state)
        self._leave_in_the_air(state)
        del self._states[state.request_id]
        state.account.enter(Stage.DELIVER, now_ns)
        state.account.close(now_ns)
        return news.end(state, reason, now_ns, error, token_ids, logprobs, prompt_logprobs)

    def _take_back(self, state: RequestState) -> None:
        """Its blocks return to the pool, and the runner is told to forget it with the next plan."""
        self.cache.free(state.lease)
        if state.is_known_to_runner:
            self._released.append(state.request_id)
            state.is_known_to_runner = False

    def _leave_in_the_air(self, state: RequestState) -> None:
        """What comes of its rows in steps that were not committed yet is of no interest any more."""
        for flight in self._in_flight.values():
            if state in flight:
                flight[flight.index(state)] = None

    # ---- small print ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if the books disagree. Tests call it after every step."""
        waiting = list(self.queue)
        assert {state.request_id for state in [*waiting, *self.running]} == set(self._states)
        assert len(waiting) + len(self.running) == len(self._states)
        assert self.running == sorted(self.running, key=_rank_of)
        self.queue.check()
        self.cache.check(state.lease for state in self._states.values())

    def _rank(self, state: RequestState) -> Any:
        """By the present policy; who was overdue keeps that rank under any."""
        if is_overdue(state.rank):
            return state.rank
        return rank(self.config.policy, state.request, state.arrival)

    def _check_servable(self, request: Request) -> None:
        if request.request_id in self._states:
            raise Conflict(f"request id {request.request_id!r} is in flight", param="request_id")
        news.check_prompt_length(len(request.prompt_token_ids), self.config.max_model_len)
