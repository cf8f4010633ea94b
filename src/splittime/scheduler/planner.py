"""The planner: what the next step computes, and why everybody else waits.

There is no prefill phase and no decode phase: a request has known tokens and computed tokens, and a row lets it catch
up. A plan is made within one token budget, in this order:

    1. decode      running requests with one pending token, best rank first; prefills cannot hold them up.
                   A request that needs a block and finds none preempts the worst-ranked running request (itself, if it
                   is the worst), which gives all its blocks back and waits to be admitted again.
    2. prefill     running requests with more pending tokens, in chunks of what the budget leaves.
    3. admission   from the queue, while there are slots, budget, and blocks for all its known tokens (so a prefill is
                   never stopped half-way for want of blocks). The first that does not fit ends the admission: nobody
                   overtakes it, so nobody starves.
                   Where several keys have requests, each does 2 and 3 for itself, in turns, and one that lacks a slot
                   or blocks may take them from another that has more (`scheduler.turns`). Who waits for blocks is
                   passed only by a key that would not have more of them than its own.
    4. ahead       one prompt that is computed ahead, if nobody waits any more (`scheduler.ahead`).
    5. drafts      decode rows are widened by the drafts that pay, with what is left (`scheduler.speculation`).

Every request that waits, and every running one that gets no row, gets its cause at this moment.
"""

import math
from collections.abc import Collection

from splittime.core.shares import KeyShare
from splittime.core.step import PENDING, Admitted, Row, StepPlan
from splittime.ledger.stages import Cause
from splittime.scheduler.ahead import AHEAD_TOKENS
from splittime.scheduler.pace import KeyPace
from splittime.scheduler.prompt_pass import PromptPass, StepBudget, take_row
from splittime.scheduler.requests import Requests
from splittime.scheduler.state import DECODE, RequestState
from splittime.scheduler.turns import FreedBlocks, Holdings


