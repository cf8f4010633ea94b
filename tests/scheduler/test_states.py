"""States of sequences, as the scheduler plans them.

`States` computes like any runner but keeps, in the place of a state, the tokens that it was made of: each row looks
whether what it goes on from are the tokens before it. Rows of a step run in any order, so no row may write what another
one reads.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host_moves import BLOCK, EVENTS, Prefix, ask, drained, prompt_of

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.core.step import NO_STATE, PENDING, SPARE_STATES, Row, RowResult, StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.kv import states
from splittime.kv.cache import KVCache, Lease
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

EVERY = 8


@pytest.fixture(autouse=True, scope="module")
def _often() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
        yield


class States:
    def __init__(self) -> None:
        self.slots: dict[int, Prefix] = {NO_STATE: ()}
        self.tokens: dict[str, list[int]] = {}
        self.num_computed = 0
        self._order = random.Random(1)
        self._launched: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self.run(self._launched.pop(0))

    def run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.tokens[request_id]
        for admitted in plan.admitted:
            self.tokens[admitted.request_id] = list(admitted.token_ids)
        results = {row.request_id: self._row(row) for row in self._order.sample(plan.rows, len(plan.rows))}
        written = [slot for row in plan.rows for slot in self._written(row)]
        assert len(set(written)) == len(written), "two rows write one slot"
        return StepResult(plan.step_id, tuple(results[row.request_id] for row in plan.rows))

    def _written(self, row: Row) -> list[int]:
        assert row.state is not None
        return [row.state.write, *(slot for _, slot in row.state.keeps)]

    def _row(self, row: Row) -> RowResult:
        tokens, state = self.tokens[row.request_id], row.state
        assert state is not None
        if row.token_ids != (PENDING,):
            tokens[row.start :] = row.token_ids
        assert self.slots[state.read] == tuple(tokens[: row.start]), f"{row.request_id} goes on from another state"
        self.slots |= {slot: tuple(tokens[: row.start + count]) for count, slot in state.keeps}
        self.slots[state.write] = tuple(tokens[: row.start + row.num_tokens])
        self.num_computed += row.num_tokens
        if not row.num_samples:
            return RowResult(row.request_id)
        tokens.append(len(tokens))
        return RowResult(row.request_id, (tokens[-1],))


def make(num_state_slots: int, num_blocks: int = 32, **changes: object) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": BLOCK, **changes}
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, num_state_slots=num_state_slots, **given))  # type: ignore[arg-type]


def cranked(scheduler: Scheduler, is_ahead: bool = False) -> tuple[Crank, States]:
    runner = States()
    return Crank(EngineParts(Engine(scheduler, plans_ahead=is_ahead), runner), VirtualClock()), runner


def answered(crank: Crank, *requests: object) -> None:
    for request in requests:
        crank.submit(request, 0)  # type: ignore[arg-type]
    for _ in drained(crank):
        pass


@settings(max_examples=250, deadline=None)
@given(
    st.integers(17, 24),
    st.integers(3, 24),
    st.booleans(),
    st.booleans(),
    st.lists(EVENTS, min_size=4, max_size=40),
)
def test_every_row_goes_on_from_its_own_prefix(
    num_blocks: int, num_state_slots: int, is_ahead: bool, chunks: bool, script: list
) -> None:
    """Prompts of four families come, are left, preempted and come back, with few slots and few blocks."""
    scheduler = make(num_state_slots, num_blocks, enable_chunked_prefill=chunks)
    crank, _ = cranked(scheduler, is_ahead)
    for number, event in enumerate(script):
        match event:
            case ("ask", group, length, max_tokens):
                crank.submit(ask(f"r{number}", prompt_of(group, length), max_tokens), 0)
            case ("step", count):
                for _ in range(count):
                    crank.turn()
                    scheduler.check()
            case ("abort", which):
                crank.abort(f"r{which}")
            case ("knob", name, value):
                crank.configure({name: value})
    crank.configure({"paused": False})
    for _ in drained(crank):
        pass
    assert scheduler.cache.num_used == 0
    assert scheduler.cache.states is not None
    assert scheduler.cache.states.num_free == num_state_slots


@pytest.mark.parametrize(("length", "computed"), [(8, 8), (9, 1), (16, 8), (17, 1), (23, 7), (25, 1)])
def test_a_prompt_that_comes_again_is_computed_from_the_last_checkpoint(length: int, computed: int) -> None:
    """Its last token is always computed, for what it samples."""
    crank, runner = cranked(make(16))
    answered(crank, ask("first", prompt_of(1, length)))
    runner.num_computed = 0
    answered(crank, ask("again", prompt_of(1, length)))
    assert runner.num_computed == computed
    assert crank.stats().prefix_hit_tokens == length - computed


@pytest.mark.parametrize("turns", [1, 2, 6])
def test_a_conversation_computes_what_is_new_and_less_than_a_checkpoint_besides(turns: int) -> None:
    """An answer's tokens are its places, as the runner gives them."""
    crank, runner = cranked(make(64))
    prompt: Prefix = prompt_of(1, 7)
    for turn in range(turns):
        runner.num_computed, told = 0, len(prompt) - 7 * (turn > 0)
        answered(crank, ask(f"turn {turn}", prompt, max_tokens=3))
        new = len(prompt) - told + 2  # of the answer's last token nothing is computed
        assert new <= runner.num_computed < new + EVERY + 1
        prompt = (*prompt, *range(len(prompt), len(prompt) + 3), *prompt_of(turn + 2, 5))[: 64 - 4]


