"""The name of a request in the books: its id, however long that is."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from splittime.attach.engine_books import DecidedPlan, EngineBooks
from splittime.attach.request_book import MOST_CHARACTERS, AskedRequest, name_of
from splittime.ledger.stages import Cause

LONG = "x" * 1_000_000
IDS = st.text(st.characters(), max_size=400)  # half of a character's two codes too


@given(IDS, st.sampled_from(["", "cmpl-", "chatcmpl-", "embd-"]))
def test_a_name_is_short_its_own_name_and_can_be_written(own, prefix):
    name = name_of(prefix + own)
    assert len(name) <= MOST_CHARACTERS + len("chatcmpl-")
    assert name_of(name) == name
    assert msgspec.json.decode(msgspec.json.encode(name)) == name
    if len(prefix + own) <= MOST_CHARACTERS and own.isascii():
        assert name == prefix + own


@given(IDS, st.sampled_from(["cmpl-", "chatcmpl-"]))
def test_the_name_of_a_response_is_that_of_its_request_behind_the_prefix(own, prefix):
    if not own.startswith(("cmpl-", "chatcmpl-")):
        assert name_of(prefix + own) == prefix + name_of(own)


def test_two_that_begin_and_end_alike_have_two_names():
    one, other = (f"cmpl-{LONG}{middle}{LONG}-0-1234abcd" for middle in "ab")
    assert name_of(one) != name_of(other)
    assert name_of(one).startswith("cmpl-xxx")


def plan(*names: str, victims=(), drafts=()) -> DecidedPlan:
    rows = tuple((name, 0, 4) for name in names)
    return DecidedPlan(rows, 0, 4, (), (), [(name, 0) for name in names], victims, 1, len(rows), 0, drafts)


def test_what_a_step_is_told_of_long_ids_is_short():
    """Rows, victims and drafts, of those that end with the step too."""
    books, names = EngineBooks(), [f"{LONG}{number}" for number in range(3)]
    for name in names:
        books.receive(AskedRequest(name, 7, 4, 9), 100, 100)
    books.preempt(names[2], 4)
    flight = books.begin(plan(*names[:2], victims=(names[2],), drafts=((names[0], 3),)), 200, 210)
    firsts = books.commit(flight, [(name, 1) for name in names[:2]], 300)
    ended = books.end(names[0], "length", 300)
    record = books.end_step(flight, {names[0]: 2}, 300, 310)
    short = [name_of(name) for name in names]
    assert [name for name, _, _ in record.rows] == short[:2]
    assert (record.victims, record.verified) == ((short[2],), ((short[0], 3, 2),))
    assert [(client, first.request_id) for client, first in firsts] == [(7, short[0]), (7, short[1])]
    assert ended.request_id == short[0]
    assert len(msgspec.json.encode([record, ended])) < 4_000
    flight = books.begin(plan("short"), 400, 410)
    assert books.end_step(flight, {}, 420, 430).rows == (("short", 0, 4),)


def test_short_ids_stay_as_they_are():
    books = EngineBooks()
    books.receive(AskedRequest("a", 0, 4, 9), 100, 100)
    assert books.waiting_for() == {Cause.ENGINE_LOOP.value: 1}
    flight = books.begin(plan("a"), 200, 210)
    assert books.end_step(flight, {}, 300, 310).rows == flight.plan.rows
