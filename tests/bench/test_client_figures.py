"""The client's figures: each by hand, arrays against the definition, and what counts where."""

from itertools import pairwise

import client_runs as runs
import msgspec
import numpy as np
import pytest
from client_runs import MS, S
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book import figures, requests
from splittime.bench.book.figures import DEFINITIONS, RateWindow, Trend, concurrency, drift, rate, rate_window
from splittime.bench.book.records import Ending, Phase
from splittime.bench.book.requests import PER_REQUEST, SERIES, all_series, complete, per_request, series, token_arrivals
from splittime.ledger import derive
from splittime.stats.intervals import Estimate


def token_gaps_ns(outcome):
    if outcome.chunk_tokens is None or len(outcome.chunk_tokens) != len(outcome.chunk_ns):
        return []
    arrivals_ns = [ns for ns, n in zip(outcome.chunk_ns, outcome.chunk_tokens, strict=True) for _ in range(n)]
    return [after - before for before, after in pairwise(arrivals_ns)]


def test_each_figure_of_one_request_by_hand():
    one = runs.outcome()
    assert requests.response_ttft_ns(one) == 60 * MS
    assert requests.service_ttft_ns(one) == 50 * MS
    assert requests.response_ns(one) == 140 * MS
    assert requests.service_ns(one) == 130 * MS
    assert requests.schedule_lag_ns(one) == 4 * MS
    assert requests.tpot_ns(one) == pytest.approx((140 - 60) * MS / (6 - 2))
    assert requests.chunk_gaps_ns(one) == [20 * MS, 50 * MS]
    assert token_gaps_ns(one) == [0, 20 * MS, 0, 0, 50 * MS]
    assert requests.max_stall_ns(one) == 50 * MS


def test_what_was_held_back_on_purpose_is_no_lag_of_the_client():
    assert requests.schedule_lag_ns(runs.outcome(held_ns=3 * MS)) == 1 * MS
    assert requests.response_ttft_ns(runs.outcome(held_ns=3 * MS)) == 60 * MS


def test_what_did_not_happen_is_none():
    nothing = runs.outcome(
        ending=Ending.UNSENT, picked_up_ns=None, sent_ns=None, headers_ns=None, chunk_ns=(), chunk_tokens=None,
        end_ns=None, output_tokens=None,
    )  # fmt: skip
    for function in (*PER_REQUEST.values(), requests.max_stall_ns, requests.first_chunk_tokens):
        assert function(nothing) is None
    assert requests.chunk_gaps_ns(nothing) == []


@pytest.mark.parametrize(
    ("chunks", "tokens", "first"),
    [
        (100, 100, 1),  # a chunk a token
        (99, 100, 1),  # the last token brought no text
        (96, 101, 1),  # 5 of 100 later tokens unseen: allowed
        (95, 101, None),  # 6 of 100: not
        (101, 100, 1),  # an empty chunk more
        (3, 6, None),
        (1, 6, None),
    ],
)
def test_tokens_of_the_first_chunk_where_none_are_told(chunks, tokens, first):
    chunk_ns = tuple(range(MS, (chunks + 1) * MS, MS))
    one = runs.outcome(chunk_ns=chunk_ns, chunk_tokens=None, output_tokens=tokens, end_ns=chunk_ns[-1])
    assert requests.first_chunk_tokens(one) == first
    assert (requests.tpot_ns(one) is None) is (first is None)


def test_tokens_are_summed_from_chunks_where_no_usage_is_told():
    assert requests.output_tokens(runs.outcome(output_tokens=None)) == 6
    assert requests.tpot_ns(runs.outcome(output_tokens=None)) == pytest.approx(20 * MS)


def test_one_chunk_with_all_tokens_has_no_tpot():
    assert requests.tpot_ns(runs.outcome(chunk_ns=(60 * MS,), chunk_tokens=(6,))) is None


@settings(max_examples=150, deadline=None)
@given(st.lists(runs.outcomes(), max_size=12))
def test_arrays_say_what_the_definitions_say(outcomes):
    for name, function in {**PER_REQUEST, "max_stall": requests.max_stall_ns}.items():
        expected = [np.nan if (value := function(one)) is None else value for one in outcomes]
        np.testing.assert_allclose(per_request(outcomes, name), expected)
    gaps = series(outcomes, "chunk_gap")
    assert gaps.values.tolist() == [gap for one in outcomes for gap in requests.chunk_gaps_ns(one)]
    assert gaps.request.tolist() == [i for i, one in enumerate(outcomes) for _ in requests.chunk_gaps_ns(one)]
    chunks, tokens = token_arrivals(outcomes)
    assert len(chunks) == len(tokens) == sum(len(one.chunk_ns) for one in outcomes)


