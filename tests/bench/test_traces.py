"""Traces in all their forms, replayed: times, lengths, and prefix hits from block ids."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book.records import Phase
from splittime.bench.draw import EndlessCache, draw
from splittime.bench.spec import LoadSpec
from splittime.bench.traces import parse_blocks, read_trace
from splittime.bench.workload import runs
from splittime.core.errors import ConfigError

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason=f"no traces in {TRACES}")


def drawn(path: object, max_model_len: int | None = None, block_size: int | None = None, **fields):
    spec = LoadSpec(trace=str(path), **fields)
    return draw(spec, vocab_size=4096, max_model_len=max_model_len, block_size=block_size, salt="a run")


def written(tmp_path, *lines: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def facts(schedule) -> list[tuple[float, int, int]]:
    return [(one.at_ns / 1e9, one.expected_prompt_tokens, one.output_tokens) for one in schedule.requests]


WANT = [(0.0, 10, 3), (0.5, 20, 4), (2.25, 30, 5)]


def test_our_columns(tmp_path):
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens", "7.0,10,3", "7.5,20,4", "9.25,30,5")
    assert facts(drawn(path)) == WANT


def test_azures_header(tmp_path):
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,10,3",
        "2023-11-16 18:15:47.1805900,20,4",
        "2023-11-16 18:15:48.9305900,30,5",
    )
    assert facts(drawn(path)) == WANT


def test_mooncakes_lines(tmp_path):
    rows = [(5000, 10, 3, [1]), (5500, 20, 4, [2]), (7250, 30, 5, [1])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    schedule = drawn(written(tmp_path, *lines, name="trace.jsonl"), block_size=5)
    assert facts(schedule) == WANT
    assert schedule.requests[0].prompt == schedule.requests[2].prompt[:10]
    assert [one.expected_cached_tokens for one in schedule.requests] == [0, 0, 10]


def test_any_other_csv_by_its_columns(tmp_path):
    path = written(tmp_path, "when,in,out,who", "2250,30,5,z", "0,10,3,x", "500,20,4,y")
    named = {"time_column": "when", "input_column": "in", "output_column": "out", "time_unit": "ms"}
    assert facts(drawn(path, **named)) == WANT
    assert facts(drawn(path, **named, speed_up=2, length_scale=0.5)) == [(0.0, 5, 2), (0.25, 10, 2), (1.125, 15, 2)]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["a,b,c", "1,2,3"], "no column 'input_tokens' among a, b, c"),
        (["arrival_s,input_tokens,output_tokens"], "no request"),
        (["input_tokens,output_tokens", "1,2"], "no column of times"),
        (["arrival_s,input_tokens,output_tokens", "0,1,2", "soon,1,2"], "line 3"),
        (["arrival_s,input_tokens,output_tokens", "0,-1,2"], "line 2"),
        (["arrival_s,input_tokens,output_tokens", "0,1.5,2"], "line 2"),
        (["arrival_s,input_tokens,output_tokens", "0,1"], "line 2"),
        (["arrival_s,input_tokens,output_tokens", "inf,1,2"], "line 2"),
        (["arrival_s,input_tokens,output_tokens,prefix_blocks", "0,1,2,5-3"], "line 2"),
        (['{"timestamp": 1, "input_length": 5}'], "line 1"),
        (['{"timestamp": 1, "input_length": -5, "output_length": 1}'], "line 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, lines, why):
    with pytest.raises(ConfigError, match=why):
        drawn(written(tmp_path, *lines))


def test_a_trace_without_times_needs_a_rate(tmp_path):
    path = written(tmp_path, "input_tokens,output_tokens", "10,3", "20,4")
    schedule = drawn(path, rate=5.0, num_requests=4)
    assert [one.expected_prompt_tokens for one in schedule.requests] == [10, 20, 10, 20]
    assert any("again" in note for note in schedule.notes)


def test_times_of_a_trace_with_other_prompts(tmp_path):
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens", "7.0,10,3", "7.5,20,4", "9.25,30,5")
    schedule = drawn(path, workload="synthetic", input_tokens="64", output_tokens="8")
    assert facts(schedule) == [(0.0, 64, 8), (0.5, 64, 8), (2.25, 64, 8)]


def test_a_window_by_number_holds_rows_of_one_instant(tmp_path):
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens", "0,1,1", "3,2,1", "3,3,1", "3,4,1", "6,5,1")
    schedule = drawn(path, num_requests=3, cool_down_s=5)
    measured = [one for one in schedule.requests if one.phase is Phase.MEASURED]
    assert [len(one.prompt) for one in measured] == [1, 2, 3]
    assert all(schedule.measured_from_ns <= one.at_ns < schedule.measured_until_ns for one in measured)


# ---- blocks


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 30)), max_size=8))
def test_ranges_of_blocks(ranges):
    text = " ".join(str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in ranges)
    ids = [a + i for a, n in ranges for i in range(n)]
    assert list(parse_blocks(text)) == ids
    assert [first + i for first, count in runs(ids) for i in range(count)] == ids


def blocks_trace(tmp_path, rows: list[tuple[int, list[int]]]) -> Path:
    lines = [f"{i},{tokens},1,{' '.join(map(str, ids))}" for i, (tokens, ids) in enumerate(rows)]
    return written(tmp_path, "arrival_s,input_tokens,output_tokens,prefix_blocks", *lines)


prefix_trees = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 512)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(prefix_trees, st.sampled_from([1.0, 0.25, 0.03]), st.sampled_from([1, 4, 16]))
def test_equal_leading_ids_are_equal_prefixes_and_nothing_else_is(tmp_path_factory, tree, scale, block_size):
    """A block's id stands for all of the path to it, as in Mooncake's traces; a prompt's last block may be part-filled,
    and then its length belongs to its name."""
    names: dict = {}
    rows = []
    for path, last in tree:
        keys = [tuple(path[: i + 1]) for i in range(len(path) - 1)] + [(*path, "ends after", last)]
        rows.append((512 * (len(path) - 1) + last, [names.setdefault(key, len(names)) for key in keys]))
    trace = blocks_trace(tmp_path_factory.mktemp("trace"), rows)
    schedule = drawn(trace, length_scale=scale, block_size=block_size)
    prompts = [one.prompt for one in schedule.requests]
    for i, later in enumerate(prompts):
        known = [_common(rows[j][1], rows[i][1]) for j in range(i)]
        edges = [min(round(512 * scale * n), len(prompts[j]), len(later)) for j, n in enumerate(known)]
        assert all(prompts[j][:edge] == later[:edge] for j, edge in enumerate(edges))
        want = min(max(edges, default=0), len(later) - 1) // block_size * block_size
        by_chance = 2 * block_size if block_size == 1 else 0  # single tokens are equal now and then
        assert want <= schedule.requests[i].expected_cached_tokens <= want + by_chance


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_second_pass_over_the_trace_hits_nothing_of_the_first(tmp_path):
    path = blocks_trace(tmp_path, [(1024, [0, 1]), (1024, [0, 2])])
    schedule = drawn(path, rate=1.0, num_requests=4, block_size=16)
    assert [one.expected_cached_tokens for one in schedule.requests] == [0, 512, 0, 512]


def test_warm_up_takes_the_lengths_and_leaves_the_cache(tmp_path):
    path = blocks_trace(tmp_path, [(1024, [0, 1]), (512, [0])])
    schedule = drawn(path, warm_up_requests=6, block_size=16, concurrency=1)
    by_phase = {phase: [one for one in schedule.requests if one.phase is phase] for phase in Phase}
    assert {len(one.prompt) for one in by_phase[Phase.WARM_UP]} == {512, 1024}
    assert {one.expected_cached_tokens for one in by_phase[Phase.WARM_UP]} == {0}
    assert by_phase[Phase.MEASURED][0].expected_cached_tokens == 0


def test_another_salt_shares_no_block(tmp_path):
    path = blocks_trace(tmp_path, [(1024, [0, 1]), (1024, [0, 2])])
    one, other = (
        [
            planned.prompt
            for planned in draw(LoadSpec(trace=str(path)), vocab_size=512, max_model_len=None, salt=s).requests
        ]
        for s in ("a", "b")
    )
    cache = EndlessCache(8)
    assert [cache.cached_tokens(prompt) for prompt in one + other][2:] == [0, 512]


@needs_traces
def test_mooncakes_own_hit_rate():
    """Of the rows themselves: 35.7 % of this slice's tokens are in leading blocks seen before (36.6 % of all rows)."""
    spec = LoadSpec(trace=str(TRACES / "mooncake_conversation.csv.gz"), length_scale=1 / 32)
    trace = read_trace(spec)
    schedule = draw(spec, vocab_size=4096, max_model_len=None, block_size=16)
    found = sum(one.expected_cached_tokens for one in schedule.requests)
    tokens = sum(one.expected_prompt_tokens for one in schedule.requests)
    seen: set[int] = set()
    num_hits = 0
    for blocks in trace.blocks:
        num_hits += next((i for i, one in enumerate(blocks) if one not in seen), len(blocks))
        seen.update(blocks)
    assert found / tokens == pytest.approx(num_hits / sum(map(len, trace.blocks)), abs=0.01)
    assert found / tokens == pytest.approx(0.357, abs=0.01)


