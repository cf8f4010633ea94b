"""Books of an engine that is not ours: whatever its scheduler decides, accounts are whole and steps sum."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.attach.engine_books import DecidedPlan, EngineBooks
from splittime.attach.request_book import AskedRequest
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps


def plan(*rows, stalled=(), waiting=(), hits=(), victims=(), drafts=(), rest=None) -> DecidedPlan:
    """rows: (request id, start, count). One token and a start above 0 is a decode here."""
    decodes = sum(count for _, start, count in rows if count == 1 and start)
    read = sum(start + count for _, start, count in rows)
    counts = (1, len(rows), len(waiting))
    return DecidedPlan(tuple(rows), decodes, read, stalled, waiting, hits, victims, *counts, drafts, rest)


class Engine:
    """An engine on a clock of its own: every call takes one tick."""

    def __init__(self) -> None:
        self.books, self._ticks = EngineBooks(), itertools.count(100, 10)
        self.records, self.ended = [], []

    def now(self) -> int:
        return next(self._ticks)

    def receive(self, name: str, prompt: int = 4) -> None:
        received_ns = self.now()
        self.books.receive(AskedRequest(name, 0, prompt, 16), received_ns, self.now())

    def step(self, planned: DecidedPlan, sampled=(), ends=()) -> None:
        flight = self.books.begin(planned, self.now(), self.now())
        assert flight is not None
        ready_ns = self.now()
        self.books.commit(flight, sampled, ready_ns)
        for name in ends:
            self.end(name, "length", ready_ns)
        self.records.append(self.books.end_step(flight, {}, ready_ns, self.now()))

    def end(self, name: str, reason: str, at_ns: int | None = None) -> None:
        book = self.books.end(name, reason, self.now() if at_ns is None else at_ns)
        if book is not None:
            self.ended.append(book)


def stages(book) -> list[tuple[str, str | None]]:
    return [(mark.stage.value, mark.cause.value if mark.cause else None) for mark in book.marks]


def sums(book) -> Account:
    account = Account(book.request_id, book.marks[0].begin_ns, book.marks[0].stage)
    account.extend(book.marks[1:])
    account.enter(Stage.DELIVER, book.ended_ns)
    account.close(book.ended_ns)
    account.verify()
    return account


def test_a_request_that_waits_for_a_slot_and_is_served():
    engine = Engine()
    engine.receive("a")
    engine.receive("b")
    engine.step(plan(("a", 0, 4), waiting=[("b", Cause.BATCH_SLOTS)], hits=[("a", 0)]), [("a", 1)])
    engine.step(plan(("a", 4, 1), waiting=[("b", Cause.BATCH_SLOTS)]), [("a", 1)], ends=["a"])
    engine.step(plan(("b", 0, 3), hits=[("b", 2)]), [])
    engine.step(plan(("b", 3, 1)), [("b", 1)], ends=["b"])
    a, b = engine.ended
    assert stages(a) == [("queue", "engine_loop"), ("prefill", None), ("decode", None)]
    assert stages(b) == [("queue", "engine_loop"), ("queue", "batch_slots"), ("prefill", None), ("decode", None)]
    assert (a.token_steps, b.token_steps) == ([1, 2], [4])
    assert (a.cached_tokens, b.cached_tokens) == (0, 2)
    assert len(a.token_ready_ns) == 2
    for book in engine.ended:
        sums(book)
    verify_steps(engine.records)


def test_one_that_comes_while_a_step_runs_waits_for_its_end():
    engine = Engine()
    engine.receive("a")
    flight = engine.books.begin(plan(("a", 0, 4)), engine.now(), engine.now())
    received_ns, ready_ns, end_ns = engine.now(), engine.now(), engine.now()
    engine.books.commit(flight, [("a", 1)], ready_ns)
    engine.books.end_step(flight, {}, ready_ns, end_ns)
    engine.books.receive(AskedRequest("b", 0, 4, 16), received_ns, engine.now())
    engine.end("b", "abort")
    assert stages(engine.ended[0]) == [("queue", "step_in_flight")]
    assert engine.ended[0].marks[0].begin_ns == received_ns


def test_what_a_preemption_threw_away_is_recomputed():
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)])
    engine.step(plan(("a", 4, 1)), [("a", 1)])
    engine.books.preempt("a", num_computed=5)
    engine.receive("b")
    engine.step(plan(("b", 0, 4), waiting=[("a", Cause.KV_BLOCKS)], victims=("a",)), [("b", 1)], ends=["b"])
    engine.step(plan(("a", 0, 3)), [])
    engine.step(plan(("a", 3, 3)), [("a", 1)])
    engine.end("a", "length")
    book = engine.ended[-1]
    named = [name for name, _ in stages(book)]
    assert named == ["queue", "prefill", "decode", "preempted", "recompute", "decode"]
    assert ("preempted", "kv_blocks") in stages(book)
    assert book.num_preemptions == 1
    assert engine.records[2].victims == ("a",)


def test_who_is_preempted_and_not_first_waits_for_what_the_rest_waits_for():
    engine = Engine()
    for name in "abc":
        engine.receive(name)
    engine.step(plan(*((name, 0, 4) for name in "abc")), [(name, 1) for name in "abc"])
    for name in "bc":
        engine.books.preempt(name, num_computed=4)
    engine.step(plan(("a", 4, 1), waiting=[("c", Cause.KV_BLOCKS)], rest=Cause.POLICY, victims=("b", "c")), [("a", 1)])
    assert engine.books.waiting_for() == {"kv_blocks": 1, "policy": 1}
    engine.step(plan(("c", 0, 4), waiting=[("b", Cause.KV_BLOCKS)], rest=Cause.POLICY), [("c", 1)])
    engine.end("b", "abort")
    assert stages(engine.ended[0])[-3:] == [("decode", None), ("preempted", "policy"), ("preempted", "kv_blocks")]
    sums(engine.ended[0])


def test_who_is_preempted_and_has_a_row_at_once_computes_again():
    """No plan says that it waited."""
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)])
    engine.books.preempt("a", num_computed=4)
    engine.step(plan(("a", 0, 4)), [("a", 1)])
    assert engine.books.waiting_for() == {}
    engine.step(plan(("a", 4, 1), rest=Cause.POLICY), [("a", 1)], ends=["a"])
    assert [name for name, _ in stages(engine.ended[0])] == ["queue", "prefill", "decode", "recompute", "decode"]


def test_who_gets_no_row_stalls_where_it_was():
    engine = Engine()
    engine.receive("a")
    engine.receive("b", prompt=6)
    engine.step(plan(("a", 0, 4), ("b", 0, 2)), [("a", 1)])
    engine.step(plan(("a", 4, 1), stalled=[("b", Cause.TOKEN_BUDGET)]), [("a", 1)])
    engine.step(plan(("b", 2, 4), stalled=[("a", Cause.TOKEN_BUDGET)]), [("b", 1)])
    engine.step(plan(("a", 5, 1), ("b", 6, 1)), [("a", 1), ("b", 1)], ends=["a", "b"])
    a, b = engine.ended
    assert ("decode_stall", "token_budget") in stages(a)
    assert ("prefill_stall", "token_budget") in stages(b)
    assert stages(a)[-1] == stages(b)[-1] == ("decode", None)


def two_steps_at_once(books):
    """Two steps, the second of which is planned while the first runs. Their results are there at 300 and 400."""
    books.receive(AskedRequest("a", 0, 4, 9), 100, 100)
    first = books.begin(plan(("a", 0, 4)), 200, 210)
    second = books.begin(plan(("a", 4, 1)), 220, 230)
    books.commit(first, [("a", 1)], 300)
    one = books.end_step(first, {}, 300, 310)
    books.commit(second, [("a", 1)], 400)
    two = books.end_step(second, {}, 400, 410)
    verify_steps([one, two])
    assert [one.hidden_ns, two.hidden_ns, two.plan_ns, two.host_gap_ns] == [20, 0, 0, 0]
    return one, two


def test_a_step_planned_beside_another_begins_where_that_ended():
    one, two = two_steps_at_once(EngineBooks())
    assert (one.begin_ns, one.end_ns, two.begin_ns, two.end_ns) == (200, 310, 310, 410)
    assert one.ahead_ns is None


def test_who_is_preempted_while_its_token_is_computed_goes_on_waiting():
    books = EngineBooks(plans_ahead=True)
    for name in ("a", "b"):
        books.receive(AskedRequest(name, 0, 4, 9), 100, 100)
    first = books.begin(plan(("a", 0, 4), ("b", 0, 4)), 200, 210)
    books.preempt("b", 4)
    second = books.begin(plan(("a", 4, 1), waiting=[("b", Cause.KV_BLOCKS)]), 220, 230)
    books.commit(first, [("a", 1), ("b", 1)], 300)
    books.end_step(first, {}, 300, 310)
    assert books.books["a"].account.stage is Stage.DECODE
    assert (books.books["b"].account.stage, books.books["b"].account.cause) == (Stage.PREEMPTED, Cause.KV_BLOCKS)
    assert books.books["b"].token_steps == [second.step_id - 1]


def test_a_step_of_an_engine_that_plans_ahead_ends_with_its_result():
    one, two = two_steps_at_once(EngineBooks(plans_ahead=True))
    assert (one.begin_ns, one.end_ns, two.begin_ns, two.end_ns) == (200, 300, 300, 400)
    assert (one.ahead_ns, one.commit_ns, two.ahead_ns) == (20, 0, 0)


def test_time_without_requests_is_idle():
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)], ends=["a"])
    for _ in range(50):
        engine.now()
    engine.receive("b")
    engine.step(plan(("b", 0, 4)), [("b", 1)], ends=["b"])
    assert engine.records[1].idle_ns > 500
    verify_steps(engine.records)


def test_a_plan_without_rows_is_no_work():
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)], ends=["a"])
    assert engine.books.begin(plan(), engine.now(), engine.now()) is None
    for _ in range(50):
        engine.now()
    engine.receive("b")
    engine.step(plan(("b", 0, 4)), [("b", 1)], ends=["b"])
    assert engine.records[1].idle_ns > 500
    assert engine.records[1].host_gap_ns < 50


@pytest.mark.parametrize("pause", ["all", "new"])
def test_a_pause_that_begins_while_a_step_runs_is_idle_from_its_end_on(pause):
    engine = Engine()
    engine.receive("a")
    flight = engine.books.begin(plan(("a", 0, 4)), engine.now(), engine.now())
    engine.receive("late")
    engine.books.pause(pause, [], engine.now())
    ready_ns = engine.now()
    engine.books.commit(flight, [("a", 1)], ready_ns)
    if pause == "new":
        engine.end("a", "length", ready_ns)
    engine.records.append(engine.books.end_step(flight, {}, ready_ns, engine.now()))
    if pause == "all":
        assert stages(engine.books.books["a"].account)[-1] == ("decode_stall", "paused")
    for _ in range(50):
        engine.now()
    engine.books.resume()
    engine.step(plan(("late", 0, 4)), [("late", 1)])
    assert engine.records[1].idle_ns > 500
    assert engine.records[1].host_gap_ns < 50
    verify_steps(engine.records)


def test_who_is_in_two_steps_stalls_by_a_pause_once_the_second_has_ended():
    """Where steps are planned ahead."""
    engine = Engine()
    engine.receive("a")
    first = engine.books.begin(plan(("a", 0, 4)), engine.now(), engine.now())
    second = engine.books.begin(plan(("a", 4, 1)), engine.now(), engine.now())
    engine.books.pause("all", [], engine.now())
    for flight, stage in ((first, ("decode", None)), (second, ("decode_stall", "paused"))):
        ready_ns = engine.now()
        engine.books.commit(flight, [("a", 1)], ready_ns)
        engine.books.end_step(flight, {}, ready_ns, engine.now())
        assert stages(engine.books.books["a"].account)[-1] == stage


def test_a_pause_of_the_waiting_leaves_who_runs_at_work():
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)])
    engine.receive("late")
    engine.books.pause("new", [], engine.now())
    engine.step(plan(("a", 4, 1)), [("a", 1)])
    engine.now()
    engine.step(plan(("a", 5, 1)), [("a", 1)])
    assert (engine.records[2].idle_ns, engine.records[2].host_gap_ns > 0) == (0, True)


def test_who_waits_is_counted_by_cause():
    engine = Engine()
    for name in "abcd":
        engine.receive(name)
    assert engine.books.waiting_for() == {"engine_loop": 4}
    engine.step(plan(("a", 0, 4), waiting=[("b", Cause.GRAMMAR)], rest=Cause.BATCH_SLOTS), [("a", 1)])
    assert engine.books.waiting_for() == {"batch_slots": 2, "grammar": 1}
    engine.receive("e")
    assert engine.books.waiting_for() == {"batch_slots": 2, "grammar": 1, "engine_loop": 1}
    engine.books.pause("new", [], engine.now())
    assert engine.books.waiting_for() == {"paused": 4}
    engine.books.resume()
    engine.step(plan(("a", 4, 1), ("b", 0, 4), waiting=[("c", None)], rest=Cause.POLICY), [("a", 1), ("b", 1)])
    assert engine.books.waiting_for() == {"unknown": 1, "policy": 2}


def test_drafts_are_counted_by_row():
    engine = Engine()
    engine.receive("a")
    engine.step(plan(("a", 0, 4)), [("a", 1)])
    flight = engine.books.begin(plan(("a", 4, 4), drafts=(("a", 3),)), engine.now(), engine.now())
    ready_ns = engine.now()
    engine.books.commit(flight, [("a", 3)], ready_ns)
    record = engine.books.end_step(flight, {"a": 2}, ready_ns, engine.now())
    assert record.verified == (("a", 3, 2),)
    verify_steps([record])
    engine.end("a", "stop")
    assert engine.ended[0].token_steps == [1, 2, 2, 2]


def test_what_is_not_known_is_nobodys_fault():
    engine = Engine()
    assert engine.books.end("nobody", "abort", 100) is None
    engine.books.preempt("nobody", 3)
    assert engine.books.begin(plan(waiting=[("nobody", Cause.PAUSED)]), 100, 110) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_is_decided_the_books_sum(data):
    """Random arrivals, plans, preemptions and aborts: one closed book each, contiguous; steps and gaps sum."""
    engine, known, computed = Engine(), [], {}
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["receive", "step", "step", "preempt", "abort"]))
        if action == "receive":
            known.append(f"r{number}")
            computed[known[-1]] = 0
            engine.receive(known[-1])
        elif not known:
            continue
        elif action == "step":
            in_it = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
            rest = [name for name in known if name not in in_it]
            rows = [(name, computed[name], data.draw(st.integers(1, 3))) for name in in_it]
            causes = [(name, data.draw(st.sampled_from([Cause.KV_BLOCKS, Cause.POLICY, None]))) for name in rest]
            begun = [each for each in causes if engine.books.books[each[0]].token_steps]
            ends = data.draw(st.lists(st.sampled_from(in_it), unique=True))
            engine.step(
                plan(*rows, stalled=begun, waiting=[each for each in causes if each not in begun]),
                [(name, 1) for name in in_it if data.draw(st.booleans())],
                ends,
            )
            computed |= {name: start + count for name, start, count in rows}
            known = [name for name in known if name not in ends]
        elif action == "preempt":
            name = data.draw(st.sampled_from(known))
            engine.books.preempt(name, computed[name])
            computed[name] = 0
        else:
            engine.end(known.pop(data.draw(st.integers(0, len(known) - 1))), "abort")
    for name in known:
        engine.end(name, "abort")
    assert sorted(book.request_id for book in engine.ended) == sorted(computed)
    for book in engine.ended:
        sums(book)
    verify_steps(engine.records)
    assert engine.books.books == {}


@pytest.mark.parametrize("length", [3, 200])
def test_a_queue_that_is_told_the_same_has_one_mark_for_it(length):
    engine = Engine()
    names = [f"w{number}" for number in range(length)]
    engine.receive("a")
    for name in names:
        engine.receive(name)
    told = [(name, Cause.BATCH_SLOTS) for name in names]
    for start in range(4):
        engine.step(plan(("a", start, 1), waiting=list(told)), [("a", 1)])
    engine.end(names[-1], "abort")
    assert stages(engine.ended[0]) == [("queue", "engine_loop"), ("queue", "batch_slots")]
