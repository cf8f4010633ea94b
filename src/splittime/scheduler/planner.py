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
                   or blocks may take them from another that has more (`scheduler.prompt_pass`). Who waits for blocks is
                   passed only by a key that would not have more of them than its own.
    4. ahead       one prompt that is computed ahead, if nobody waits any more (`scheduler.requests`).
    5. drafts      decode rows are widened by the drafts that pay, with what is left (`scheduler.speculation`).

Every request that waits, and every running one that gets no row, gets its cause at this moment.

Keys share the time of steps (`KeyPace`): whose rows sit one out. A step takes as long for one row as for all that are
in it. So the time of a step is shared among the keys in it, by their tokens and weights (`KeyShare.spent_ns`), against
a level: what one that always got its share has spent. Who has spent more owes, and sits out while others have rows,
until the level has come up to it. Three rules keep that from being felt more than it helps:

* A step is charged only where it is dear: where one of its keys alone would have been faster by more than the weights
  allow, twice as fast for two equal keys. What that takes is learnt from the steps (`core.row_costs`): a step is taken
  to be dear until one with few rows shows otherwise, and one in `LOOK_EVERY` is charged whatever it is, to look again.
  Where a batch costs little more than a row, as on a card, nobody owes.
* Nobody owes more than the step that it was in, or two where the next is planned before that. The level rises whoever
  comes, so how long somebody sits out hangs on its own debt and on the weights of those that share, and not on
  newcomers: these begin at the level.
* A key that has no row in a step, and does not sit it out, has no part in it: it saves nothing up by waiting, and who
  goes on without it owes nothing. Nobody saves up by having little, either, more than those that are there owe.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from splittime.core.row_costs import RowCosts
from splittime.core.shares import UNIT, KeyShare
from splittime.core.step import PENDING, Admitted, Row, StepPlan
from splittime.ledger.stages import Cause
from splittime.scheduler.prompt_pass import FreedBlocks, Holdings, PromptPass, StepBudget, take_row
from splittime.scheduler.requests import AHEAD_TOKENS, Requests
from splittime.scheduler.state import DECODE, RequestState

LOOK_EVERY = 64  # steps of several keys
ROWS_WITHOUT = 0.1  # what a step takes is its rows, until one with few shows otherwise


class PacedStep(NamedTuple):
    """tokens: of each key with rows. is_plain: each row decodes one token, without drafts. owing: keys with rows that
    owed when it was planned."""

    planned_ns: int
    tokens: dict[str, int]
    shares: dict[str, KeyShare]
    sit_out: Mapping[str, KeyShare]
    is_plain: bool
    owing: frozenset[str]


