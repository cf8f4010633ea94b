"""The planner: what the next step computes, and why everybody else waits.

There is no prefill phase and no decode phase: a request has known tokens and computed tokens, and a row lets it catch
up. A plan is made in five passes over one token budget:

    1. decode      running requests with one pending token, best rank first; prefills cannot hold them up.
                   A request that needs a block and finds none preempts the worst-ranked running request (itself, if it
                   is the worst), which gives all its blocks back and waits to be admitted again.
    2. prefill     running requests with more pending tokens, in chunks of what the budget leaves.
    3. admission   from the queue, while there are slots, budget, and blocks for all its known tokens (so a prefill is
                   never stopped half-way for want of blocks). The first that does not fit ends the admission: nobody
                   overtakes it, so nobody starves.
    4. ahead       one prompt that is computed ahead, if nobody waits any more (`scheduler.ahead`).
    5. drafts      decode rows are widened by the drafts that pay, with what is left (`scheduler.speculation`).

Every request that waits, and every running one that gets no row, gets its cause at this moment.
"""

import math

from splittime.core.step import PENDING, Admitted, Row, StepPlan
from splittime.ledger.stages import Cause
from splittime.scheduler.ahead import AHEAD_TOKENS
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.requests import Requests
from splittime.scheduler.state import DECODE, RequestState


class StepBudget:
    """What a step with so many decode rows may still compute: `tokens`. With chunking, a prompt takes what is left;
    without, it goes whole or not at all, except that one prompt longer than the whole budget may go as the step's only
    prefill."""

    __slots__ = ("enable_chunked_prefill", "has_prefill", "tokens")

    def __init__(self, config: SchedulerConfig, num_decodes: int) -> None:
        self.tokens = max(config.max_num_batched_tokens - num_decodes, 0)
        if config.max_prefill_tokens is not None:
            self.tokens = min(self.tokens, config.max_prefill_tokens)
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.has_prefill = False

    def chunk(self, num_pending: int) -> int:
        """How many of a request's pending tokens fit now; 0: none."""
        if self.enable_chunked_prefill:
            return min(num_pending, self.tokens)
        fits = num_pending <= self.tokens or not self.has_prefill
        return num_pending if fits and self.tokens > 0 else 0

    def spend(self, num_tokens: int) -> None:
        self.tokens = max(self.tokens - num_tokens, 0)
        self.has_prefill = True


