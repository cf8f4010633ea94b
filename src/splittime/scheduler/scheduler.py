"""The scheduler: owner of every request in the engine. `plan` says what a step computes, `commit` what came of it.

Requests come and go here; what each change means for the books is in `scheduler.requests`, how a step is planned in
`scheduler.planner`.

The next step may be planned before the one before it is committed (one step ahead, no more): what is planned counts as
computed at once, and a token that is still being sampled stands in the next row as `PENDING`. A request that turns out
to have ended, or was preempted, leaves its row in flight: what comes of that is dropped. Its blocks may be given away
at once, since steps run in order.

The scheduler reads no clock: `now_ns` is told to it. `check` verifies its books against the cache's.

A simulation takes steps in which nothing is decided without a plan for each (ADR 20). Each changes the same things for
all rows, except at a block's edge. Rows of the same *phase* (the place of their next token within its block) reach the
edge in the same step.

    block size 4, places of next rows     a: 6   b: 9   c: 2      a and c have phase 2, b has phase 1
    step 0                                a and c are at place 2, b at 1
    step 1                                a and c fill their blocks: the prefix index learns them
    step 2                                a and c begin a block, which they take from the pool; b fills its block

Whoever takes the steps says when each begins, and what its tokens are. `close` brings the requests to the state after
the last step, and ends those that have as many tokens as they may have; none has before the last step. A stretch may
end before any step: what `begin_step` has done by then is what that step's plan would do first.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from splittime.core.errors import Conflict
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD
from splittime.core.step import Row, RowResult, StepPlan, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.planner import Planner
from splittime.scheduler.queue import MortalHeap
from splittime.scheduler.requests import Requests, check_ahead, rank_of
from splittime.scheduler.state import (
    DECODE,
    Rank,
    RequestState,
    check_prompt_length,
    deadline_error,
    is_overdue,
    progress_output,
    rank,
    row_error,
)

TokensOf = Callable[[str, int, int], list[int]]  # so many that a request samples, from a place on


class QuietStretch:
    """max_steps: how many steps there may be at the most; none may begin later than `until_ns`. num_steps: how many
    have ended. is_steady: called in each step, says whether all who wait go on waiting. request_ids, starts: of the
    rows of the first step."""

    def __init__(
        self, requests: Requests, tokens_of: TokensOf, max_steps: int, until_ns: float, is_steady: Callable[[], bool]
    ) -> None:
        self.max_steps, self.until_ns, self._steps_to_end = max_steps, until_ns, max_steps
        self.num_steps, self._is_steady = 0, is_steady
        self._states = list(requests.running)
        self.request_ids = [state.request_id for state in self._states]
        self.starts = [state.num_computed for state in self._states]
        self._requests, self._cache, self._tokens_of = requests, requests.cache, tokens_of
        self._block_size = requests.cache.block_size
        self._by_phase: list[list[RequestState]] = [[] for _ in range(self._block_size)]
        for state in self._states:
            self._by_phase[state.num_computed % self._block_size].append(state)

    def begin_step(self) -> bool:
        """Takes a block for each row at a block's edge. Returns False if there are too few blocks, or if somebody can
        be admitted."""
        for state in self._by_phase[-self.num_steps % self._block_size]:
            if not self._cache.reserve(state.lease, state.num_computed + self.num_steps + 1):
                return False
        return self._is_steady()

    def end_step(self) -> None:
        """Index the blocks that the step has filled."""
        self.num_steps += 1
        if self._cache.enable_prefix_caching:
            for state in self._by_phase[-self.num_steps % self._block_size]:
                self._learn_tokens(state)
                self._cache.commit(state.lease, state.token_ids, len(state.token_ids) - 1)

    @property
    def has_ends(self) -> bool:
        """The step that has ended last was the last of one of the requests."""
        return self.num_steps == self._steps_to_end

    def close(self, committed_ns: int) -> list[RequestOutput]:
        """Put the requests where the steps have left them, the last of which was committed then. Returns the ends."""
        for state in self._states:
            self._learn_tokens(state)
            state.num_computed += self.num_steps
            state.share.charge(self.num_steps)
        self._requests.counts.output_tokens += self.num_steps * len(self._states)
        ended = [state for state in self._states if len(state.token_ids) == state.max_num_tokens]
        return [self._requests.end(state, FinishReason.LENGTH, committed_ns) for state in ended]

    def _learn_tokens(self, state: RequestState) -> None:
        begin, end = len(state.token_ids), state.num_computed + self.num_steps + 1
        state.token_ids += self._tokens_of(state.request_id, begin, end - begin)


def num_undecided(requests: Requests) -> int:
    """Returns for how many steps from now on those who run do nothing but decode, if there are blocks for it, up to the
    one in which the first of them ends. 0 if the next step has more to do."""
    if requests.is_shared or requests.cache.states:  # whose turn it is, or a checkpoint, may come with each token
        return 0
    if requests.prompts_ahead or not requests.running or requests.speculation.active or requests.has_step_in_flight:
        return 0
    left = []
    for state in requests.running:  # each computes its last known token next, and whatever follows does not end it
        num_tokens = len(state.token_ids)
        is_next = state.num_computed == num_tokens - 1 and not state.num_promised
        if not is_next or state.account.stage is not DECODE or state.stop_ids:
            return 0
        left.append(state.max_num_tokens - num_tokens)
    return min(left)


class Scheduler:
    """See the module's docstring. Not thread-safe: the loop that owns it is the only caller."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._requests = requests = Requests(config.validate())
        self._planner = Planner(requests)
        self.cache, self.counts, self.speculation = requests.cache, requests.counts, requests.speculation
        self.queue, self.held, self.running = requests.queue, requests.held, requests.running
        self.prompts_ahead, self.adapter_slots = requests.prompts_ahead, requests.adapter_slots
        self._states = requests.by_id
        self._block_size = config.block_size
        self._deadlines: MortalHeap[tuple[int, int, str]] = MortalHeap(self._is_still_due)  # arrival, request id
        self._num_arrived = 0
        self._last_commit_ns = 0

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, received_ns: int, measured_ns: int = 0, held_for: Cause | None = None) -> None:
        """Take a request in. Raises RequestError, with nothing changed, if it can never be served.

        measured_ns: end of the last machine measurement.
        held_for: it waits for this, beside the queue, until `release`.
        """
        self._check_servable(request)
        self._num_arrived += 1
        arrival = self._num_arrived
        state = RequestState(request, arrival, rank(self.config.policy, request, arrival), self.config.max_model_len)
        queued_ns = max(received_ns, request.submitted_ns)
        self._requests.enter(state)
        if state.is_ahead:
            self.prompts_ahead.add(state, queued_ns)
        elif held_for is None:
            self._queue(state, queued_ns, self._cause_until_planned(received_ns, measured_ns))
        else:
            self.held.add(state, held_for, queued_ns)
        if request.deadline_ns is not None:
            self._deadlines.push((request.deadline_ns, arrival, request.request_id))
            self._deadlines.sweep(len(self._states))

    def hold(self, request_id: str, cause: Cause, now_ns: int) -> bool:
        """Set a waiting request aside until `release`: it waits for something of its own, and keeps nobody else from
        being admitted. Held already, it waits for this cause from now on. Returns whether it waits; one that runs, or
        whose adapter has no place yet, is left alone."""
        state = self._states.get(request_id)
        if state is None or state.is_known_to_runner or state.is_ahead:
            return False
        if self._requests.adapter_slots.is_waiting(state):
            return False
        if state.pushed:
            self.queue.leave(state, is_admitted=False)
        self.held.add(state, cause, now_ns)
        return True

    def release(self, request_id: str, received_ns: int) -> bool:
        """Queues a request, with its rank: what it was held for is there. Returns whether it was held."""
        state = self._states.get(request_id)
        if state is None or state not in self.held or self._requests.adapter_slots.is_waiting(state):
            return False
        self.held.remove(state)
        queued_ns = max(received_ns, state.account.marks[-1].begin_ns)
        self._queue(state, queued_ns, self._cause_until_planned(received_ns))
        return True

    def go_on(self, request_id: str) -> bool:
        """Gives a request rows again: what may come in its answer is known. Returns whether it waited for that."""
        state = self._states.get(request_id)
        return state is not None and self._requests.go_on(state)

    def _queue(self, state: RequestState, queued_ns: int, cause: Cause) -> None:
        """Let it wait in the queue; beside it, where its adapter has no place yet."""
        if not self._requests.adapter_slots.enter(state):
            self.held.add(state, Cause.LORA_SLOTS, queued_ns)
            return
        state.account.enter(state.waiting_stage, queued_ns, cause)
        self.queue.push(state, queued_ns)

    def abort(self, request_id: str, now_ns: int) -> RequestOutput | None:
        """End a request; its blocks are free on return. None if it is not here (it has ended already)."""
        state = self._states.get(request_id)
        return None if state is None else self._requests.end(state, FinishReason.ABORT, now_ns)

    def expire(self, now_ns: int) -> list[RequestOutput]:
        """End the requests whose deadline has passed."""
        outputs = []
        while (first := self._deadlines.first()) is not None and first[0] <= now_ns:
            deadline_ns, _, request_id = first
            state = self._states[request_id]
            error = deadline_error(state, now_ns - deadline_ns)
            outputs.append(self._requests.end(state, FinishReason.DEADLINE, now_ns, error))
        return outputs

    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do at the earliest."""
        first = self._deadlines.first()
        return None if first is None else first[0]

    def configure(self, knobs: dict[str, Any]) -> dict[str, Any]:
        """Change live knobs; returns all of them. Raises ConfigError with nothing changed."""
        self._requests.config = self.config.with_knobs(knobs)
        if "enable_prefix_caching" in knobs:
            self.cache.set_prefix_caching(self.config.enable_prefix_caching)
        if "policy" in knobs:
            self.queue.rerank(self._rank)
            for state in (*self.running, *self.held):
                state.rank = self._rank(state)
            self.running.sort(key=rank_of)
        return self.config.knobs()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """Returns what to compute now, or None if there is nothing to do."""
        return self._planner.plan(now_ns)

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[RequestOutput]:
        """Take the step's tokens over; returns an output for each request that has something to tell."""
        self._last_commit_ns = now_ns
        outputs: list[RequestOutput] = []
        states = self._requests.end_step(plan.step_id)
        self._planner.pace.end(plan.step_id, now_ns)
        if self.speculation.costs is not None:
            self.speculation.count(states, plan.rows, result.rows)
            if not self._requests.has_step_in_flight:
                self.speculation.learn(now_ns)
        for state, row, row_result in zip(states, plan.rows, result.rows, strict=True):
            if state is None:
                continue
            if row_result.error is not None:
                outputs.append(self._requests.end(state, FinishReason.ERROR, now_ns, row_error(row_result)))
                continue
            if row_result.is_late:
                outputs.append(self._sit_out(state, row, row_result, now_ns))
            elif row.num_samples:
                outputs.append(self._take_tokens(state, row, row_result, now_ns))
            elif (output := self._take_chunk(state, row, row_result, now_ns)) is not None:
                outputs.append(output)
        if self.config.paused:
            self._planner.stand_still(now_ns)
        return outputs

    def _take_chunk(self, state: RequestState, row: Row, row_result: RowResult, now_ns: int) -> RequestOutput | None:
        """After a row that sampled nothing. It ends a request for an embedding whose prompt it ends. Returns None where
        there is nothing to tell."""
        num_computed = row.start + len(row.token_ids)
        self.cache.commit(state.lease, state.token_ids, num_computed)
        prompt_logprobs = state.new_prompt_logprobs(row, row_result) if row_result.prompt_logprobs else ()
        if state.account.stage is Stage.RECOMPUTE and num_computed >= state.recompute_until:
            state.account.enter(Stage.PREFILL, now_ns)
        if state.request.sampling.pooling and num_computed == state.num_prompt:
            return self._requests.end(state, FinishReason.STOP, now_ns, pooled=row_result.pooled)
        if prompt_logprobs or state.num_marks_sent < len(state.account.marks):
            return progress_output(state, (), (), prompt_logprobs)
        return None

    def _take_tokens(self, state: RequestState, row: Row, row_result: RowResult, now_ns: int) -> RequestOutput:
        """Append a row's accepted tokens, up to the one that ends the request, and let the books follow."""
        accepted, logprobs, reason = row_result.token_ids, row_result.logprobs, None
        token_ids, lease = state.token_ids, state.lease
        token_ids += accepted
        num_tokens = len(token_ids)
        if num_tokens >= state.max_num_tokens or not state.stop_ids.isdisjoint(accepted):
            reason, num_kept = state.cut_at_end(len(accepted))
            accepted, logprobs, num_tokens = accepted[:num_kept], logprobs[:num_kept], len(token_ids)
        state.num_promised -= row.num_samples
        self.counts.output_tokens += len(accepted)
        state.share.counter += len(accepted) * state.share.unit
        # of the last token nothing is computed
        if (num_tokens - 1) // self._block_size > lease.num_indexed and self.cache.enable_prefix_caching:
            self.cache.commit(lease, token_ids, num_tokens - 1)
        prompt_logprobs = state.new_prompt_logprobs(row, row_result) if row_result.prompt_logprobs else ()
        if reason is not None:
            return self._requests.end(state, reason, now_ns, None, accepted, logprobs, prompt_logprobs)
        if state.account.stage is not DECODE:
            state.account.enter(DECODE, now_ns)
            output = progress_output(state, accepted, logprobs, prompt_logprobs)
        else:
            output = RequestOutput(state.request_id, accepted, logprobs)
        if row_result.draft_token_ids or self.speculation.active:
            self._settle_drafts(state, row, row_result, now_ns)
        return output

    def _sit_out(self, state: RequestState, row: Row, row_result: RowResult, now_ns: int) -> RequestOutput:
        """After a row that was to sample and could not yet: its last token is computed again once `go_on` says so."""
        self._requests.wait_for_form(state, row, row_result)
        state.stall(Cause.GRAMMAR, now_ns)
        return progress_output(state, (), (), state.new_prompt_logprobs(row, row_result))

    def _settle_drafts(self, state: RequestState, row: Row, row_result: RowResult, now_ns: int) -> None:
        """For a request that goes on."""
        self.speculation.settle(state, row, row_result)
        if self._requests.has_step_in_flight and not self._requests.is_in_flight(state):
            state.stall(Cause.STEP_IN_FLIGHT, now_ns)  # its tokens had to be known before it could be planned

    # ---- many steps at once ---------------------------------------------------------------------------------------

    def stretch(self, now_ns: int, tokens_of: TokensOf) -> QuietStretch | None:
        """Returns the steps that come, in which there is nothing to decide; None if there is something now. tokens_of:
        says what each samples in them."""
        max_steps = 0 if self.config.paused else num_undecided(self._requests)
        if not max_steps:
            return None
        deadline_ns = self.next_deadline_ns()
        until_ns = min(self._planner.quiet_until_ns(now_ns), math.inf if deadline_ns is None else deadline_ns - 1)
        if now_ns > until_ns:
            return None
        first, lacks_blocks = self._planner.waits_for_blocks(now_ns), self._planner.lacks_blocks
        is_steady = (lambda: True) if first is None else partial(lacks_blocks, first)
        return QuietStretch(self._requests, tokens_of, max_steps, until_ns, is_steady)

    def take_over(self, stretch: QuietStretch, committed_ns: int) -> list[RequestOutput]:
        """Go on behind a stretch, whose last step was committed then. Returns the ends of those who have ended."""
        self._planner.pass_steps(stretch.num_steps)
        self._last_commit_ns = committed_ns
        return stretch.close(committed_ns)

    # ---- what others look at --------------------------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        return self._requests.config

    @property
    def victims(self) -> list[str]:
        """Preempted by the latest plan."""
        return self._planner.victims

    @property
    def request_ids(self) -> list[str]:
        return list(self._states)

    @property
    def has_requests(self) -> bool:
        return bool(self._states)

    @property
    def has_work(self) -> bool:
        """Somebody waits in the queue, runs, or is to be computed ahead. Who is held, or waits for what may come in its
        answer, gives nothing to do."""
        return self.may_run or bool(self.prompts_ahead) or len(self.queue) > 0

    @property
    def may_run(self) -> bool:
        """Returns whether one of the running may get a row."""
        return self._requests.may_run

    @property
    def num_waiting(self) -> int:
        """In the queue, held beside it, or to be computed ahead."""
        return len(self.queue) + len(self.held) + len(self.prompts_ahead)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that must be computed for those who wait, held or not; those ahead keep nobody waiting."""
        return self.queue.num_tokens + self.held.num_tokens

    @property
    def num_running(self) -> int:
        return len(self.running)

    def waiting_for(self) -> Counter[Cause | None]:
        """Returns how many wait for what now, but for those to be computed ahead."""
        queued = self.queue.waiting_for()
        return queued + self.held.waiting_for() if self.held else queued

    def check(self) -> None:
        """Raise AssertionError if the books disagree. Tests call it after every step."""
        self._requests.check()

    # ---- small print ----------------------------------------------------------------------------------------------

    def _cause_until_planned(self, received_ns: int, measured_ns: int = 0) -> Cause:
        """Why one that came to the queue waits until the next plan says why."""
        if received_ns < measured_ns and measured_ns > self._last_commit_ns:
            return Cause.MEASURING
        return Cause.STEP_IN_FLIGHT if received_ns < self._last_commit_ns else Cause.ENGINE_LOOP

    def _rank(self, state: RequestState) -> Rank:
        """By the present policy; who was overdue keeps that rank under any."""
        if is_overdue(state.rank):
            return state.rank
        return rank(self.config.policy, state.request, state.arrival)

    def _is_still_due(self, entry: tuple[int, int, str]) -> bool:
        state = self._states.get(entry[2])
        return state is not None and state.arrival == entry[1]

    def _check_servable(self, request: Request) -> None:
        if request.request_id in self._states:
            raise Conflict(f"request id {request.request_id!r} is in flight", param="request_id")
        if request.sampling.pooling == AHEAD:
            check_ahead(request, self.config)
        least_tokens = request.sampling.least_tokens
        check_prompt_length(len(request.prompt_token_ids), self.config.max_model_len, least_tokens)
