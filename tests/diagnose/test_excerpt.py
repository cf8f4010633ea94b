"""The excerpt of the books that is replayed: the latest requests, from where the fewest were in flight."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.diagnose import excerpt as excerpts
from splittime.diagnose.books import Books
from splittime.diagnose.excerpt import latest_excerpt
from splittime.ledger.account import ClosedAccount


def pairs(count: int) -> list[Case]:
    """Two at a time, the second before the first has ended; then nobody for a while."""
    return [Case(1000 * (number // 2) + 20 * (number % 2), ids(30, number), 30) for number in range(count)]


@pytest.fixture(scope="module")
def books() -> Books:
    return Ward().run(*pairs(60))


def test_all_of_short_books_is_replayed(books: Books) -> None:
    excerpt = latest_excerpt(books)
    assert (list(excerpt.recorded.accounts), list(excerpt.recorded.steps)) == (list(books.accounts), list(books.steps))
    assert excerpt.num_open == 0


def test_it_begins_where_nobody_was_in_flight(books: Books, monkeypatch) -> None:
    monkeypatch.setattr(excerpts, "MAX_REQUESTS", 21)  # the latest 21 begin in the middle of a pair
    excerpt = latest_excerpt(books)
    assert (len(excerpt.recorded.accounts), excerpt.num_open) == (20, 0)
    begin_ns = min(account.start_ns for account in excerpt.recorded.accounts)
    assert excerpt.recorded.steps[0].end_ns > begin_ns
    assert excerpt.recorded.steps[-1] == books.steps[-1]
    assert [a.end_ns for a in excerpt.recorded.accounts] == sorted(a.end_ns for a in excerpt.recorded.accounts)


def test_it_has_no_more_steps_than_may_be(books: Books, monkeypatch) -> None:
    monkeypatch.setattr(excerpts, "MAX_STEPS", len(books.steps) // 3)
    excerpt = latest_excerpt(books)
    assert len(excerpt.recorded.steps) <= len(books.steps) // 3
    assert 10 <= len(excerpt.recorded.accounts) <= 20


@pytest.mark.parametrize("part", [0.5, 0.8])
def test_those_who_wait_in_the_latest_steps_are_replayed_though_they_came_before(monkeypatch, part) -> None:
    """One slot, and a queue that all have joined before half of the steps are done."""
    books = Ward(settings={"max_num_seqs": 1}).run(*[Case(40 * number, ids(20, number), 20) for number in range(60)])
    monkeypatch.setattr(excerpts, "MAX_STEPS", int(len(books.steps) * part))
    excerpt = latest_excerpt(books)
    assert (len(excerpt.recorded.accounts), excerpt.num_open) == (60, 0)


def test_those_in_flight_at_a_busy_begin_are_counted(monkeypatch) -> None:
    books = Ward(settings={"max_num_seqs": 2}).run(*[Case(number, ids(20, number), 20) for number in range(40)])
    monkeypatch.setattr(excerpts, "MAX_REQUESTS", 20)
    excerpt = latest_excerpt(books)
    begin_ns = min(account.start_ns for account in excerpt.recorded.accounts)
    in_flight = [a for a in books.accounts if a.start_ns < begin_ns < a.end_ns]
    assert excerpt.num_open == len(in_flight) > 0


def test_books_without_steps_facts_or_requests_have_none(books: Books) -> None:
    for missing in ({"steps": ()}, {"facts": None}, {"accounts": ()}):
        assert latest_excerpt(msgspec.structs.replace(books, **missing)) is None


@given(st.integers(1, 60), st.integers(0, 3))
def test_it_is_the_end_of_the_arrivals_and_its_begin_is_the_quietest(most: int, seed: int) -> None:
    books = at(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(excerpts, "MAX_REQUESTS", most)
        excerpt = latest_excerpt(books)
    by_start = sorted(books.accounts, key=lambda account: account.start_ns)
    kept = sorted(excerpt.recorded.accounts, key=lambda account: account.start_ns)
    assert kept == by_start[len(by_start) - len(kept) :]
    assert min(most, 60) >= len(kept) >= min(most, 60) * excerpts.MIN_SHARE
    assert excerpt.num_open == in_flight(books, kept[0])
    assert all(excerpt.num_open <= in_flight(books, other) for other in by_start[60 - min(most, 60) :][: most // 2])


def in_flight(books: Books, account: ClosedAccount) -> int:
    return sum(one.start_ns < account.start_ns < one.end_ns for one in books.accounts)


def at(seed: int) -> Books:
    return Ward(settings={"max_num_seqs": 2}).run(*poisson(20, 60, seed=seed))
