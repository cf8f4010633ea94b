"""Sessions: each turn's prompt begins with the one before, and its intended start counts from the expected end."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book.records import Phase
from splittime.bench.draw import draw
from splittime.bench.spec import LoadSpec
from splittime.core.errors import ConfigError

BLOCK = 16


def drawn(max_model_len: int | None = 2048, vocab_size: int = 4096, **fields):
    spec = LoadSpec(**{"rate": 2.0, "duration_s": 30.0, "turns": "3", "input_tokens": "40", **fields})
    return draw(spec, vocab_size=vocab_size, max_model_len=max_model_len, block_size=BLOCK, salt="a run")


def sessions(schedule) -> dict[int, list]:
    found = defaultdict(list)
    for planned in schedule.requests:
        found[planned.session].append(planned)
    return found


loads = st.fixed_dictionaries(
    {
        "turns": st.sampled_from(["2", "uniform:1:4", "lognormal:3:0.5"]),
        "think_s": st.sampled_from(["0", "1.5", "exponential:2", "uniform:0.5:1"]),
        "output_tokens": st.sampled_from(["1", "20", "uniform:1:60"]),
        "seed": st.integers(0, 50),
        "prefix_share": st.sampled_from([0.0, 0.5]),
    }
)


@settings(max_examples=40, deadline=None)
@given(loads)
def test_turns_follow_one_another(fields):
    schedule = drawn(**fields)
    for turns in sessions(schedule).values():
        assert [one.turn for one in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.at_ns == before.at_ns + before.expected_ns + after.think_ns
            assert before.expected_ns == 200_000_000 + (before.output_tokens - 1) * 20_000_000
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) == len(before.prompt) + before.output_tokens + 40
            assert after.expected_cached_tokens >= len(before.prompt) // BLOCK * BLOCK


@settings(max_examples=40, deadline=None)
@given(loads)
def test_the_window_holds_by_intended_start_and_the_order_is_that_of_time(fields):
    schedule = drawn(warm_up_s=4, cool_down_s=6, **fields)
    at_ns = [one.at_ns for one in schedule.requests]
    assert at_ns == sorted(at_ns)
    assert [one.index for one in schedule.requests] == list(range(len(at_ns)))
    for one in schedule.requests:
        is_measured = schedule.measured_from_ns <= one.at_ns < schedule.measured_until_ns
        assert (one.phase is Phase.MEASURED) == is_measured
        assert one.at_ns < schedule.duration_ns


def test_only_the_prompt_before_is_expected_to_be_found():
    """Not the answer: what the server said is not what stands in for it."""
    turns = sessions(drawn(turns="4", output_tokens="50"))[0]
    assert [one.expected_cached_tokens for one in turns] == [0, *(len(one.prompt) // 16 * 16 for one in turns[:-1])]


def test_a_session_that_outgrows_the_model_ends():
    schedule = drawn(max_model_len=150, turns="10", output_tokens="20")
    assert max(len(one.prompt) + one.output_tokens for one in schedule.requests) <= 150
    assert {len(turns) for turns in sessions(schedule).values()} <= {1, 2}
    assert any("sessions ended early" in note for note in schedule.notes)


@pytest.mark.parametrize("turns", ["1000000000", "uniform:1:1000000"])
def test_more_turns_than_can_be_drawn_are_refused(turns):
    with pytest.raises(ConfigError, match=r"20 sessions of .* turns are .* requests, too many") as caught:
        drawn(turns=turns, duration_s=None, num_requests=20)
    told = caught.value.info
    assert (told.param, told.value, told.limit) == ("turns", turns, 1_000_000)
    assert "Make --turns smaller" in told.hint


def test_what_would_come_after_the_end_is_left_out_and_said():
    schedule = drawn(think_s="20")
    assert any("left out" in note for note in schedule.notes)


def test_later_turns_may_be_shorter():
    turns = sessions(drawn(turn_input_tokens="5", output_tokens="10"))[0]
    assert [len(one.prompt) for one in turns] == [40, 55, 70]


def test_in_a_closed_loop_there_are_no_instants():
    schedule = drawn(rate=None, duration_s=None, concurrency=2, num_requests=5, think_s="3", warm_up_requests=1)
    assert {one.at_ns for one in schedule.requests} == {None}
    assert [one.phase for one in schedule.requests] == [Phase.WARM_UP] * 3 + [Phase.MEASURED] * 15
    assert {one.think_ns for one in schedule.requests if one.turn} == {3_000_000_000}
    assert len(sessions(schedule)) == 6


def test_chats_have_stand_in_answers():
    turns = sessions(drawn(prompt_form="chat"))[0]
    assert [len(one.messages) for one in turns] == [1, 3, 5]
    assert [message["role"] for message in turns[2].messages] == ["user", "assistant", "user", "assistant", "user"]
    assert turns[2].messages[:3] == turns[1].messages


def test_conversations_of_a_file_have_their_own_answers(tmp_path):
    talk = [("human", "One?"), ("gpt", "1"), ("human", "Two?"), ("gpt", "2 " * 40), ("human", "Three?")]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": said} for who, said in talk]}]))
    schedule = drawn(dataset=str(path), input_tokens=None, turns="2")
    turns = sessions(schedule)[0]
    assert [[one["content"][-4:] for one in turn.messages] for turn in turns] == [["One?"], ["One?", "1", "Two?"]]
    assert turns[1].messages[0] == turns[0].messages[0]
    assert turns[1].output_tokens == 20
    other = sessions(schedule)[1]
    assert other[0].messages != turns[0].messages


def test_expected_times_are_the_users(tmp_path):
    turns = sessions(drawn(expected_ttft_ms=1000.0, expected_tpot_ms=0.0, output_tokens="500", think_s="2"))[0]
    assert [one.at_ns - turns[0].at_ns for one in turns] == pytest.approx([0, 3e9, 6e9])
