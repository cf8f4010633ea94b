"""The queue of the waiting on its own: the log of causes against a plain list, who is next, and what it keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_causes import turn_by_turn
from test_scheduler import add, make_scheduler, step

from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.queue import WaitingQueue
from splittime.scheduler.state import CauseLog, RequestState

CAUSES = (Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET, Cause.POLICY)


def waiting_state(name: str, arrival: int = 1, key: float = 0.0) -> RequestState:
    sampling = SamplingParams(max_tokens=1, seed=0)
    request = Request(request_id=name, prompt_token_ids=(1,), sampling=sampling, submitted_ns=0)
    return RequestState(request, arrival, (1, key, arrival), 64)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=5, max_size=60))
def test_a_reader_copies_what_was_said_while_it_read_and_no_more_is_kept(script: list[tuple[int, int]]) -> None:
    """Five come, go and come again; a plain list says what each of them must find. What nobody will read is dropped,
    but for the cause of now."""
    log, states = CauseLog(), [waiting_state(f"r{i}") for i in range(5)]
    said = [(0, CAUSES[0])]
    log.state_cause(0, CAUSES[0])
    joined: dict[int, int] = {}  # reader -> the entry that was the latest then
    expected: list[list[tuple[Cause, int]]] = [[] for _ in states]
    for now_ns, (who, cause) in enumerate(script, 1):
        if who == len(states):
            if said[-1][1] is not CAUSES[cause]:
                said.append((now_ns, CAUSES[cause]))
            log.state_cause(now_ns, CAUSES[cause])
        elif who in joined:
            expected[who] += [(told, since_ns) for since_ns, told in said[joined.pop(who) + 1 :]]
            log.leave(states[who])
        else:
            joined[who] = len(said) - 1
            expected[who].append((said[-1][1], now_ns))
            log.join(states[who], now_ns)
        assert log.cause is said[-1][1]
        assert log.num_readers == len(joined)
        assert len(log._entries) <= len(said) - min(joined.values(), default=len(said) - 1)
        assert len(log._readers) <= now_ns if joined else not log._readers
    for who in list(joined):
        expected[who] += [(told, since_ns) for since_ns, told in said[joined[who] + 1 :]]
        log.leave(states[who])
    for state, marks in zip(states, expected, strict=True):
        changes = [mark for i, mark in enumerate(marks) if not i or marks[i - 1][0] is not mark[0]]
        assert [(mark.cause, mark.begin_ns) for mark in state.account.marks[1:]] == changes


def test_one_that_nobody_admits_keeps_nobody_who_left() -> None:
    """Where a policy lets others pass it for ever, as vLLM's priorities do."""
    log, starved = CauseLog(), waiting_state("starved")
    log.state_cause(0, CAUSES[0])
    log.join(starved, 0)
    for now_ns in range(1, 5_000):
        state = waiting_state(f"r{now_ns}")
        log.state_cause(now_ns, CAUSES[now_ns % 2])
        log.join(state, now_ns)
        log.leave(state)
    assert (log.num_readers, len(log._readers) < 100) == (1, True)
    log.leave(starved)
    assert len(starved.account.marks) == 5_001
    assert not log._readers


def test_overdue_is_who_has_waited_longer_than_the_bound_and_not_who_has_waited_so_long() -> None:
    for waited_ns, first in ((1_000, "loved"), (1_001, "unloved")):
        scheduler = make_scheduler(policy="priority", max_num_seqs=1, starvation_bound_ms=0.001)
        add(scheduler, "unloved", priority=5, now_ns=70_000)
        add(scheduler, "loved", priority=-5, now_ns=70_500)
        plan, _ = step(scheduler, 70_000 + waited_ns)
        assert [admitted.request_id for admitted in plan.admitted] == [first]


def test_of_the_overdue_the_longest_wait_goes_first_though_another_came_earlier() -> None:
    """A request that was preempted begins to wait anew."""
    scheduler = make_scheduler(policy="priority", num_blocks=16, enable_prefix_caching=False)
    scheduler.configure({"starvation_bound_ms": 0.01})
    add(scheduler, "a", num_prompt=16, max_tokens=40, priority=-2)
    add(scheduler, "b", num_prompt=16, max_tokens=40, priority=3)
    now_ns = 0
    while not scheduler.victims:
        now_ns += 10
        if now_ns == 100:
            add(scheduler, "c", num_prompt=40, priority=9, now_ns=now_ns, max_tokens=2)
        step(scheduler, now_ns)
    assert scheduler.victims == ["b"]
    scheduler.abort("a", now_ns + 5)
    plan, _ = step(scheduler, now_ns + 50_000)
    assert plan.admitted[0].request_id == "c"