@settings(max_examples=100, deadline=None)
@given(st.lists(runs.outcomes(), max_size=12))
def test_token_gaps_as_arrays_hold_the_same_values(outcomes):
    """Chunks of no token are not of the definition's world; a server that sends them tells no chunk tokens."""
    outcomes = [one for one in outcomes if one.chunk_tokens is None or 0 not in one.chunk_tokens]
    expected = sorted(gap for one in outcomes for gap in token_gaps_ns(one))
    assert sorted(series(outcomes, "token_gap").values.tolist()) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(runs.outcomes(), max_size=12), st.booleans())
def test_all_series_at_once_are_the_series_one_by_one(outcomes, is_token_a_chunk):
    if is_token_a_chunk:
        outcomes = [msgspec.structs.replace(one, chunk_tokens=(1,) * len(one.chunk_ns)) for one in outcomes]
    found = all_series(outcomes)
    assert set(found) == set(SERIES)
    for name in SERIES:
        expected = series(outcomes, name)
        np.testing.assert_array_equal(found[name].values, expected.values)
        np.testing.assert_array_equal(found[name].request, expected.request)
        assert found[name].num_requests == expected.num_requests


@settings(max_examples=60, deadline=None)
@given(st.lists(runs.outcomes(), max_size=15, unique_by=lambda one: one.index))
def test_a_summary_of_any_run_is_made_and_adds_up(outcomes):
    run = runs.run(outcomes, slo={"ttft": 50.0 * MS, "tpot": 10.0 * MS})
    found = figures.summary(run)
    assert sum(found.endings.values()) == found.intended == len(run.measured())
    assert found.counted == found.intended - found.endings["cancelled"]
    assert found.errors == found.counted - found.endings["complete"]
    for name, figure in found.figures.items():
        values = series(complete(run.measured()), name).values.tolist()
        assert figure.count == len(values)
        for percentile, estimate in figure.percentiles.items():
            assert estimate.value == derive.percentile(values, float(percentile[1:]))
    if found.goodput is not None:
        assert found.goodput.intended == found.counted
        assert found.goodput.good <= found.endings["complete"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=figures.Summary) == found


def test_only_complete_requests_of_the_measured_phase_and_the_arm_have_latencies():
    others = [
        runs.outcome(1, phase=Phase.WARM_UP, end_ns=10 * S),
        runs.outcome(2, phase=Phase.COOL_DOWN, end_ns=10 * S),
        runs.outcome(3, ending=Ending.CANCELLED, end_ns=10 * S),
        runs.outcome(4, ending=Ending.FAILED, end_ns=10 * S),
        runs.outcome(5, arm=1, end_ns=10 * S),
    ]
    found = figures.summary(runs.run([runs.outcome(0), *others]))
    assert set(found.figures) == set(SERIES)
    assert {name: figure.num_requests for name, figure in found.figures.items()} == dict.fromkeys(SERIES, 1)
    assert found.figures["e2e"].max == 140 * MS


def test_goodput_counts_every_intended_request_but_those_that_the_schedule_cancelled():
    good = [runs.outcome(i) for i in range(6)]
    late = runs.outcome(10, chunk_ns=(61 * MS, 80 * MS, 130 * MS))
    lost = [runs.outcome(20 + i, ending=ending) for i, ending in enumerate(Ending) if ending is not Ending.COMPLETE]
    found = figures.goodput(runs.run([*good, late, *lost], slo={"ttft": 60.0 * MS, "ttft_p99": 1.0}))
    assert found is not None
    assert (found.good, found.intended) == (6, 6 + 1 + 4)
    assert found.limits == {"ttft": 60.0 * MS}


@pytest.mark.parametrize(
    ("changes", "limits", "is_good"),
    [
        ({}, {"ttft": 60 * MS, "service_ttft": 50 * MS, "e2e": 140 * MS, "tpot": 20 * MS, "max_stall": 50 * MS}, True),
        ({}, {"ttft": 60 * MS - 1}, False),
        ({}, {"service_ttft": 50 * MS - 1}, False),
        ({}, {"e2e": 140 * MS - 1}, False),
        ({}, {"service_e2e": 130 * MS - 1}, False),
        ({}, {"tpot": 20 * MS - 1}, False),
        ({}, {"max_stall": 50 * MS - 1}, False),
        ({"chunk_ns": (60 * MS,), "chunk_tokens": (1,), "output_tokens": 1}, {"tpot": 1, "max_stall": 1}, True),
        ({"chunk_ns": (60 * MS,), "chunk_tokens": (6,)}, {"tpot": 1}, True),  # all at once: nothing came late
        ({"chunk_tokens": None}, {"tpot": S}, False),  # cannot be judged
        ({"chunk_ns": (), "chunk_tokens": None}, {"ttft": S}, False),
        ({"ending": Ending.TIMED_OUT}, {}, False),
    ],
)
def test_a_good_request_is_within_every_limit(changes, limits, is_good):
    assert requests.is_good(runs.outcome(**changes), limits) is is_good


