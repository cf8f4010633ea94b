"""What is read of answers that have no choices, in whatever pieces they came."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.api.messages import MessageEvents
from splittime.gateway.answer_events import events_of
from splittime.gateway.forwarded import ENDPOINTS, MESSAGES, RESPONSES, forwarded

from .hostile import MESSAGE_EVENTS, TYPED_WHOLE, event, response_events
from .test_answer_events import TIMING

TOLD = {RESPONSES: response_events("resp_1"), MESSAGES: MESSAGE_EVENTS}


def stream(path: str, events=None) -> bytes:
    return b"".join(b"event: x\n" + event(each) for each in events or TOLD[path])


def read(path: str, data: bytes):
    events = events_of(path)
    events.feed(data)
    return events


def counts(events) -> tuple:
    found = events.read()
    return found.prompt_tokens, found.cached_tokens, found.output_tokens, found.finish_reason


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@given(cuts=st.lists(st.integers(0, 900), max_size=8))
def test_pieces_do_not_matter(path, cuts):
    data, events, ids = stream(path), events_of(path), []
    events.on_id = ids.append
    for begin, end in pairwise(sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})):
        assert not events.is_done
        events.feed(data[begin:end])
    assert events.is_done
    assert (events.num_events, events.num_pieces) == (len(TOLD[path]), 3 + (path == MESSAGES))
    assert counts(events) == (7, 2, 3, "length")
    assert ids == (["resp_1"] if path == RESPONSES else [])


def test_a_message_that_breaks_off_has_told_its_prompt_and_not_its_answer():
    events = read(MESSAGES, stream(MESSAGES, MESSAGE_EVENTS[:-2]))
    assert not events.is_done
    assert counts(events)[:3] == (7, 2, None)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_an_error_is_the_end_of_a_stream(path):
    told = {"type": "error", "error": {"type": "overloaded_error", "message": "too much"}}
    events = read(path, stream(path, [TOLD[path][0], told]))
    assert (events.is_done, events.error.message) == (True, "too much")


@pytest.mark.parametrize(
    ("kinds", "has_begun"),
    [
        (["message_start", "ping"], False),
        (["message_start", "ping", "ping"], True),
        (["message_start", "content_block_delta"], True),
        (["message_start", "message_delta"], True),
    ],
)
def test_a_message_has_begun_with_a_piece_or_a_sign_of_life(kinds, has_begun):
    assert read(MESSAGES, stream(MESSAGES, [{"type": kind} for kind in kinds])).has_begun is has_begun


def test_a_response_that_failed_says_why():
    failed = {"type": "response.failed", "response": {"id": "r", "status": "failed", "error": {"message": "no memory"}}}
    events = read(RESPONSES, stream(RESPONSES, [failed]))
    assert (events.is_done, events.error.message) == (True, "no memory")


def test_words_of_an_answer_are_no_end():
    said = {"type": "response.output_text.delta", "delta": '"type":"response.completed"', "response": None}
    assert not read(RESPONSES, stream(RESPONSES, [said])).is_done


@pytest.mark.parametrize("broken", ["many", -1, 2**40, [1], False, {"input_tokens": "7", "input_tokens_details": [1]}])
def test_an_end_whose_numbers_cannot_be_read_is_one(broken):
    usage = broken if isinstance(broken, dict) else {"input_tokens": broken, "output_tokens": broken}
    last = {"type": "response.completed", "response": {"id": "r", "status": "completed", "usage": usage}}
    events = read(RESPONSES, stream(RESPONSES, [last]))
    assert events.is_done
    assert counts(events) == (None, None, None, "stop")


@pytest.mark.parametrize("usage", [False, [7], {"output_tokens": "3", "cache_read_input_tokens": "x"}])
def test_an_odd_usage_takes_no_reason_from_a_message(usage):
    last = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage}
    assert counts(read(MESSAGES, stream(MESSAGES, [*MESSAGE_EVENTS[:-2], last]))) == (7, 2, None, "tool_calls")
    events = events_of(MESSAGES)
    events.take_whole(json.dumps(TYPED_WHOLE[MESSAGES] | {"usage": usage}).encode())
    assert counts(events)[2:] == (None, "tool_calls")


def test_an_account_is_nested_from_within_a_response():
    last = {"type": "response.completed", "response": {"id": "r", "status": "completed", "timing": TIMING}}
    assert read(RESPONSES, stream(RESPONSES, [last])).nested().duration_ns == 9
    assert read(MESSAGES, stream(MESSAGES)).nested().fault


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (RESPONSES, (7, 2, 3, "stop")),
        (MESSAGES, (7, 2, 3, "tool_calls")),
        ("/v1/messages/count_tokens", (0, None, 0, "stop")),
        ("/v1/embeddings", (5, None, 0, "stop")),
        ("/v1/rerank", (6, None, 0, "stop")),
        ("/v1/score", (5, None, 0, "stop")),
    ],
)
def test_whole_answers(path, told):
    events = events_of(path)
    events.take_whole(json.dumps(TYPED_WHOLE[path] | {"id": "x"}).encode())
    assert events.is_done
    assert counts(events) == told


def test_our_own_messages_are_read():
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}
    chunk = {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}
    assert counts(read(MESSAGES, MessageEvents().feed(event(chunk)))) == (9, 5, 4, "length")


@pytest.mark.parametrize(
    ("path", "fields", "output_tokens"),
    [
        (RESPONSES, {}, 256),
        (RESPONSES, {"max_output_tokens": 5, "max_tokens": 9, "n": 3}, 5),
        (MESSAGES, {"max_tokens": 5, "max_output_tokens": 9}, 5),
        *((path, {"max_tokens": 5, "n": 3, "stream": True}, 0) for path, one in ENDPOINTS.items() if not one.most),
    ],
)
def test_how_long_a_request_is_taken_to_be(path, fields, output_tokens):
    told = forwarded(path, json.dumps({"model": "m", **fields}).encode(), 256)
    assert (told.output_tokens, told.is_stream) == (output_tokens, False)


def test_the_id_is_told_with_the_first_event_that_has_it():
    events, ids = events_of(RESPONSES), []
    events.on_id = ids.append
    events.feed(stream(RESPONSES, [{"type": "ping"}, TOLD[RESPONSES][0]]))
    assert (ids, events.is_done) == (["resp_1"], False)


@pytest.mark.parametrize(
    ("told", "ids"),
    [
        ({"id": "resp_1", "usage": "none of ours"}, ["resp_1"]),
        ({"id": "resp_1", "store": True}, ["resp_1"]),
        ({"id": "resp_1", "store": False}, []),
        ({"id": 7}, []),
    ],
)
def test_an_id_is_told_of_what_is_kept_whatever_else_is_odd(told, ids):
    for is_stream in (False, True):
        events, found = events_of(RESPONSES), []
        events.on_id = found.append
        if is_stream:
            events.feed(stream(RESPONSES, [{"type": "response.completed", "response": told}]))
        else:
            events.take_whole(json.dumps(told).encode())
        assert found == ids


@pytest.mark.parametrize(("read", "made", "prompt"), [(-100, 1, 5), (2, -1, 6), (None, 2**40, 4), (2, 1, 7)])
def test_a_number_of_tokens_that_can_be_none_takes_nothing_from_the_prompt(read, made, prompt):
    usage = {"input_tokens": 4, "cache_read_input_tokens": read, "cache_creation_input_tokens": made}
    events = events_of(MESSAGES)
    events.take_whole(json.dumps({"usage": usage}).encode())
    assert events.read().prompt_tokens == prompt


LONG = b"1.25," * 60_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [' + LONG + b'], "usage": {"prompt_tokens": 7, "total_tokens": 7}}',  # not read: it is no JSON
        b'{"data": [' + LONG + b'1], "usage": {"total_tokens": 7}, "model": "\\"usage\\":"}',
        b'{"usage": {"prompt_tokens": 7, "total_tokens": 9}, "data": [' + LONG + b"1]}",
        b'{"usage": {"total_tokens": 7}, "data": [' + LONG + b'1, {"usage": {"total_tokens": 3}}]}',
    ],
)
def test_of_a_long_answer_the_end_tells_its_tokens(body):
    events = events_of("/v1/embeddings")
    events.take_whole(body)
    assert counts(events) == (7, None, 0, "stop")