def test_a_fork_goes_on_from_the_last_checkpoint_that_it_shares() -> None:
    crank, runner = cranked(make(32))
    answered(crank, ask("first", prompt_of(1, 40)))
    runner.num_computed = 0
    answered(crank, ask("fork", (*prompt_of(1, 30), *prompt_of(2, 10))))
    assert runner.num_computed == 40 - 24


@pytest.mark.parametrize(("num_slots", "hit"), [(4, 40), (5, 40), (64, 40)])
def test_with_few_slots_the_last_checkpoints_are_left(num_slots: int, hit: int) -> None:
    crank, _ = cranked(make(num_slots, max_num_seqs=1, max_num_batched_tokens=64))
    answered(crank, ask("first", prompt_of(1, 41)))
    answered(crank, ask("again", (*prompt_of(1, 41), 7, 8)))
    assert crank.stats().prefix_hit_tokens == hit


def test_a_long_prompt_pushes_out_its_own_checkpoints_and_not_others() -> None:
    crank, _ = cranked(make(9, num_blocks=64, max_num_seqs=1))
    for group in (1, 2, 3):
        answered(crank, ask(f"agent {group}", prompt_of(group, 17)))
    answered(crank, ask("stranger", prompt_of(9, 62)))
    before = crank.stats().prefix_hit_tokens
    for group in (1, 2, 3):
        answered(crank, ask(f"agent {group} again", prompt_of(group, 20)))
    assert crank.stats().prefix_hit_tokens - before == 3 * 16


def test_a_checkpoint_is_let_go_of_when_the_second_step_is_planned() -> None:
    scheduler = make(16)
    crank, _ = cranked(scheduler)
    answered(crank, ask("first", prompt_of(1, 17)))
    crank.submit(ask("again", prompt_of(1, 17), max_tokens=9), 0)
    found = []
    for _ in range(3):
        crank.turn()
        (state,) = scheduler.running
        found.append(state.lease.state.found != NO_STATE)
    assert found == [True, False, False]
    for _ in drained(crank):
        pass


def test_switched_off_under_way_nothing_is_held_that_nobody_may_find() -> None:
    scheduler = make(16)
    scheduler.submit(ask("a", prompt_of(1, 30), max_tokens=9), 0)
    runner = States()
    first = scheduler.plan(0)
    assert first is not None
    (state,) = scheduler.running
    assert state.lease.state.kept
    scheduler.configure({"enable_prefix_caching": False})
    scheduler.commit(first, runner.run(first), 0)
    second = scheduler.plan(0)
    assert second is not None
    assert state.lease.state.held() == [state.lease.state.own]
    scheduler.commit(second, runner.run(second), 0)
    scheduler.check()


def test_blocks_without_a_checkpoint_are_computed_again() -> None:
    """With as few slots as there may be none is left for a checkpoint."""
    crank, runner = cranked(make(2 + SPARE_STATES - 1, max_num_seqs=1))
    answered(crank, ask("first", prompt_of(1, 40)))
    runner.num_computed = 0
    answered(crank, ask("again", prompt_of(1, 40)))
    assert runner.num_computed == 40
    assert crank.stats().prefix_hit_tokens == 0


def test_checkpoints_used_least_recently_are_given_away_first() -> None:
    cache = KVCache(64, BLOCK, num_state_slots=6)
    assert cache.states is not None
    for group in (1, 2, 1, 3, 4, 5):
        lease, prompt = Lease(), list(prompt_of(group, 17))
        num_found = cache.match(lease, prompt)
        assert cache.reserve(lease, 17)
        row = cache.state_of(lease, num_found, 17 - num_found)
        assert row is not None
        cache.commit(lease, prompt, 17)
        cache.check([lease])
        cache.free(lease)
    found = [group for group in range(1, 6) if cache.match(Lease(), list(prompt_of(group, 17)))]
    assert found == [1, 3, 4, 5]


def test_nobody_is_admitted_without_a_state_and_the_books_say_so() -> None:
    """All that there are belong to those that run."""
    scheduler = make(6, max_num_seqs=8)
    crank, _ = cranked(scheduler)
    for number in range(8):
        crank.submit(ask(f"r{number}", prompt_of(number, 9), max_tokens=4), 0)
    causes = set[Cause | None]()
    while crank.has_work:
        crank.turn()
        scheduler.check()
        causes |= set(scheduler.waiting_for())
    assert Cause.BATCH_SLOTS in causes


def test_a_forgotten_cache_has_no_checkpoints() -> None:
    scheduler = make(16)
    crank, runner = cranked(scheduler)
    answered(crank, ask("first", prompt_of(1, 20)))
    crank.engine.forget_cache()
    assert scheduler.cache.states is not None
    assert scheduler.cache.states.num_kept == 0  # other weights may have made them
    runner.num_computed = 0
    answered(crank, ask("again", prompt_of(1, 20)))
    assert runner.num_computed == 20


def test_without_prefix_caching_no_checkpoint_is_left() -> None:
    scheduler = make(16, enable_prefix_caching=False)
    scheduler.submit(ask("a", prompt_of(1, 30)), 0)
    plan = scheduler.plan(0)
    assert plan is not None
    assert [row.state and row.state.keeps for row in plan.rows] == [()]


@pytest.mark.parametrize("num_slots", [-1, 1, 2])
def test_too_few_slots_for_one_request_are_refused(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=f"num_state_slots is {num_slots}; it must be 0, or above 2"):
        make(num_slots)


def test_models_without_states_name_none() -> None:
    clock = VirtualClock()
    scheduler = make(0)
    crank = Crank(EngineParts(Engine(scheduler), FakeRunner(BLOCK, step_ns=100, clock=clock)), clock)
    crank.submit(ask("a", prompt_of(1, 20)), 0)
    plan = scheduler.plan(0)
    assert plan is not None
    assert [row.state for row in plan.rows] == [None]