def test_a_rate_is_of_what_arrived_in_the_window_whoever_asked_for_it():
    """One request a second, each of 2 s with a token each 0.1 s: two under way at any time make 20 tokens a second.

    The measured requests alone have half of their last one's tokens after the window; the wall time has both ramps.
    """
    requests = []
    for i in range(30):
        phase = Phase.WARM_UP if i < 5 else Phase.MEASURED if i < 25 else Phase.COOL_DOWN
        chunk_ns = tuple(i * S + k * S // 10 for k in range(20))
        requests.append(
            runs.outcome(
                i,
                phase=phase,
                intended_ns=i * S,
                sent_ns=i * S,
                chunk_ns=chunk_ns,
                chunk_tokens=(1,) * 20,
                end_ns=i * S + 2 * S,
                output_tokens=20,
            )
        )
    found = figures.summary(runs.run(requests, measured_from_ns=5 * S, measured_until_ns=25 * S))
    assert found.output_token_rate.value == pytest.approx(20.0)
    assert found.request_rate.value == pytest.approx(1.0)
    assert found.concurrency.mean == pytest.approx(2.0)
    assert found.concurrency.peak == 2
    assert not found.window.is_makespan


def test_tokens_of_chunks_that_tell_none_are_spread_over_them():
    one = runs.outcome(chunk_tokens=None, output_tokens=12)
    assert token_arrivals([one])[1].tolist() == [4.0, 4.0, 4.0]
    assert token_arrivals([runs.outcome(chunk_tokens=None, output_tokens=None)])[1].tolist() == [1.0, 1.0, 1.0]


def test_a_window_shorter_than_a_request_is_widened_to_the_last_end():
    burst = [runs.outcome(i, intended_ns=0) for i in range(3)]
    assert rate_window(runs.run(burst, measured_until_ns=1)) == RateWindow(0, 140 * MS, is_makespan=True)


def test_a_stopped_run_has_no_window_after_its_last_end():
    stopped = runs.run([runs.outcome(i) for i in range(3)], measured_until_ns=100 * S, stopped="overload")
    assert rate_window(stopped).until_ns == 140 * MS


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 500)), max_size=30))
def test_concurrency_against_counting_each_instant(spans):
    requests = [runs.outcome(i, sent_ns=begin, end_ns=begin + length) for i, (begin, length) in enumerate(spans)]
    window = RateWindow(500, 1500)
    counts = [sum(begin <= at < begin + length for begin, length in spans) for at in range(500, 1500)]
    found = concurrency(requests, window)
    assert found.peak == max(counts)
    assert found.mean == pytest.approx(np.mean(counts))


def test_buckets_are_by_prompt_length_as_the_server_told_it():
    requests = [runs.outcome(i, prompt_tokens=tokens) for i, tokens in enumerate((20, 30, 900, None))]
    requests[3] = msgspec.structs.replace(requests[3], expected_prompt_tokens=10)
    found = figures.summary(runs.run(requests))
    assert list(found.buckets) == ["1-16", "17-32", "513-1024"]
    assert found.buckets["17-32"]["ttft"].count == 2


def test_a_percentile_far_out_has_no_upper_end_of_so_few_requests():
    found = figures.summary(runs.drawn_run(1, size=200, dependence=0.0)).figures["ttft"]
    assert found.percentiles["p50"].interval.high is not None
    assert found.percentiles["p99"].interval.low is not None
    assert found.percentiles["p99"].interval.high is None


def test_intervals_hold_the_estimate_and_come_out_the_same_again():
    run = runs.drawn_run(2)
    found = figures.summary(run)
    for figure in found.figures.values():
        for estimate in (figure.mean, *figure.percentiles.values()):
            low, high = estimate.interval.low, estimate.interval.high
            assert low is None or low <= estimate.value
            assert high is None or high >= estimate.value
    assert figures.summary(run) == found


def test_drift_is_seen_and_not_imagined():
    rng = np.random.default_rng(0)
    calm = 100 + runs.ar1(rng, 400, 0.5)
    rising = calm * np.linspace(1.0, 1.6, 400)
    assert drift(calm).trend is Trend.STEADY
    assert drift(rising).trend is Trend.RISING
    assert drift(rising[::-1]).trend is Trend.FALLING
    assert drift(calm[:20]).trend is Trend.UNCLEAR
    assert drift(np.exp(2 * runs.ar1(rng, 60, 0.5))).trend is Trend.UNCLEAR


def test_no_rate_is_below_zero():
    found = rate(np.full(8, S // 2), np.ones(8), RateWindow(0, S))  # all at once: the widened interval would pass 0
    assert found.interval is not None
    assert found.interval.low >= 0.0


def test_a_rate_of_nothing_is_zero_without_an_interval():
    nothing = np.array([], dtype=np.int64)
    assert rate(nothing, nothing.astype(float), RateWindow(0, S)) == Estimate(0.0)


def test_every_figure_is_defined():
    said = " ".join(f"{name}: {sentence}" for name, sentence in DEFINITIONS).lower()
    for name in ("ttft", "tpot", "chunk gap", "token gap", "itl", "max stall", "schedule lag", "e2e", "goodput"):
        assert name in said
