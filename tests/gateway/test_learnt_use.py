"""Estimates: what such requests used of late, never more than they may; and what unread answers are charged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.gateway.budgets import MAX_KEPT, LearntUse
from splittime.gateway.forwarded import MAX_ANSWERS, forwarded

ASSUMED = 100


def asked(path="/v1/completions", model="m", **fields):
    return forwarded(path, json.dumps({"model": model, **fields}).encode(), ASSUMED)


def learnt_from(*answers: int, tenant="t", request=None, **of_each) -> LearntUse:
    learnt, told = LearntUse(), {"num_pieces": 0, "lasted_s": 1.0, **of_each}
    for tokens in answers:
        learnt.note(tenant, request or asked(max_tokens=4000), tokens, **told)
    return learnt


def test_a_bound_is_no_forecast():
    """One that may have 500,000 tokens is expected to have what such ones had, at first what is assumed."""
    huge, learnt = asked(max_tokens=500_000), learnt_from(30, 50, 40)
    assert huge.tokens - huge.prompt_tokens == ASSUMED
    assert LearntUse().expected_tokens("t", huge, ASSUMED) == ASSUMED
    assert learnt.expected_tokens("t", huge, ASSUMED) == 40
    assert learnt.expected_tokens("t", asked(max_tokens=7), ASSUMED) == 7
    assert learnt.expected_tokens("t", asked(max_tokens=500_000, n=3), ASSUMED) == 120


def test_an_estimate_follows_what_is_used_and_is_each_tenants_own():
    learnt = learnt_from(*[10] * 50, *[1000] * 30)
    assert learnt.expected_tokens("t", asked(max_tokens=4000), ASSUMED) > 900
    assert learnt.expected_tokens("other", asked(max_tokens=4000), ASSUMED) == ASSUMED
    assert learnt.expected_tokens("t", asked(model="other", max_tokens=4000), ASSUMED) == ASSUMED


def test_all_that_may_be_used_is_reserved():
    known, request = learnt_from(10), asked(max_tokens=500)
    assert known.reserved_tokens("t", request, ASSUMED) == request.prompt_tokens + 500
    lists = asked(prompt=['a "quoted" one', "b"], n=3, max_tokens=500)
    assert known.reserved_tokens("t", lists, ASSUMED) == lists.prompt_tokens + 6 * 500
    ids = asked(prompt=[[1, 2], [3]], best_of=2, max_tokens=5)
    assert known.reserved_tokens("t", ids, ASSUMED) == ids.prompt_tokens + 4 * 5
    vectors = asked(path="/v1/embeddings", input="x" * 100)
    assert known.reserved_tokens("t", vectors, ASSUMED) == vectors.prompt_tokens


def test_an_upstream_that_keeps_to_no_bound_is_remembered():
    few = asked(max_tokens=50)
    assert LearntUse().reserved_tokens("t", few, ASSUMED) == few.prompt_tokens + ASSUMED  # not known to keep to it
    learnt = learnt_from(500, request=few)
    assert learnt.reserved_tokens("t", few, ASSUMED) == few.prompt_tokens + 500
    for _ in range(40):
        learnt.note("t", few, 50, 0, 1.0)
    assert learnt.reserved_tokens("t", few, ASSUMED) == few.prompt_tokens + 51
    without = asked()
    learnt.note("t", without, 3000, 0, 1.0)
    assert learnt.reserved_tokens("t", without, ASSUMED) == without.prompt_tokens + 3000
    assert learnt.reserved_tokens("t", few, ASSUMED) == few.prompt_tokens + 51  # said a bound


@pytest.mark.parametrize(("fields", "tokens"), [({"max_tokens": -1}, ASSUMED), ({}, ASSUMED), ({"max_tokens": 0}, 0)])
def test_all_the_room_there_is_is_no_bound_of_nothing(fields, tokens):
    request = asked(**fields)
    assert (request.output_tokens, request.is_bounded) == (tokens, tokens == 0)


def test_the_largest_of_several_bounds_counts():
    """A server that knows no `max_completion_tokens` writes as many as `max_tokens` says."""
    assert asked(max_tokens=4000, max_completion_tokens=1).output_tokens == 4000


@given(st.binary(max_size=40), st.integers(0, 2000))
def test_any_prompt_has_a_number_of_answers(prompt, n):
    text = prompt.decode("latin-1")
    for told in (text, [text], [text, text], [[1], [2, 3]], [1, 2], [], [[]]):
        assert 1 <= asked(prompt=told, n=n).answers <= MAX_ANSWERS


def test_events_with_several_tokens_are_counted_by_what_they_had():
    """A stream that was left told no usage: its events are counted as those of answers that told theirs, or by text."""
    stream = asked(max_tokens=1000, stream=True)
    assert LearntUse().written_tokens("t", stream, 44, 0) == 44
    assert LearntUse().written_tokens("t", stream, 44, 1600) == 400
    assert learnt_from(500, num_pieces=50).written_tokens("t", stream, 44, 0) == 440
    assert learnt_from(500, num_pieces=50).written_tokens("t", stream, 400, 0) == 1000  # as many as it may have
    endless = asked(stream=True)
    assert LearntUse().written_tokens("t", endless, 3000, 0) == 3000


def test_a_whole_answer_that_is_left_is_charged_by_its_time():
    request = asked(max_tokens=400)
    assert LearntUse().unseen_tokens("t", request, 0.1) == ASSUMED
    learnt = learnt_from(50, 100, lasted_s=10.0)  # ten a second at best
    assert learnt.unseen_tokens("t", request, 4.0) == 40
    assert learnt.unseen_tokens("t", request, 1e9) == 400
    assert learnt.unseen_tokens("t", asked(path="/v1/embeddings"), 4.0) == 0


def test_what_a_tenant_leaves_is_charged_at_its_own_pace():
    """128 answers at once, or 1,000 tokens from a cache, were another's pace: five seconds cost it 128,000 tokens."""
    learnt = learnt_from(128 * 1000, request=asked(n=128, max_tokens=1000), tenant="fast", lasted_s=5.0)
    learnt.note("fast", asked(max_tokens=1000), 1000, 0, 0.003)
    assert learnt.unseen_tokens("t", asked(), 5.0) == ASSUMED
    learnt.note("t", asked(max_tokens=4000), 50, 0, 5.0)
    assert learnt.unseen_tokens("t", asked(max_tokens=4000), 5.0) == 50
    assert learnt.unseen_tokens("t", asked(model="other", max_tokens=4000), 5.0) == ASSUMED