# ---- the window


@needs_traces
def test_a_window_of_a_real_trace():
    schedule = drawn(
        TRACES / "azure_2023_conv.csv.gz", max_model_len=2048, speed_up=10, duration_s=20, warm_up_s=2, cool_down_s=3
    )
    assert (schedule.measured_from_ns, schedule.measured_until_ns, schedule.duration_ns) == (2e9, 22e9, 25e9)
    trace = read_trace(LoadSpec(trace=str(TRACES / "azure_2023_conv.csv.gz")))
    measured = [one for one in schedule.requests if one.phase is Phase.MEASURED]
    assert len(measured) == np.sum(trace.at_s < 200)
    assert [one.at_ns for one in measured] == pytest.approx(2e9 + trace.at_s[: len(measured)] * 1e8, abs=1e3)
    assert all(len(one.prompt) + one.output_tokens <= 2048 for one in schedule.requests)
    assert any("cut" in note for note in schedule.notes)


def test_warm_up_is_even_and_cool_down_goes_on(tmp_path):
    lines = [f"{i / 2},{10 + i},3" for i in range(20)]
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens", *lines)
    schedule = drawn(path, warm_up_s=5, duration_s=8, cool_down_s=4)
    by_phase = {phase: [one for one in schedule.requests if one.phase is phase] for phase in Phase}
    warm_gaps = {after.at_ns - before.at_ns for before, after in pairwise(by_phase[Phase.WARM_UP])}
    assert (len(by_phase[Phase.WARM_UP]), warm_gaps) == (10, {500_000_000})
    assert [len(one.prompt) for one in by_phase[Phase.MEASURED]] == list(range(10, 26))
    assert [len(one.prompt) for one in by_phase[Phase.COOL_DOWN]] == [26, 27, 28, 29, 10, 11, 12, 13]
    whole = [one.at_ns for one in schedule.requests]
    assert whole == sorted(whole)