def test_one_that_is_overtaken_while_it_waits_is_told_so_though_it_is_not_next() -> None:
    scheduler = make_scheduler(policy="shortest_prefill", max_num_seqs=1)
    add(scheduler, "first", max_tokens=40)
    step(scheduler, 10)
    for name, num_prompt in (("long", 20), ("mid", 12), ("short", 4), ("shorter", 3)):
        add(scheduler, name, num_prompt=num_prompt, now_ns=16)
    step(scheduler, 20)
    assert scheduler.queue.waiting_for() == {Cause.BATCH_SLOTS: 4}
    scheduler.abort("first", 26)
    step(scheduler, 30)
    assert scheduler.queue.waiting_for() == {Cause.BATCH_SLOTS: 2, Cause.POLICY: 1}
    scheduler.abort("mid", 36)
    step(scheduler, 40)
    assert scheduler.queue.waiting_for() == {Cause.BATCH_SLOTS: 1, Cause.POLICY: 1}
    long = scheduler._states["long"]
    scheduler.abort("long", 47)
    found = [(i.cause, i.duration_ns) for i in long.account.intervals() if i.stage is Stage.QUEUE and i.duration_ns]
    assert found == [(Cause.ENGINE_LOOP, 4), (Cause.BATCH_SLOTS, 10), (Cause.POLICY, 17)]


FEW = 2
CROWDS = st.one_of(
    st.tuples(st.just("come"), st.integers(1, 40), st.integers(0, 10_000)),
    st.tuples(st.just("admit"), st.integers(1, 10), st.just(0)),
    st.tuples(st.just("go"), st.integers(1, 40), st.integers(0, 10_000)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CROWDS, min_size=5, max_size=30))
def test_crowds_come_and_go_and_the_queue_knows_whose_turn_it_was(script: list[tuple[str, int, int]]) -> None:
    """In any order of rank: who is next and who is overtaken is what a slow count says, and the dead are swept out
    (here as soon as they are the most)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splittime.scheduler.queue.SWEEP_FROM", FEW)
        crowd(script)


def crowd(script: list[tuple[str, int, int]]) -> None:
    queue = WaitingQueue()
    here: dict[str, RequestState] = {}
    arrived: list[str] = []
    history: list[tuple[str, str]] = []
    for what, count, seed in script:
        for i in range(count):
            if what == "come":
                name = f"r{len(arrived)}"
                here[name] = waiting_state(name, len(arrived), float((seed + i * 7919) % 13))
                arrived.append(name)
                queue.push(here[name], len(arrived))
                continue
            best = queue.peek(0, float("inf"))
            assert best is min(here.values(), key=lambda state: state.rank, default=None)
            if best is None:
                break
            name = best.request_id if what == "admit" else sorted(here)[(seed + i * 7919) % len(here)]
            history.append(("admitted" if what == "admit" else "gone", name))
            queue.leave(here.pop(name), is_admitted=what == "admit")
            kept = 2 * len(here) + FEW
            for line in queue._lines.values():
                assert max(line.by_rank.num_kept, line.by_age.num_kept) <= kept
            assert bool(queue._lines) == bool(here)
            assert queue._arrivals._order.num_kept <= kept + 2 * len(queue._arrivals._early)
        queue.check()
        assert {name for name, state in here.items() if state.is_overtaken} == turn_by_turn(history, arrived)


def test_who_was_fresh_or_overtaken_in_one_plan_is_not_kept_for_the_next() -> None:
    """Neither where all are admitted at once, so that nobody is told to wait, nor where some always wait."""
    for max_num_seqs in (2, 1):
        scheduler = make_scheduler(policy="priority", max_num_seqs=max_num_seqs)
        for i in range(30):
            for name, priority in ((f"low{i}", 1), (f"high{i}", 0)):
                add(scheduler, name, now_ns=10 * i, max_tokens=1, priority=priority)
            step(scheduler, 10 * i + 1)
            assert (scheduler.queue._fresh, scheduler.queue._overtaken) == ({}, [])
        assert scheduler.num_waiting == (0 if max_num_seqs == 2 else 30)