def test_several_answers_are_written_at_once():
    learnt = learnt_from(8 * 50, request=asked(n=8, max_tokens=4000), lasted_s=5.0)  # each at ten a second
    assert learnt.unseen_tokens("t", asked(max_tokens=4000), 4.0) == 40
    assert learnt.unseen_tokens("t", asked(n=3, max_tokens=4000), 4.0) == 120
    assert learnt.unseen_tokens("t", asked(n=3, max_tokens=30), 4.0) == 90


def test_what_said_no_bound_is_charged_no_more_than_such_ones_had():
    learnt = learnt_from(50, lasted_s=5.0)
    assert learnt.unseen_tokens("t", asked(), 4.0) == 40
    assert learnt.unseen_tokens("t", asked(), 1e9) == ASSUMED
    assert learnt.unseen_tokens("t", asked(n=2), 1e9) == 2 * ASSUMED
    learnt.note("t", asked(), 3000, 0, 300.0)
    assert learnt.unseen_tokens("t", asked(), 1e9) == 3000
    assert learnt.unseen_tokens("t", asked(max_tokens=400), 1e9) == 400


def test_a_streams_first_byte_is_no_answers_pace():
    assert (
        learnt_from(50, request=asked(stream=True), lasted_s=0.1).unseen_tokens("t", asked(max_tokens=4000), 9.0)
        == ASSUMED
    )


def test_a_slow_reader_or_a_long_prompt_makes_no_tokens_cheap():
    learnt = learnt_from(100, 1, 1, lasted_s=1.0)
    assert learnt.unseen_tokens("t", asked(max_tokens=400), 1.0) > 80


def test_what_is_kept_is_bounded():
    learnt = LearntUse()
    for number in range(MAX_KEPT + 10):
        learnt.note("t", asked(model=f"m{number}"), 5, 0, 1.0)
    assert len(learnt._used) == MAX_KEPT
    assert learnt.expected_tokens("t", asked(model=f"m{MAX_KEPT}"), ASSUMED) == 5
