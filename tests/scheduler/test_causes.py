"""Why a request waits in the queue: each nanosecond has a cause, and who is overtaken is told so."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import add, make_scheduler, step, waits

from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import RowResult, StepResult
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.scheduler import Scheduler


def causes(scheduler: Scheduler, name: str, until_ns: int) -> list[tuple[Cause | None, int]]:
    """Of its time in the queue, without what took no time."""
    return [(cause, ns) for stage, cause, ns in waits(scheduler, name, until_ns) if stage is Stage.QUEUE and ns]


def one_slot(policy: str, **changes) -> Scheduler:
    """`first` runs, to be ended by `abort`."""
    scheduler = make_scheduler(policy=policy, max_num_seqs=1, **changes)
    add(scheduler, "first", max_tokens=40)
    step(scheduler, 10)
    return scheduler


def test_an_overtaken_long_prompt_waits_for_the_policy() -> None:
    scheduler = one_slot("shortest_prefill")
    add(scheduler, "long", num_prompt=20, now_ns=16)
    step(scheduler, 20)
    add(scheduler, "short", now_ns=26)
    step(scheduler, 30)  # nobody was overtaken yet: both wait for the slot
    assert scheduler.queue.waiting_for() == {Cause.BATCH_SLOTS: 2}
    scheduler.abort("first", 36)
    step(scheduler, 40)  # by arrival it would have been long's
    step(scheduler, 50)
    assert scheduler.queue.waiting_for() == {Cause.POLICY: 1}
    expected = [(Cause.ENGINE_LOOP, 4), (Cause.BATCH_SLOTS, 20), (Cause.POLICY, 17)]
    assert causes(scheduler, "long", 57) == expected


def test_only_whose_turn_it_was_is_overtaken() -> None:
    """One slot was given away: one request waits for it. The younger one would wait anyway."""
    scheduler = one_slot("shortest_prefill")
    for i, name in enumerate(("long", "longer", "short")):
        add(scheduler, name, num_prompt=(12, 13, 4)[i], now_ns=16 + i)
    scheduler.abort("first", 19)
    step(scheduler, 20)
    assert scheduler.queue.waiting_for() == {Cause.POLICY: 1, Cause.BATCH_SLOTS: 1}
    assert causes(scheduler, "longer", 30)[-1] == (Cause.BATCH_SLOTS, 10)
    assert causes(scheduler, "long", 30)[-1] == (Cause.POLICY, 10)


def test_in_order_of_arrival_nobody_is_overtaken() -> None:
    scheduler = one_slot("fcfs")
    for i in range(5):
        add(scheduler, f"r{i}", now_ns=16 + i, max_tokens=2)
    now_ns = 20
    scheduler.abort("first", now_ns)
    while scheduler.has_requests:
        step(scheduler, now_ns)
        assert Cause.POLICY not in scheduler.queue.waiting_for()
        now_ns += 10


def test_a_turn_that_was_given_back_goes_to_the_next() -> None:
    """The overtaken one goes away: without the policy its slot would be the next one's by now."""
    scheduler = one_slot("shortest_prefill")
    for i, (name, num_prompt) in enumerate((("long", 12), ("longer", 13), ("short", 4))):
        add(scheduler, name, num_prompt, now_ns=16 + i)
    scheduler.abort("first", 19)
    step(scheduler, 20)
    scheduler.abort("long", 26)
    assert scheduler.queue.waiting_for() == {Cause.BATCH_SLOTS: 1}
    step(scheduler, 30)
    assert scheduler.queue.waiting_for() == {Cause.POLICY: 1}
    assert causes(scheduler, "longer", 40)[-2:] == [(Cause.BATCH_SLOTS, 10), (Cause.POLICY, 10)]


def test_one_that_lacks_blocks_says_so_though_it_was_overtaken() -> None:
    scheduler = make_scheduler(policy="priority", num_blocks=16, enable_prefix_caching=False)
    add(scheduler, "holds", num_prompt=16, max_tokens=40)
    step(scheduler, 10)
    add(scheduler, "big", num_prompt=52, now_ns=16, priority=1)
    add(scheduler, "small", now_ns=17, max_tokens=30)
    step(scheduler, 20)
    step(scheduler, 30)
    assert causes(scheduler, "big", 40)[-1][0] is Cause.KV_BLOCKS


def test_a_pause_is_stated_to_the_overtaken_too() -> None:
    scheduler = one_slot("shortest_prefill")
    add(scheduler, "long", num_prompt=20, now_ns=16)
    add(scheduler, "longer", num_prompt=21, now_ns=17)
    add(scheduler, "short", now_ns=18)
    scheduler.abort("first", 19)
    step(scheduler, 20)
    scheduler.configure({"paused": True})
    assert scheduler.plan(30) is None
    assert scheduler.queue.waiting_for() == {Cause.PAUSED: 2}
    scheduler.configure({"paused": False})
    step(scheduler, 40)
    assert causes(scheduler, "long", 50)[-2:] == [(Cause.PAUSED, 10), (Cause.POLICY, 10)]


