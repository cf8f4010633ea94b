"""What is read of an answer that is passed on, in whatever pieces it came."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.gateway.answer_events import AnswerEvents
from splittime.gateway.forwarded import forwarded

from .hostile import CHUNK, LAST, USAGE, WHOLE, event

STAGES = [
    {"stage": "receive", "cause": None, "begin_ns": 0, "end_ns": 5},
    {"stage": "queue", "cause": "batch_slots", "begin_ns": 5, "end_ns": 9},
]
TIMING = {"start_ns": 100, "sealed_ns": 109, "stages": STAGES}


@given(cuts=st.lists(st.integers(0, 700), max_size=8), has_usage=st.booleans())
def test_pieces_do_not_matter(cuts, has_usage):
    told = [CHUNK, CHUNK, {**LAST, "timing": TIMING}, *([USAGE] if has_usage else []), b"[DONE]"]
    whole = b"".join(event(each) for each in told)
    events, places = AnswerEvents(), sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    for begin, end in pairwise(places):
        assert not events.is_done
        events.feed(whole[begin:end])
    assert events.is_done
    assert events.num_events == len(told) - 1
    assert events.read().finish_reason == "stop"
    assert events.read().output_tokens == (3 if has_usage else None)
    assert (events.nested().duration_ns, len(events.nested().stages)) == (9, 2)


def changed(**more):
    return TIMING | more


@pytest.mark.parametrize(
    ("timing", "fault"),
    [
        (None, "told no timing"),
        (changed(sealed_ns=110), "sum to 9 ns of 10 ns"),
        (changed(sealed_ns=108), "sum to 9 ns of 8 ns"),
        (changed(stages=[]), "sum to 0 ns"),
        (changed(stages=STAGES[1:]), "a gap at 0 ns"),
        (changed(stages=[STAGES[0], STAGES[1] | {"begin_ns": 4}]), "a gap at 5 ns"),
        (changed(stages=[STAGES[0] | {"end_ns": -1}]), "a gap at 0 ns"),
        (changed(stages=[STAGES[0] | {"stage": "dreaming"}]), "cannot be read"),
        (changed(stages=[STAGES[1] | {"cause": "fate"}]), "cannot be read"),
        ({"start_ns": "x"}, "cannot be read"),
    ],
)
def test_an_account_that_does_not_sum_is_not_taken(timing, fault):
    events = AnswerEvents()
    events.take_whole(json.dumps({"timing": timing}).encode())
    assert fault in events.nested().fault
    assert events.nested().stages == ()


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (False, (None, None, None)),
        ([7, 3], (None, None, None)),
        ({"prompt_tokens": "7", "completion_tokens": True}, (None, None, None)),
        ({"prompt_tokens": -1, "completion_tokens": 2**40}, (None, None, None)),
        ({"prompt_tokens": 7.0, "completion_tokens": 3.5}, (7, None, None)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": "x"}, (7, 3, None)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2.0}}, (7, 3, 2)),
    ],
)
def test_an_odd_usage_takes_nothing_else_from_its_event(usage, tokens):
    whole, streamed = AnswerEvents(), AnswerEvents()
    whole.take_whole(json.dumps(WHOLE | {"usage": usage}).encode())
    streamed.feed(event(CHUNK) + event(LAST | {"usage": usage}) + event(b"[DONE]"))
    for read in (whole.read(), streamed.read()):
        assert read.finish_reason == "stop"
        assert (read.prompt_tokens, read.output_tokens, read.cached_tokens) == tokens
    assert whole.text_bytes == len("tick")


@pytest.mark.parametrize(
    ("choice", "has_begun"),
    [
        ({"text": ""}, False),
        ({"delta": {}}, False),
        ({"delta": {"content": "", "tool_calls": []}}, False),
        ({"text": "a"}, True),
        ({"text": "", "finish_reason": "stop"}, True),
        ({"text": "", "token_ids": [7]}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": None}, True),
        ({"message": {"content": "a"}}, True),
    ],
)
def test_a_stream_has_begun_with_a_piece_of_an_answer(choice, has_begun):
    events = AnswerEvents()
    events.feed(event({"choices": [{"index": 0, **choice}]}))
    assert events.has_begun is has_begun
    events.feed(event({"choices": [{"index": 0, **choice}]}))  # a sign of life
    assert events.has_begun


def test_an_error_inside_the_stream_is_noticed():
    events = AnswerEvents()
    events.feed(event(CHUNK) + event({"error": {"message": "out of memory"}}) + event(b"[DONE]"))
    assert events.error.message == "out of memory"
    assert events.is_done


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        ({}, 256),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": -5}, 256),
    ],
)
def test_how_long_a_request_is_taken_to_be(fields, output_tokens):
    body = json.dumps({"model": "m", "prompt": "x" * 100, **fields}).encode()
    told = forwarded("/v1/completions", body, 256)
    assert told.output_tokens == output_tokens
    assert told.prompt_tokens == -(-len(body) // 4)
    assert told.body is body
