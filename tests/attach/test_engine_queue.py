"""Who waits in an engine that is not ours: as if each had been told at each plan, without telling each."""

import pytest
from counted_calls import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.attach.engine_books import DecidedPlan, EngineBooks, EngineQueue
from splittime.attach.request_book import AskedRequest, EngineBook
from splittime.ledger.account import Mark
from splittime.ledger.stages import Cause, Stage

CAUSES = (Cause.BATCH_SLOTS, Cause.TOKEN_BUDGET, None)


def book_of(name: str, at_ns: int) -> EngineBook:
    return EngineBook(AskedRequest(name, 0, 4, 9), name, at_ns, Cause.ENGINE_LOOP)


def changes(told: list[tuple[Cause | None, int]]) -> list[Mark]:
    """Returns the marks of one that was told these causes at these instants."""
    kept = [each for i, each in enumerate(told) if not i or told[i - 1][0] is not each[0]]
    return [Mark(Stage.QUEUE, cause, at_ns) for cause, at_ns in kept]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_learns_what_it_would_have_been_told(data):
    """Requests come, leave, and are told causes of their own or the rest's; beside it a plain list for each."""
    queue, open_books, told = EngineQueue(), {}, {}
    for now_ns in range(100, 100 + data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["come", "come", "leave", "plan", "plan", "pause"]))
        if action == "come":
            book = book_of(str(now_ns), now_ns)
            open_books[book], told[book] = None, [(Cause.ENGINE_LOOP, now_ns)]
            queue.join(book)
        elif action == "leave" and open_books:
            book = data.draw(st.sampled_from(list(open_books)))
            queue.leave(book)
            queue.leave(book)
            del open_books[book]
        elif action == "pause":
            queue.pause(now_ns)
            for book in open_books:
                told[book].append((Cause.PAUSED, now_ns))
        elif action == "plan":
            alone = {book: data.draw(st.sampled_from(CAUSES)) for book in open_books if data.draw(st.booleans())}
            rest = data.draw(st.sampled_from(CAUSES))
            queue.wait(alone.items(), rest, now_ns)
            for book in open_books:
                told[book].append((alone.get(book, rest), now_ns))
        assert len(queue) == len(open_books)
        latest = [told[book][-1][0] for book in open_books]
        assert queue.waiting_for() == {cause: latest.count(cause) for cause in latest}
    for book in open_books:
        queue.leave(book)
    for book, heard in told.items():
        assert book.account.marks == changes(heard)
        book.account.close(1_000)
        book.account.verify()


def plan_of(cause: Cause, first: str, at: int) -> DecidedPlan:
    alone = [(first, Cause.KV_BLOCKS)]
    return DecidedPlan((("runs", 4 + at, 1),), 1, 5, (), alone, (), (), 1, 1, 1, (), cause)


def crowded(length: int) -> EngineBooks:
    books = EngineBooks()
    for name in ("runs", *(f"w{number}" for number in range(length))):
        books.receive(AskedRequest(name, 0, 4, 9), 100, 100)
    books.commit(books.begin(plan_of(Cause.POLICY, "w0", 0), 200, 210), [("runs", 1)], 300)
    return books


def turn(books: EngineBooks, at: int) -> None:
    """A plan with another cause and another first; one comes, one leaves, and those who wait are counted."""
    name, now_ns = f"late{at}", 1000 * (at + 1)
    books.receive(AskedRequest(name, 0, 4, 9), now_ns, now_ns)
    flight = books.begin(plan_of(CAUSES[at % 2], f"w{at % 3}", at), now_ns + 10, now_ns + 20)
    books.commit(flight, [("runs", 1)], now_ns + 30)
    books.end_step(flight, {}, now_ns + 30, now_ns + 40)
    books.end(name, "abort", now_ns + 50)
    books.waiting_for()


def test_a_plan_costs_the_same_however_many_wait():
    short, long = crowded(100), crowded(10_000)
    calls = [[calls_of(lambda at=at, books=books: turn(books, at)) for at in range(20)] for books in (short, long)]
    assert sum(calls[1]) < 1.2 * sum(calls[0])  # a collection of garbage calls something too
    marks = [len(book.account.marks) for book in long.books.values()]
    assert sum(marks) < 2 * 10_000 + 200  # 20 changes of the cause, of which nobody has heard yet


@pytest.mark.parametrize("length", [3, 200])
def test_who_leaves_learns_of_every_change(length):
    books = crowded(length)
    for at in range(6):
        turn(books, at)
    ended = books.end(f"w{length - 1}" if length > 3 else "w2", "abort", 10_000)
    own = [mark for mark in ended.marks if mark.cause in CAUSES]
    assert len(own) >= 4
    assert [mark.begin_ns for mark in ended.marks] == sorted({mark.begin_ns for mark in ended.marks})