class KeyPace:
    """Only where several keys have requests."""

    def __init__(self) -> None:
        self._level_ns = 0  # of a key of weight 1
        self._costs = RowCosts(ROWS_WITHOUT)  # of tokens
        self._planned: dict[int, PacedStep] = {}
        self._tokens: dict[str, int] = {}  # that keys with a part in the latest step have in one of all
        self._num_together = 0  # steps in which no key sat out
        self._committed_ns = 0

    def who_sits_out(self, shares: Mapping[str, KeyShare], running: Iterable[RequestState]) -> dict[str, KeyShare]:
        """shares: of the keys that run or wait. Changes nothing: a plan that comes to nothing is in no record."""
        owing = {name: share for name, share in shares.items() if share.spent_ns > self._level_ns}
        helps = owing and any(
            state.share.name not in owing and state.gets_row and not state.is_ahead for state in running
        )
        return owing if helps else {}

    def stay_alone(self, share: KeyShare) -> None:
        """One key has requests: it owes nobody."""
        self._level_ns = max(self._level_ns, share.spent_ns)

    def begin(
        self,
        step_id: int,
        now_ns: int,
        rows: Iterable[Row],
        by_id: Mapping[str, RequestState],
        sit_out: Mapping[str, KeyShare],
    ) -> None:
        """A step was planned, while several keys ran or waited."""
        tokens: dict[str, int] = {}
        shares: dict[str, KeyShare] = {}
        is_plain = True
        for row in rows:
            state = by_id[row.request_id]
            is_plain = is_plain and row.num_tokens == 1
            if not state.is_ahead:
                name = state.share.name
                shares[name] = state.share
                tokens[name] = tokens.get(name, 0) + row.num_tokens
        owing = frozenset(name for name, share in shares.items() if share.spent_ns > self._level_ns)
        self._planned[step_id] = PacedStep(now_ns, tokens, shares, sit_out, is_plain, owing)

    def end(self, step_id: int, now_ns: int) -> None:
        """Learn what the step took, which was committed now, and share it."""
        step = self._planned.pop(step_id, None)
        began_ns = max(step.planned_ns if step else 0, self._committed_ns)
        self._committed_ns = now_ns
        if step is None or not step.tokens:
            return
        took_ns = now_ns - began_ns
        if step.is_plain:
            self._costs.learn(sum(step.tokens.values()), took_ns)
        self._share(step, took_ns)

    def _share(self, step: PacedStep, took_ns: int) -> None:
        parts = {**step.sit_out, **step.shares}
        for name, share in parts.items():
            if name not in self._tokens:
                share.spent_ns = max(share.spent_ns, self._level_ns)
        self._tokens = {name: self._tokens_of(step, share) for name, share in parts.items()}
        weight = sum(share.weight for share in parts.values())
        is_dear = self._is_dear(step, parts, took_ns, weight)
        level_ns = self._level_ns + int(took_ns / weight)
        if is_dear:
            self._charge(step, took_ns)
            level_ns = max(level_ns, min(share.spent_ns for share in parts.values()))
        else:  # what is owed stays so, since who owes may have had its row planned before that was known
            for share in parts.values():
                share.spent_ns = level_ns if step.sit_out else share.spent_ns + level_ns - self._level_ns
        self._level_ns = level_ns
        self._bound_savings(parts.values())

    def _tokens_of(self, step: PacedStep, share: KeyShare) -> int:
        """Returns how many tokens a key has in a step of all: while it owes, as many as in one that it owes for."""
        owes = share.name in step.sit_out or share.spent_ns > self._level_ns
        return max(step.tokens.get(share.name, 0), self._tokens.get(share.name, 0) if owes else 0)

    def _charge(self, step: PacedStep, took_ns: int) -> None:
        """Who owed when the step was planned had rows because nobody was there to sit out for: it owes a step at most,
        or short requests, which are there in no plan, would stop it for as long as they came."""
        total = sum(step.tokens.values())
        for name, share in step.shares.items():
            spent_ns = share.spent_ns + took_ns * step.tokens[name] * share.unit // (total * UNIT)
            if name in step.owing:
                spent_ns = min(spent_ns, max(share.spent_ns, self._level_ns + took_ns * share.unit // UNIT))
            share.spent_ns = spent_ns

    def _is_dear(self, step: PacedStep, parts: Mapping[str, KeyShare], took_ns: int, weight: float) -> bool:
        """Whether a step of all takes longer than one of them alone by more than the weights allow, or that is to be
        seen."""
        if len(parts) == 1:
            return False
        if step.sit_out:  # of all it would have taken longer
            took_ns = max(took_ns, round(self._costs.expected_ns(sum(self._tokens.values()))))
        else:
            self._num_together += 1
        is_looked_at = not step.sit_out and self._num_together % LOOK_EVERY == 1
        return is_looked_at or any(
            took_ns * share.weight > weight * self._costs.expected_ns(self._tokens[name])
            for name, share in parts.items()
        )

    def _bound_savings(self, parts: Collection[KeyShare]) -> None:
        """Leave no more to be had than those that share owe: who owed may have gone."""
        off = [(share, (share.spent_ns - self._level_ns) * share.weight) for share in parts]
        owed, saved = sum(max(0, each) for _, each in off), -sum(min(0, each) for _, each in off)
        for share, each in off:
            if each < 0 and saved > owed:
                share.spent_ns = self._level_ns - int((self._level_ns - share.spent_ns) * owed / saved)


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
        if requests.cache.states is not None:
            rows = [self._with_state(row) for row in rows]
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

    def _with_state(self, row: Row) -> Row:
        lease = self._requests.by_id[row.request_id].lease
        return msgspec.structs.replace(row, state=self._requests.cache.state_of(lease, row.start, row.num_tokens))

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
