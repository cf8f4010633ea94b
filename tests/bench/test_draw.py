"""A spec decides its schedule: the same again, windows that hold, manners by their shares, contradictions refused."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from splittime.bench.book.records import Phase
from splittime.bench.draw import draw
from splittime.bench.schedule import load_schedule, save
from splittime.bench.spec import LoadSpec
from splittime.bench.starts import MAX_POOL
from splittime.core.errors import ConfigError

OPEN = {"rate": 20.0, "duration_s": 10.0, "input_tokens": "20", "output_tokens": "5"}
CLOSED = {"concurrency": 4, "num_requests": 50, "input_tokens": "20", "output_tokens": "5"}


def drawn(salt: str | None = None, **fields):
    return draw(LoadSpec(**fields), vocab_size=4096, max_model_len=2048, block_size=16, salt=salt)


def drawn_or_none(salt: str | None, **fields):
    """For drawn specs: a short window may have no arrival, which is refused, and proves nothing here."""
    try:
        return drawn(salt, **fields)
    except ConfigError as error:
        assume("no request falls" not in str(error))
        raise


def in_phase(schedule, phase: Phase) -> list:
    return [one for one in schedule.requests if one.phase is phase]


specs = st.one_of(
    st.fixed_dictionaries(
        {
            "rate": st.floats(1, 60),
            "arrivals": st.sampled_from(["constant", "poisson", "gamma"]),
            "duration_s": st.none() | st.floats(2, 6),
            "warm_up_s": st.just(0.0) | st.floats(0.1, 3),
            "cool_down_s": st.just(0.0) | st.floats(0.1, 3),
            "seed": st.integers(0, 2**40),
            "input_tokens": st.sampled_from(["5", "uniform:1:50", "lognormal:30:1"]),
            "output_tokens": st.sampled_from(["1", "uniform:1:50"]),
            "cancel_probability": st.floats(0, 1),
            "slow_reader_share": st.floats(0, 1),
            "prefix_share": st.floats(0, 1),
        }
    )
    .map(lambda fields: fields | ({"cv": 2.0} if fields["arrivals"] == "gamma" else {}))
    .map(lambda fields: fields | ({"num_requests": 25} if fields["duration_s"] is None else {})),
    st.fixed_dictionaries(
        {
            "concurrency": st.integers(1, 8),
            "num_requests": st.integers(1, 40),
            "warm_up_requests": st.integers(0, 10),
            "cool_down_requests": st.integers(0, 10),
            "seed": st.integers(0, 2**40),
        }
    ),
)


@settings(max_examples=60, deadline=None)
@given(specs, st.none() | st.text(max_size=8))
def test_the_same_spec_draws_the_same(fields, salt):
    one = drawn_or_none(salt, **fields)
    assert one == drawn(salt, **fields)
    assert one.digest == drawn(salt, **fields).digest
    other = drawn_or_none(salt, **fields | {"seed": fields["seed"] + 1})
    assert one.digest != other.digest


@settings(max_examples=60, deadline=None)
@given(specs)
def test_phases_come_in_order_without_a_pause(fields):
    schedule = drawn_or_none(None, **fields)
    phases = list(Phase)
    places = [phases.index(one.phase) for one in schedule.requests]
    assert places == sorted(places)
    assert [one.index for one in schedule.requests] == list(range(len(places)))
    if "concurrency" in fields:
        counts = Counter(one.phase for one in schedule.requests)
        names = ("warm_up_requests", "num_requests", "cool_down_requests")
        assert [counts[phase] for phase in phases] == [fields[name] for name in names]
        assert {one.at_ns for one in schedule.requests} == {None}
        return
    begin, end = schedule.measured_from_ns, schedule.measured_until_ns
    assert begin == round(fields["warm_up_s"] * 1e9)
    assert schedule.duration_ns == end + round(fields["cool_down_s"] * 1e9)
    for one in schedule.requests:
        assert (one.phase is Phase.MEASURED) == (begin <= one.at_ns < end)
        assert 0 <= one.at_ns < schedule.duration_ns


@pytest.mark.parametrize("rate", [1.0, 1e9])
def test_no_edge_lies_within_an_instant(rate):
    """At 10^9/s and a high variation many arrivals share a nanosecond, also the last before an edge and the first
    behind it."""
    for seed in range(20):
        fields = {"warm_up_requests": 20, "num_requests": 20, "cool_down_s": 20 / rate, "seed": seed}
        schedule = drawn("s", rate=rate, arrivals="gamma", cv=8.0, **fields)
        begin, end = schedule.measured_from_ns, schedule.measured_until_ns
        assert [len(in_phase(schedule, phase)) for phase in (Phase.WARM_UP, Phase.MEASURED)] == [20, 20]
        assert all((one.phase is Phase.MEASURED) == (begin <= one.at_ns < end) for one in schedule.requests)
        instants = [one.at_ns for one in schedule.requests]
        assert instants == sorted(instants)


def test_digests_are_kept():
    """They change if a seed comes to mean something else, or `Planned` gets a field: older runs are no pairs then."""
    assert drawn("salt", **OPEN, prefix_share=0.5).digest == "c7e027260b4a3b81"
    assert drawn("salt", **CLOSED).digest == "ee3c10c1b459ba67"
    assert drawn("salt", **OPEN, turns="2", arrivals="gamma", cv=2.0).digest == "e60b99db456802f7"


def test_a_salt_changes_what_is_sent_and_not_when():
    one, other = drawn("one", **OPEN), drawn("other", **OPEN)
    assert one.digest == other.digest
    assert one.digest != drawn("one", **OPEN | {"input_tokens": "31"}).digest
    assert [a.at_ns for a in one.requests] == [b.at_ns for b in other.requests]
    assert all(
        a.prompt[8:] == b.prompt[8:] and a.prompt[:8] != b.prompt[:8]
        for a, b in zip(one.requests, other.requests, strict=True)
    )


def test_another_rate_sends_the_same_prompts():
    slow, fast = (drawn(**CLOSED | {"concurrency": None, "rate": rate}) for rate in (1.0, 50.0))
    assert [a.prompt for a in slow.requests] == [b.prompt for b in fast.requests]


def test_saved_and_read_again(tmp_path):
    schedule = drawn(**OPEN, turns="2", think_s="1", cancel_probability=0.5, slow_reader_share=0.5, prefix_share=0.5)
    save(schedule, tmp_path / "s.jsonl")
    assert load_schedule(tmp_path / "s.jsonl") == schedule


def test_a_window_by_number_ends_where_the_next_arrival_would_come():
    schedule = drawn(rate=10.0, num_requests=200, arrivals="constant", warm_up_requests=30, input_tokens="5")
    assert len(in_phase(schedule, Phase.MEASURED)) == 200
    assert (schedule.measured_from_ns, schedule.measured_until_ns) == (3_000_000_000, 23_000_000_000)


def test_the_rate_over_the_window_is_unbiased():
    """Mean over seeds of n / length is the rate, times n / (n - 1) for the mean of an inverse gamma."""
    rates = []
    for seed in range(300):
        schedule = drawn(rate=10.0, num_requests=20, seed=seed, input_tokens="1", output_tokens="1")
        rates.append(20e9 / (schedule.measured_until_ns - schedule.measured_from_ns))
    assert np.mean(rates) == pytest.approx(10 * 20 / 19, rel=0.05)


def test_a_ramp_begins_with_the_window():
    schedule = drawn(rate=1.0, rate_end=99.0, warm_up_s=50.0, duration_s=60.0, cool_down_s=10.0, input_tokens="1")
    counts = [len(in_phase(schedule, phase)) for phase in Phase]
    for found, want in zip(counts, (50, 3000, 990), strict=True):
        assert found == pytest.approx(want, abs=4 * math.sqrt(want))


def test_manners_have_their_shares_and_lengths():
    schedule = drawn(
        rate=200.0,
        num_requests=4000,
        cancel_probability=0.25,
        cancel_after_s="exponential:2",
        slow_reader_share=0.1,
        slow_reader_delay_ms=70.0,
        input_tokens="1",
    )
    after_s = np.array([one.cancel_after_ns / 1e9 for one in schedule.requests if one.cancel_after_ns is not None])
    assert len(after_s) / 4000 == pytest.approx(0.25, abs=0.03)
    assert (np.mean(after_s), np.std(after_s)) == pytest.approx((2.0, 2.0), rel=0.12)
    delays = Counter(one.read_delay_ns for one in schedule.requests)
    assert set(delays) == {0, 70_000_000}
    assert delays[70_000_000] / 4000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("probability", "want"), [(0.0, {False}), (1.0, {True})])
def test_nobody_and_everybody(probability, want):
    schedule = drawn(**OPEN, cancel_probability=probability, slow_reader_share=probability)
    assert {one.cancel_after_ns is not None for one in schedule.requests} == want
    assert {one.read_delay_ns > 0 for one in schedule.requests} == want


def test_a_closed_loop_by_time_has_a_pool_that_should_last():
    schedule = drawn(concurrency=2, duration_s=10.0, input_tokens="1")
    assert (schedule.duration_ns, schedule.measured_from_ns) == (10_000_000_000, None)
    assert len(schedule.requests) == 1000
    assert len(drawn(concurrency=1000, duration_s=10.0, input_tokens="1").requests) == MAX_POOL


def test_settings_say_what_was_asked_and_what_it_came_to():
    settings_ = drawn("x", **OPEN).settings
    assert settings_["rate"] == 20.0
    assert (settings_["arrivals"], settings_["workload"], settings_["salt"]) == ("poisson", "synthetic", "x")
    assert "cv" not in settings_


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "rate"),
        ({"rate": 0.0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"rate": 1e6, "duration_s": 1e6}, "rate"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 2, "rate": 1.0}, "rate"),
        ({"concurrency": 2, "arrivals": "poisson"}, "arrivals"),
        ({"concurrency": 2, "warm_up_s": 1.0}, "warm_up_s"),
        ({"rate": 1.0, "cool_down_requests": 1}, "cool_down_requests"),
        ({"rate": 1.0, "num_requests": 0}, "num_requests"),
        ({"rate": 1.0, "num_requests": 5, "duration_s": 5.0}, "num_requests"),
        ({"rate": 1.0, "warm_up_s": 1.0, "warm_up_requests": 3}, "warm_up_requests"),
        ({"rate": 1.0, "arrivals": "bursty"}, "arrivals"),
        ({"rate": 1.0, "arrivals": "gamma"}, "cv"),
        ({"rate": 1.0, "arrivals": "gamma", "cv": -1.0}, "cv"),
        ({"rate": 1.0, "cv": 2.0}, "cv"),
        ({"rate": 1.0, "ramp_s": 2.0}, "ramp_s"),
        ({"rate": 1.0, "rate_end": 2.0, "num_requests": 9}, "ramp_s"),
        ({"rate": 1.0, "rate_end": 2.0, "warm_up_requests": 9}, "warm_up_requests"),
        ({"arrivals": "trace"}, "trace"),
        ({"rate": 1.0, "arrivals": "trace", "trace": "x.csv"}, "rate"),
        ({"rate": 1.0, "trace": "x.csv", "workload": "synthetic"}, "trace"),
        ({"concurrency": 1, "trace": "x.csv", "workload": "synthetic"}, "trace"),
        ({"rate": 1.0, "speed_up": 2.0}, "speed_up"),
        ({"trace": "x.csv", "input_tokens": "5"}, "input_tokens"),
        ({"trace": "x.csv", "output_tokens": "5"}, "output_tokens"),
        ({"trace": "x.csv", "turns": "3"}, "turns"),
        ({"trace": "x.csv", "speed_up": 0.0}, "speed_up"),
        ({"trace": "x.csv", "speed_up": 2.0, "rate": 5.0}, "speed_up"),
        ({"trace": "x.csv", "speed_up": 2.0, "concurrency": 5}, "speed_up"),
        ({"trace": "x.csv", "length_scale": 2.0, "workload": "synthetic"}, "length_scale"),
        ({"rate": 1.0, "workload": "sharegpt"}, "dataset"),
        ({"rate": 1.0, "workload": "synthetic", "dataset": "x.json"}, "dataset"),
        ({"rate": 1.0, "dataset": "x.json", "prompt_form": "ids"}, "prompt_form"),
        ({"rate": 1.0, "dataset": "x.jsonl", "prefix_share": 0.5}, "prefix_share"),
        ({"rate": 1.0, "lengths_file": "x.csv", "output_tokens": "5"}, "output_tokens"),
        ({"rate": 1.0, "prefix_share": 1.5}, "prefix_share"),
        ({"rate": 1.0, "prefix_groups": 0}, "prefix_groups"),
        ({"rate": 1.0, "cancel_probability": 2.0}, "cancel_probability"),
        ({"rate": 1.0, "cancel_after_s": "-1"}, "cancel_after_s"),
        ({"rate": 1.0, "slow_reader_share": -0.1}, "slow_reader_share"),
        ({"rate": 1.0, "think_s": "2"}, "think_s"),
        ({"rate": 1.0, "seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, name):
    with pytest.raises(ConfigError) as caught:
        drawn(**fields)
    assert caught.value.info.param == name
    assert caught.value.info.hint or caught.value.info.limit


def test_more_tokens_than_memory_holds_are_refused():
    with pytest.raises(ConfigError, match="too many") as caught:
        draw(LoadSpec(concurrency=1, num_requests=1000, input_tokens="1000000"), vocab_size=99, max_model_len=None)
    assert caught.value.info.limit < 1e9


def test_a_window_that_nothing_falls_into_is_refused():
    with pytest.raises(ConfigError, match="no request falls"):
        drawn(rate=0.001, duration_s=0.5)
