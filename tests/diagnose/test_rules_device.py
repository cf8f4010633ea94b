"""A device apart from the host that waits for it, by its own marks; and one that does not."""

import msgspec
from test_rules_queue import names, poisson
from ward import MS, Ward

from splittime.diagnose.doctor import diagnose

COSTS = {"step_ms": 1, "token_ms": 0.01, "gap_ms": 2}  # the host takes twice as long as the device


def books_of(settings=None, **ward):
    books = Ward(**(COSTS | ward)).run(*poisson(10, 80))
    assert books.facts is not None
    known = books.facts.settings | {"async_scheduling": False, "enforce_eager": False} | (settings or {})
    return msgspec.structs.replace(books, facts=msgspec.structs.replace(books.facts, settings=known))


def test_a_card_that_waits_between_steps():
    diagnosis = diagnose(books_of(execution="captured"))
    assert [finding.name for finding in diagnosis.illnesses] == ["device_idle"]
    first = diagnosis.findings[0]
    assert first.cure.flags == ("--async-scheduling",)
    assert 0.5 < first.share_of_time < 0.8
    assert first.step_ids


def test_a_card_that_finds_the_next_step_in_line():
    assert names(books_of(execution="captured", plans_ahead=True, step_ms=4)) == []


def test_a_quick_host():
    assert names(books_of(execution="captured", gap_ms=0.02)) == []


def test_the_host_is_no_card():
    assert "device_idle" not in names(books_of())


def test_launches_one_by_one_that_take_as_long_as_the_work():
    """No gap at all between steps, and yet the card may have waited all the time."""
    books = books_of({"enforce_eager": True}, execution="eager", gap_ms=0)
    slow = tuple(msgspec.structs.replace(step, enqueue_ns=step.busy_ns + MS // 10) for step in books.steps)
    assert names(books) == []
    first = diagnose(msgspec.structs.replace(books, steps=slow)).findings[0]
    assert first.name == "device_idle"
    assert "--enforce-eager" in first.cure.sentence
    assert "single launches" in first.claim