class Planner:
    """victims: preempted by the latest plan."""

    def __init__(self, requests: Requests) -> None:
        self.victims: list[str] = []
        self._requests = requests
        self.pace = KeyPace()
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
        shares = self._shares()
        sitting_out = self.pace.who_sits_out(shares, requests.running)
        rows, admitted, budget = self._plan_rows(now_ns, sitting_out)
        if sitting_out and not rows:  # for whom they do has given its blocks away
            sitting_out = {}
            rows, admitted, budget = self._plan_rows(now_ns, sitting_out)
        if not rows:
            return None
        sizes = (budget.num_decodes, config.max_num_batched_tokens, len(requests.running))
        least_survival = requests.speculation.plan(rows, *sizes, now_ns)
        self._step_id += 1
        requests.begin_step(self._step_id, rows)
        if shares:
            self.pace.begin(self._step_id, now_ns, rows, requests.by_id, sitting_out)
        else:
            self._stay_alone()
        offloads, restores = requests.cache.take_moves()
        released, preempted = requests.take_released()
        moves = offloads, restores
        imports = requests.cache.take_imports()
        return StepPlan(self._step_id, tuple(rows), admitted, released, *moves, least_survival, preempted, imports)

    def _shares(self) -> dict[str, KeyShare]:
        """Returns the keys that run or wait; none where one alone has requests."""
        shares = self._requests.queue.shares
        return shares.running | shares.waiting if self._requests.is_shared else {}

    def _plan_rows(
        self, now_ns: int, sitting_out: Collection[str]
    ) -> tuple[list[Row], tuple[Admitted, ...], StepBudget]:
        """Returns the rows of a step but for drafts, who is admitted into it, and what is left of it."""
        rows: list[Row] = []
        behind = self._plan_decodes(rows, now_ns, sitting_out)
        budget = StepBudget(self._requests.config, len(rows))
        prompts = PromptPass(self._requests, rows, budget, now_ns)
        admitted = prompts.run([state for state in behind if not state.is_ahead], sitting_out)
        for victim in prompts.victims:
            self._note_victim(victim)
        return rows, admitted + self._plan_prompt_ahead(rows, budget, prompts, now_ns), budget

    def quiet_until_ns(self, now_ns: int) -> float:
        """Until when a plan of nothing but a row for each of the running says of those who wait what the last one said,
        while there are as few blocks; before now if not even this one would."""
        queue, config = self._requests.queue, self._requests.config
        bound_ns = config.starvation_bound_ms * 1e6
        first = queue.peek(now_ns, bound_ns)
        if first is None:
            return math.inf
        cause = self._behind_decodes(now_ns).obstacle()
        said = (Cause.KV_BLOCKS, Cause.POLICY) if cause is None else (cause, cause)
        return queue.overdue_from_ns(now_ns, bound_ns) if queue.has_said(first, *said) else -math.inf

    def lacks_blocks(self, first: RequestState) -> bool:
        """Whether a plan of nothing but decodes, whose blocks are taken, finds too few for who waits first. What it
        tries leaves the cache as a plan that comes behind would."""
        cause = self._behind_decodes(0).find_blocks(first)
        if cause is None:
            self._requests.cache.free(first.lease)
            first.num_computed = 0
        return cause is Cause.KV_BLOCKS

    def waits_for_blocks(self, now_ns: int) -> RequestState | None:
        """Returns who waits first, if nothing but blocks keeps it from being admitted behind decodes."""
        first = self._requests.queue.peek(now_ns, self._requests.config.starvation_bound_ms * 1e6)
        return None if first is None or self._behind_decodes(now_ns).obstacle() is not None else first

    def _behind_decodes(self, now_ns: int) -> PromptPass:
        """Returns what comes behind the decodes in a step in which all that run decode."""
        budget = StepBudget(self._requests.config, len(self._requests.running))
        return PromptPass(self._requests, [], budget, now_ns)

    def pass_steps(self, count: int) -> None:
        """Go on behind a number of steps that were taken without a plan: those of one key."""
        self._step_id += count
        self._stay_alone()

    def _stay_alone(self) -> None:
        if self._requests.running:
            self.pace.stay_alone(self._requests.running[0].share)

    def _plan_decodes(self, rows: list[Row], now_ns: int, sitting_out: Collection[str]) -> list[RequestState]:
        """A row for each running request with one pending token, which needs a new block at a block's edge only.
        Returns those with more to catch up."""
        requests = self._requests
        running, cache = requests.running, requests.cache
        block_size, in_flight = cache.block_size, requests.in_flight if sitting_out else ()
        behind: list[RequestState] = []
        position = 0
        while position < len(running):
            state = running[position]
            if sitting_out and state.share.name in sitting_out:
                position += 1
                if state not in in_flight and not requests.awaits_form(state):
                    state.stall(Cause.POLICY, now_ns)
                continue
            num_computed, num_promised = state.num_computed, state.num_promised
            num_tokens = len(state.token_ids) + num_promised
            if num_tokens - num_computed >= state.least_behind:
                behind.append(state)
            elif num_tokens < state.plan_until:  # else its last token is being sampled, or its drafts are verified
                lease = state.lease
                if num_computed == len(lease.block_ids) * block_size and not cache.reserve(lease, num_tokens):
                    position -= self._preempt_for_block(state, position, rows, behind, now_ns)
                    continue  # this one again; if it was the worst itself, that was the end
                new_block_ids = lease.unsent() if lease.num_sent < len(lease.block_ids) else ()
                if state.account.stage is not DECODE:
                    state.resume(now_ns)
                token_id = PENDING if num_promised else state.token_ids[-1]
                state.num_computed, state.num_promised = num_tokens, num_promised + 1
                rows.append(Row(state.request_id, num_computed, (token_id,), new_block_ids, 1))
            position += 1
        return behind

    def _preempt_for_block(
        self, state: RequestState, position: int, rows: list[Row], behind: list[RequestState], now_ns: int
    ) -> bool:
        """Preempt who gives a running request a block: the worst-ranked, or where there are several keys, the
        worst-ranked of the one that has most of them, if that has more than this one's. Returns whether that was one
        before its position. Of one key none is, and so none has a row yet: best rank first."""
        running = self._requests.running
        victim = running[-1]
        if self._requests.is_shared and not victim.is_ahead:
            cache = self._requests.cache
            holdings = Holdings(running, lambda each: cache.part_of(each.lease))
            givers = holdings.who_gives(state.share, 1, 1, FreedBlocks(cache))
            victim = givers[0] if givers else holdings.worst_of(state.share)
            take_row(victim, rows)
            if victim in behind:
                behind.remove(victim)
        is_before = running.index(victim) < position
        self._requests.preempt(victim, now_ns)
        self._note_victim(victim)
        return is_before

    def _note_victim(self, victim: RequestState) -> None:
        self.victims.append(victim.request_id)
        self._has_made_way |= victim.is_ahead

    def _plan_prompt_ahead(
        self, rows: list[Row], budget: StepBudget, prompts: PromptPass, now_ns: int
    ) -> tuple[Admitted, ...]:
        """A part of a prompt that is computed ahead, of what is left."""
        requests = self._requests
        admitted: tuple[Admitted, ...] = ()
        state = requests.running_prompt_ahead
        if state is None:
            state = None if self._has_made_way or len(requests.queue) else requests.prompts_ahead.first()
            if state is None or prompts.obstacle() or prompts.find_blocks(state):
                return ()
            admitted = (requests.admit(state),)
        if not state.num_pending:  # its last part runs
            return ()
        num_tokens = 0 if len(requests.queue) else min(budget.chunk(state.num_pending), AHEAD_TOKENS)
        if num_tokens == 0:
            state.stall(Cause.POLICY if len(requests.queue) else Cause.TOKEN_BUDGET, now_ns)
            return admitted
        state.account.enter(state.computing_stage, now_ns)
        rows.append(state.next_row(num_tokens))
        return admitted

    def stand_still(self, now_ns: int) -> None:
        """Paused: say so to everybody in the queue, and to those who run but whose rows do not."""
        requests = self._requests
        first = requests.queue.peek(now_ns, float("inf"))
        if first is not None:
            requests.queue.wait(now_ns, first, Cause.PAUSED, Cause.PAUSED)
        for state in requests.running:
            if not requests.is_in_flight(state) and not requests.awaits_form(state):
                state.stall(Cause.PAUSED, now_ns)