def turn_by_turn(admitted_or_gone: list[tuple[str, str]], arrived: list[str]) -> set[str]:
    """Who is overtaken, the slow way: a line by arrival, in which each slot that was given takes one turn."""
    line, done, overtaken = list(arrived), set(), set()

    def take_turn() -> None:
        while line:
            name = line.pop(0)
            if name in early:
                early.remove(name)
                return
            if name not in done:
                overtaken.add(name)
                return

    early: set[str] = set()
    for what, name in admitted_or_gone:
        done.add(name)
        if name in overtaken:
            overtaken.remove(name)
            take_turn()
        elif what == "admitted":
            early.add(name)
            take_turn()
    return overtaken


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_wait_has_a_cause_and_the_overtaken_are_those_whose_turn_it_was(data) -> None:
    """Any policy, arrivals between and in steps, aborts: law of the queue's books."""
    policy = data.draw(st.sampled_from(["fcfs", "priority", "shortest_prefill"]))
    scheduler = make_scheduler(policy=policy, max_num_seqs=2, num_blocks=64, starvation_bound_ms=1e6)
    arrived: list[str] = []
    history: list[tuple[str, str]] = []
    books = {}
    now_ns = 0
    for _ in range(data.draw(st.integers(5, 40))):
        now_ns += 10
        if data.draw(st.booleans()):
            name = f"r{len(arrived)}"
            num_prompt, priority = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 2))
            add(scheduler, name, num_prompt, now_ns - data.draw(st.integers(0, 8)), 3, priority=priority)
            arrived.append(name)
            books[name] = scheduler._states[name].account
        waiting = [state.request_id for state in scheduler.queue]
        if waiting and data.draw(st.integers(0, 4)) == 0:
            gone = data.draw(st.sampled_from(waiting))
            scheduler.abort(gone, now_ns)
            history.append(("gone", gone))
        plan = scheduler.plan(now_ns)
        if plan is not None:
            history += [("admitted", admitted.request_id) for admitted in plan.admitted]
            rows = tuple(RowResult(row.request_id, (7,) if row.num_samples else ()) for row in plan.rows)
            scheduler.commit(plan, StepResult(plan.step_id, rows), now_ns + 5)
        scheduler.check()
        overtaken = {state.request_id for state in scheduler.queue if state.is_overtaken}
        assert overtaken == turn_by_turn(history, arrived)
        if policy == "fcfs":
            assert not overtaken
    for state in list(scheduler.queue):
        scheduler.abort(state.request_id, now_ns)
    for account in books.values():
        assert all(mark.cause is not None for mark in account.marks if mark.stage is Stage.QUEUE)


def test_a_prompt_that_gets_no_tokens_waits_for_the_budget() -> None:
    """Two half-computed prompts, of which one takes all that a step may compute."""
    scheduler = make_scheduler(batching="static", max_num_batched_tokens=8)
    add(scheduler, "a", num_prompt=20)
    add(scheduler, "c", num_prompt=20, priority=-1)
    step(scheduler, 10)
    assert waits(scheduler, "c", 15)[-1] == (Stage.PREFILL_STALL, Cause.TOKEN_BUDGET, 5)  # admitted without a row
    scheduler.configure({"policy": "priority"})
    step(scheduler, 20)
    assert waits(scheduler, "a", 25)[-1] == (Stage.PREFILL_STALL, Cause.TOKEN_BUDGET, 5)  # it had one before


def test_an_admission_leaves_blocks_for_those_that_run() -> None:
    """One in a hundred, and one at least: else the next token would preempt somebody at once."""
    small = {"num_blocks": 16, "max_num_batched_tokens": 64}
    large = {"num_blocks": 400, "max_model_len": 1600, "max_num_batched_tokens": 1600}
    for settings_of, num_next, is_admitted in (
        (small, 15, False),
        (small, 14, True),
        (large, 396, False),
        (large, 395, True),
    ):
        scheduler = make_scheduler(enable_prefix_caching=False, **settings_of)
        num_prompt = 4 * num_next
        add(scheduler, "runs", num_prompt=3)
        step(scheduler, 10)
        add(scheduler, "next", num_prompt=num_prompt, now_ns=16)
        plan, _ = step(scheduler, 20)
        assert bool(plan.admitted) is is_admitted
        assert scheduler.queue.waiting_for() == ({} if is_admitted else {Cause.KV_BLOCKS: 1})


def test_an_empty_engine_gives_all_its_blocks_to_one() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_batched_tokens=64)
    add(scheduler, "all", num_prompt=63)
    plan, _ = step(scheduler, 10)
    assert plan.admitted


def test_what_another_has_not_computed_yet_is_no_prefix_of_mine() -> None:
    """Its fourth token is known, and computed a step later: only then is the block of four to be found."""
    scheduler = make_scheduler()
    add(scheduler, "a", num_prompt=3)
    start = scheduler._states["a"].token_ids[0]
    step(scheduler, 10)  # three computed, the fourth (7) sampled
    known = (start, start + 1, start + 2, 7, 50, 51)
    for name, now_ns, num_cached in (("b", 20, 0), ("c", 30, 4)):
        sampling = SamplingParams(max_tokens=2, seed=0)
        scheduler.submit(
            Request(request_id=name, prompt_token_ids=known, sampling=sampling, submitted_ns=now_ns), now_ns
        )
        state = scheduler._states[name]
        step(scheduler, now_ns)
        assert state.num_cached_tokens == num_cached


def test_a_block_of_a_prompt_is_found_once_its_last_token_is_computed() -> None:
    """Seven of twelve are computed: one whole block of four, and three tokens of the next."""
    scheduler = make_scheduler(max_num_batched_tokens=7)
    prompt = tuple(range(12))
    sampling = SamplingParams(max_tokens=2, seed=0)
    for name, now_ns in (("a", 0), ("b", 16)):
        asked = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=now_ns)
        scheduler.submit(asked, now_ns)
        step(scheduler, now_ns + 10)
    assert scheduler._states["b"].num_cached_tokens == 4


def test_a_deadline_ends_a_request_at_its_instant() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", deadline_ns=100)
    assert scheduler.expire(99) == []
    (output,) = scheduler.expire(100)
    assert output.finish_reason is FinishReason.DEADLINE
