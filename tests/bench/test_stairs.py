"""What each stair of a calibration asks, from what the steps so far took."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.bench import stairs
from splittime.bench.book.records import Arm
from splittime.bench.draw import draw
from splittime.bench.stairs import KV_SHARE, READING, ServerSizes, stair_of
from splittime.ledger.steps import StepRecord
from splittime.wire.target import Target

SIZES = ServerSizes(slots=48, context=2048, kv_tokens=16_384, vocab_size=1000)


def step(number: int, rows: list[tuple[str, int, int]], prefill: int, took_ns: int) -> StepRecord:
    begin_ns = number * 10**11
    parts = dict.fromkeys(("plan_ns", "launch_ns", "sample_ns", "commit_ns", "host_gap_ns", "idle_ns"), 0)
    return StepRecord(
        step_id=number,
        begin_ns=begin_ns,
        end_ns=begin_ns + took_ns,
        device_ns=took_ns,
        rows=tuple(rows),
        prefill_tokens=prefill,
        decode_tokens=len(rows) - (prefill > 0),
        kv_tokens_read=100,
        blocks_used=0,
        num_running=len(rows),
        num_waiting=0,
        **parts,
    )


def steps(prompt_token_ns: int, decode_ns: int) -> list[StepRecord]:
    return [step(1, [("a", 0, 64)], 64, 64 * prompt_token_ns), step(2, [("a", 64, 1)], 0, decode_ns)]


def test_the_stairs_double_and_end_with_all_slots():
    assert SIZES.rows() == [1, 2, 4, 8, 16, 32, 48]
    assert ServerSizes(1, 10, 10, 10).rows() == [1]
    assert ServerSizes(64, 10, 10, 10).rows()[-2:] == [32, 64]


@pytest.mark.parametrize(("each", "num_stairs"), [(30, 6), (2, 11), (0, 3 * stairs.MOST_TIMES)])
def test_a_slow_server_is_asked_until_it_has_ended_enough(each, num_stairs, monkeypatch):
    asked, told = [], []

    async def stand(target, stair, sizes, seed, num_requests=None):
        asked.append((stair.rows, stair.seconds, seed))
        return Arm(url="", kind="splittime", accounts=(None,) * each, steps=tuple(steps(1000, 10**6)))

    async def sizes(target, is_forced):
        return ServerSizes(slots=4, context=2048, kv_tokens=16_384, vocab_size=1000)

    monkeypatch.setattr(stairs, "_stand", stand)
    monkeypatch.setattr(stairs, "_sizes", sizes)
    arms = asyncio.run(stairs.climb(Target(url="http://127.0.0.1:9"), 12.0, on_stair=lambda *all: told.append(all)))
    assert len(arms) == 1 + num_stairs
    climbed = [(1, 2.0), (2, 2.0), (4, 2.0)] * stairs.MOST_TIMES
    assert [(rows, seconds) for rows, seconds, _ in asked[1:]] == climbed[:num_stairs]
    assert len({seed for _, _, seed in asked}) == len(asked)
    assert all(done < total for _, done, total in told)


@given(
    rows=st.sampled_from(SIZES.rows()),
    prompt_token_ns=st.integers(100, 10**9),
    decode_ns=st.integers(10_000, 10**10),
)
def test_a_stair_fits_into_its_time_the_context_and_the_cache(rows, prompt_token_ns, decode_ns):
    stair = stair_of(rows, 4.0, SIZES, steps(prompt_token_ns, decode_ns))
    assert stair.prompt + stair.answer <= SIZES.context
    assert rows * (stair.prompt + stair.answer) <= max(KV_SHARE * SIZES.kv_tokens, rows * (2 + stair.answer))
    if stair.prompt > 2:
        assert rows * stair.prompt / 2 * prompt_token_ns <= READING * 4e9
    if stair.answer > 4:
        assert stair.answer * decode_ns <= (1 - READING) * 4e9


@pytest.mark.parametrize("rows", SIZES.rows())
def test_what_it_asks_can_be_drawn(rows):
    stair = stair_of(rows, 1.0, SIZES, steps(20_000, 1_000_000))
    schedule = draw(stair.load(3), vocab_size=1000, max_model_len=2048, salt="own")
    assert schedule.concurrency == rows
    assert max(len(planned.prompt) for planned in schedule.requests) <= stair.prompt