class Planner:
    """victims: preempted by the latest plan."""

    def __init__(self, requests: Requests) -> None:
        self.victims: list[str] = []
        self._requests = requests
        self._step_id = 0
        self._has_made_way = False  # in this plan, what is computed ahead

    def plan(self, now_ns: int) -> StepPlan | None:
        """What to compute now, or None if there is nothing to do."""
        self.victims = []
        requests, config = self._requests, self._requests.config
        if config.paused:
            self.stand_still(now_ns)
            return None
        self._has_made_way = False
        may_admit = config.batching == "continuous" or not requests.num_served
        rows: list[Row] = []
        behind = self._plan_decodes(rows, now_ns)
        num_decodes = len(rows)
        budget = StepBudget(config, num_decodes)
        self._plan_prefills(behind, rows, budget, now_ns)
        admitted = self._plan_admissions(rows, budget, may_admit, now_ns)
        admitted += self._plan_prompt_ahead(rows, budget, may_admit, now_ns)
        if not rows:
            return None
        sizes = (num_decodes, config.max_num_batched_tokens, len(requests.running))
        least_survival = requests.speculation.plan(rows, *sizes, now_ns)
        self._step_id += 1
        requests.begin_step(self._step_id, rows)
        offloads, restores = requests.cache.take_moves()
        released, preempted = requests.take_released()
        moves = offloads, restores
        imports = requests.cache.take_imports()
        return StepPlan(self._step_id, tuple(rows), admitted, released, *moves, least_survival, preempted, imports)

    def quiet_until_ns(self, now_ns: int) -> float:
        """Until when a plan of nothing but a row for each of the running says of those who wait what the last one said,
        while there are as few blocks; before now if not even this one would."""
        queue, config = self._requests.queue, self._requests.config
        bound_ns = config.starvation_bound_ms * 1e6
        first = queue.peek(now_ns, bound_ns)
        if first is None:
            return math.inf
        cause = self._obstacle_behind_decodes()
        said = (Cause.KV_BLOCKS, Cause.POLICY) if cause is None else (cause, cause)
        return queue.overdue_from_ns(now_ns, bound_ns) if queue.has_said(first, *said) else -math.inf

    def lacks_blocks(self, first: RequestState) -> bool:
        """Whether a plan of nothing but decodes, whose blocks are taken, finds too few for who waits first. What it
        tries leaves the cache as a plan that comes behind would."""
        cause = self._find_blocks(first, StepBudget(self._requests.config, len(self._requests.running)))
        if cause is None:
            self._requests.cache.free(first.lease)
            first.num_computed = 0
        return cause is Cause.KV_BLOCKS

    def waits_for_blocks(self, now_ns: int) -> RequestState | None:
        """Returns who waits first, if nothing but blocks keeps it from being admitted behind decodes."""
        first = self._requests.queue.peek(now_ns, self._requests.config.starvation_bound_ms * 1e6)
        return None if first is None or self._obstacle_behind_decodes() is not None else first

    def _obstacle_behind_decodes(self) -> Cause | None:
        """What keeps any request from being admitted into a step in which all that run decode."""
        config = self._requests.config
        return self._obstacle(StepBudget(config, len(self._requests.running)), config.batching == "continuous")

    def pass_steps(self, count: int) -> None:
        """Go on behind a number of steps that were taken without a plan."""
        self._step_id += count

    def _plan_decodes(self, rows: list[Row], now_ns: int) -> list[RequestState]:
        """A row for each running request with one pending token, which needs a new block at a block's edge only.
        Returns those with more to catch up. A victim never has a row yet, and is none of those: best rank first."""
        running, cache = self._requests.running, self._requests.cache
        block_size = cache.block_size
        behind: list[RequestState] = []
        position = 0
        while position < len(running):
            state = running[position]
            num_computed, num_promised = state.num_computed, state.num_promised
            num_tokens = len(state.token_ids) + num_promised
            if num_tokens - num_computed >= state.least_behind:
                behind.append(state)
            elif num_tokens < state.plan_until:  # else its last token is being sampled, or its drafts are verified
                lease = state.lease
                if num_computed == len(lease.block_ids) * block_size and not cache.reserve(lease, num_tokens):
                    self._preempt(running[-1], now_ns)
                    continue  # this one again; if it was the worst itself, that was the end
                new_block_ids = lease.unsent() if lease.num_sent < len(lease.block_ids) else ()
                if state.account.stage is not DECODE:
                    state.resume(now_ns)
                token_id = PENDING if num_promised else state.token_ids[-1]
                state.num_computed, state.num_promised = num_tokens, num_promised + 1
                rows.append(Row(state.request_id, num_computed, (token_id,), new_block_ids, 1))
            position += 1
        return behind

    def _plan_prefills(self, behind: list[RequestState], rows: list[Row], budget: StepBudget, now_ns: int) -> None:
        """Chunks for those that have more than one token to catch up."""
        for state in behind:
            if state.is_ahead:
                continue
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
        bound_ns = self._requests.config.starvation_bound_ms * 1e6
        while (state := self._requests.queue.peek(now_ns, bound_ns)) is not None:
            cause = self._obstacle(budget, may_admit) or self._find_blocks(state, budget)
            if cause in (Cause.BATCH_SLOTS, Cause.KV_BLOCKS) and self._make_way(now_ns):
                continue
            if cause is not None:
                rest_cause = Cause.POLICY if cause is Cause.KV_BLOCKS else cause
                self._requests.queue.wait(now_ns, state, cause, rest_cause)
                break
            admitted.append(self._requests.admit(state))
            self._plan_first_row(state, rows, budget, now_ns)
        return tuple(admitted)

    def _make_way(self, now_ns: int) -> bool:
        """Put aside what is computed ahead, whose slot or blocks somebody lacks. Returns whether there was any."""
        state = self._requests.running_prompt_ahead
        if state is not None:
            self._preempt(state, now_ns)
        return state is not None

    def _preempt(self, victim: RequestState, now_ns: int) -> None:
        self.victims.append(victim.request_id)
        self._has_made_way |= victim.is_ahead
        self._requests.preempt(victim, now_ns)

    def _plan_prompt_ahead(
        self, rows: list[Row], budget: StepBudget, may_admit: bool, now_ns: int
    ) -> tuple[Admitted, ...]:
        """A part of a prompt that is computed ahead, of what is left."""
        requests = self._requests
        admitted: tuple[Admitted, ...] = ()
        state = requests.running_prompt_ahead
        if state is None:
            state = None if self._has_made_way or len(requests.queue) else requests.prompts_ahead.first()
            if state is None or self._obstacle(budget, may_admit) or self._find_blocks(state, budget):
                return ()
            admitted = (requests.admit(state),)
        if not state.num_pending:  # its last part runs
            return ()
        num_tokens = 0 if len(requests.queue) else min(budget.chunk(state.num_pending), AHEAD_TOKENS)
        if num_tokens == 0:
            state.stall(Cause.POLICY if len(requests.queue) else Cause.TOKEN_BUDGET, now_ns)
            return ()
        state.account.enter(state.computing_stage, now_ns)
        rows.append(state.next_row(num_tokens))
        return admitted

    def _obstacle(self, budget: StepBudget, may_admit: bool) -> Cause | None:
        """What keeps any request from being admitted now."""
        if not may_admit:
            return Cause.POLICY
        if len(self._requests.running) >= self._requests.config.max_num_seqs:
            return Cause.BATCH_SLOTS
        if budget.tokens == 0 and self._requests.config.batching == "continuous":
            return Cause.TOKEN_BUDGET
        return None

    def _find_blocks(self, state: RequestState, budget: StepBudget) -> Cause | None:
        """Lease the cached prefix, with room for all its known tokens; or why not, with nothing changed."""
        keep_free = max(1, self._requests.config.num_blocks // 100) if self._requests.running else 0
        if not state.request.sampling.computes_prompt:
            state.num_computed = self._requests.cache.match(state.lease, state.token_ids)
        cause = None
        if not self._requests.cache.has_room(state.lease, len(state.token_ids), keep_free):
            cause = Cause.KV_BLOCKS
        elif self._requests.config.batching == "continuous" and budget.chunk(state.num_pending) == 0:
            cause = Cause.TOKEN_BUDGET
        if cause is not None:
            self._requests.cache.free(state.lease)
            state.num_computed = 0
        elif state.num_cached_tokens is None:
            state.num_host_tokens = len(state.lease.in_host) * self._requests.config.block_size
        return cause

    def _plan_first_row(self, state: RequestState, rows: list[Row], budget: StepBudget, now_ns: int) -> None:
        """Give a request its row in the step that admits it. Only a static batch may be admitted without one."""
        num_tokens = budget.chunk(state.num_pending)
        state.account.enter(state.computing_stage, now_ns)
        if num_tokens == 0:
            state.stall(Cause.TOKEN_BUDGET, now_ns)
            return
        rows.append(state.next_row(num_tokens))
        budget.spend(num_tokens)

    def stand_still(self, now_ns: int) -> None:
        """Paused: say so to everybody in the queue, and to those who run but whose rows do not."""
        requests = self._requests
        first = requests.queue.peek(now_ns, float("inf"))
        if first is not None:
            requests.queue.wait(now_ns, first, Cause.PAUSED, Cause.PAUSED)
        for state in requests.running:
            if not requests.is_in_flight(state):
                state.stall(Cause.PAUSED, now_ns)
