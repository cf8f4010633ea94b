"""Verdicts: wrong no more often than they say, right where there is a difference, silent where nobody can tell."""

import io

import client_runs as runs
import msgspec
import numpy as np
import pytest
from client_runs import MS
from rich.console import Console

from splittime.bench.book.metrics import parse_metric
from splittime.bench.book.records import Arm, Ending, RunCheck
from splittime.bench.draw import draw
from splittime.bench.spec import LoadSpec
from splittime.cli.bench_compare import render_comparison
from splittime.core.errors import ConfigError
from splittime.diagnose.compare import compare, compare_arms, judge, overall
from splittime.diagnose.comparison import DEFAULT_METRICS, EXIT_CODES, Comparison, Design, Verdict
from splittime.stats.intervals import Interval, welch

QUICK = {"metrics": ("ttft_mean",)}


def two_runs(seed: int, slower: float = 1.0, size: int = 150, dependence: float = 0.4):
    """Of two schedules."""
    return runs.drawn_run(2 * seed, size, dependence=dependence), runs.drawn_run(2 * seed + 1, size, slower, dependence)


def of_one_schedule(seed: int, slower: float = 1.0, size: int = 150):
    a = runs.drawn_run(seed, size, schedule_digest="d", noise=10_000 + seed)
    return a, runs.drawn_run(seed, size, slower, schedule_digest="d", noise=20_000 + seed)


@pytest.mark.parametrize(("make", "seeds", "most"), [(two_runs, 200, 20), (of_one_schedule, 100, 12)])
def test_no_difference_is_called_one_no_more_often_than_stated(make, seeds, most):
    """At 95 % one of 20 in the mean, and `most` is three standard errors more."""
    verdicts = [compare(*make(seed), **QUICK).verdict for seed in range(seeds)]
    assert sum(verdict in (Verdict.BETTER, Verdict.WORSE) for verdict in verdicts) <= most


def test_all_metrics_together_are_wrong_no_more_often_than_stated():
    """Of 60 at 95 %: 3 in the mean, up to 8 within three standard errors."""
    metrics = ("e2e_mean", "ttft_p50", "tpot_p50", "max_stall_mean")
    found = [compare(*two_runs(s), metrics=metrics).verdict for s in range(60)]
    assert sum(verdict in (Verdict.BETTER, Verdict.WORSE) for verdict in found) <= 8


@pytest.mark.parametrize(("slower", "verdict"), [(1.1, Verdict.WORSE), (1 / 1.1, Verdict.BETTER)])
def test_a_difference_of_10_percent_is_found(slower, verdict):
    paired = [compare(*of_one_schedule(seed, slower), **QUICK) for seed in range(10)]
    unpaired = [compare(*two_runs(seed, slower, 2000), **QUICK) for seed in range(5)]
    for found in (paired, unpaired):
        assert sum(one.verdict is verdict for one in found) >= 0.8 * len(found)
    assert {one.design for one in paired} == {Design.PAIRED}
    assert {one.design for one in unpaired} == {Design.UNPAIRED}


def test_pairing_tells_what_two_runs_apart_cannot():
    a, b = of_one_schedule(3, 1.05)
    paired = compare(a, b, **QUICK).metrics[0].interval
    apart = compare(a, msgspec.structs.replace(b, schedule_digest="other"), **QUICK).metrics[0].interval
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)


def test_equivalent_with_enough_data_and_inconclusive_with_little():
    assert compare(*two_runs(1, size=4000, dependence=0.0), **QUICK).verdict is Verdict.EQUIVALENT
    assert compare(*two_runs(1, size=60), **QUICK).verdict is Verdict.INCONCLUSIVE


def test_a_p99_of_few_requests_says_how_many_it_needs():
    found = compare(*two_runs(1), metrics=("ttft_p99",)).metrics[0]
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.interval == Interval(None, None)
    assert "about" in found.why
    assert found.a > 0


def test_a_void_run_says_nothing_and_says_why():
    a, b = two_runs(1, 1.5)
    assert compare(a, b, **QUICK).verdict is Verdict.WORSE
    bad = RunCheck(name="cached", ok=False, value=0.9, limit=0.05, unit="", sentence="prompts were seen before.")
    found = compare(a, msgspec.structs.replace(b, checks=(bad,)), **QUICK)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert all(one.verdict is Verdict.INCONCLUSIVE for one in found.metrics)
    assert found.why == "B is void: prompts were seen before."
    note = msgspec.structs.replace(b, checks=(msgspec.structs.replace(bad, voids=False),))
    assert compare(a, note, **QUICK).verdict is Verdict.WORSE


@pytest.mark.parametrize(
    ("slower", "late_ms", "verdict"),
    [(11.0, 7.0, Verdict.WORSE), (1.5, 7.0, Verdict.WORSE), (1.5, 40.0, Verdict.INCONCLUSIVE)],
)
def test_lateness_undoes_a_verdict_only_if_it_may_be_the_whole_difference(slower, late_ms, verdict):
    """TTFT is about 50 ms in A; B is void by a client that was late."""
    a, b = two_runs(1, slower)
    late = RunCheck(name="loop_lag", ok=False, value=late_ms, limit=2.0, unit="ms", sentence="the loop was late.")
    void = msgspec.structs.replace(b, checks=(late,))
    found = compare(a, void, **QUICK)
    assert found.verdict is verdict
    assert any("client was late" in note for note in found.notes)
    told = msgspec.structs.replace(void, loop_lag_ns={"mean": 1e5, "p99": late_ms * MS})
    assert compare(a, told, **QUICK).verdict is Verdict.WORSE  # it was late now and then, and 0.1 ms in the mean


def test_the_same_command_run_again_is_a_pair():
    """The salt changes texts, so that no run finds another's in a cache, and not what is asked and when."""
    spec = LoadSpec(rate=20.0, duration_s=10.0, input_tokens="20", output_tokens="5")
    digests = [draw(spec, vocab_size=4096, max_model_len=2048, salt=salt).digest for salt in ("one", "two")]
    a, b = of_one_schedule(3, 1.05)
    again = [msgspec.structs.replace(run, schedule_digest=one) for run, one in zip((a, b), digests, strict=True)]
    assert compare(*again, **QUICK).design is Design.PAIRED


def test_two_servers_of_one_run_are_paired_by_request():
    a, b = of_one_schedule(5, 1.2)
    second = tuple(msgspec.structs.replace(one, arm=1) for one in b.outcomes)
    arms = (Arm(url="http://a", kind="mock"), Arm(url="http://b", kind="mock"))
    both = msgspec.structs.replace(a, outcomes=a.outcomes + second, arms=arms, schedule_digest="")
    found = compare_arms(both, metrics=("ttft_mean", "throughput", "error_rate"))
    assert (found.design, found.num_pairs, found.verdict) == (Design.PAIRED, 150, Verdict.WORSE)
    assert (found.label_a, found.label_b) == ("http://a", "http://b")
    with pytest.raises(ConfigError, match="1 server"):
        compare_arms(a)


def test_several_runs_a_side_carry_what_differs_from_start_to_start():
    """Each start is up to some 20 % off: one run a side would be sure of a difference that is none."""
    starts = np.random.default_rng(7).normal(1.0, 0.1, 6)
    made = [runs.drawn_run(50 + i, 300, slower, 0.0) for i, slower in enumerate(starts)]
    found = compare(made[::2], made[1::2], **QUICK)
    assert (found.design, found.runs_a, found.runs_b) == (Design.RUNS, 3, 3)
    assert found.verdict is Verdict.INCONCLUSIVE
    slow = [runs.drawn_run(80 + i, 300, 2.0 * slower, 0.0) for i, slower in enumerate(starts[:3])]
    assert compare(made[::2], slow, **QUICK).verdict is Verdict.WORSE


def test_welch_is_the_t_interval_where_both_sides_are_alike():
    """n = 3 and equal variances: 4 degrees of freedom; se = sqrt(2/3), t = 2.776."""
    low, high = welch(np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0]), 0.95)
    assert (low, high) == pytest.approx((1 - 2.776 * (2 / 3) ** 0.5, 1 + 2.776 * (2 / 3) ** 0.5), rel=1e-3)
    assert welch(np.ones(3), np.full(3, 2.0), 0.95) == (1.0, 1.0)


def test_welch_intervals_cover():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        low, high = welch(rng.normal(0, 1, 3), rng.normal(0, 3, 4), 0.95)
        hits += low <= 0 <= high
    assert 0.92 <= hits / 400 <= 0.985


@pytest.mark.parametrize(
    ("low", "high", "name", "verdict"),
    [
        (0.97, 1.04, "ttft_p50", Verdict.EQUIVALENT),
        (1.01, 1.04, "ttft_p50", Verdict.EQUIVALENT),  # certain, and too small to matter
        (1.01, 1.06, "ttft_p50", Verdict.WORSE),
        (0.90, 0.99, "ttft_p50", Verdict.BETTER),
        (0.90, 1.04, "ttft_p50", Verdict.INCONCLUSIVE),
        (0.97, 1.06, "ttft_p50", Verdict.INCONCLUSIVE),
        (0.96, 1.04, "throughput", Verdict.EQUIVALENT),
        (1.10, 1.20, "throughput", Verdict.BETTER),
        (0.80, 0.90, "throughput", Verdict.WORSE),
        (None, 0.90, "ttft_p99", Verdict.INCONCLUSIVE),
        (1.10, None, "ttft_p99", Verdict.INCONCLUSIVE),
        (-0.009, 0.009, "error_rate", Verdict.EQUIVALENT),
        (0.001, 0.05, "error_rate", Verdict.WORSE),
        (-0.05, -0.001, "error_rate", Verdict.BETTER),
        (-0.02, 0.001, "error_rate", Verdict.INCONCLUSIVE),
        (0.02, 0.05, "goodput", Verdict.BETTER),
    ],
)
def test_verdict_of_an_interval(low, high, name, verdict):
    assert judge(Interval(low, high), 0.05, parse_metric(name)) is verdict


def test_the_overall_verdict_is_worse_if_anything_is_and_else_the_primary_ones():
    a, b = two_runs(1)
    plain = compare(a, b, metrics=("ttft_mean", "tpot_mean", "e2e_mean")).metrics

    def verdict_of(*verdicts):
        return overall([msgspec.structs.replace(one, verdict=v) for one, v in zip(plain, verdicts, strict=False)])

    better, worse, equal, unknown = Verdict.BETTER, Verdict.WORSE, Verdict.EQUIVALENT, Verdict.INCONCLUSIVE
    assert verdict_of(better, worse, equal) == (worse, "tpot_mean got worse, though ttft_mean got better.")
    assert verdict_of(equal, better, unknown)[0] is better
    assert verdict_of(equal, unknown, unknown)[0] is equal
    assert verdict_of(unknown, equal, equal)[0] is unknown


def test_errors_are_compared_by_their_difference():
    a, b = two_runs(1, size=400)
    broken = tuple(
        msgspec.structs.replace(one, ending=Ending.FAILED) if one.index % 5 == 0 else one for one in b.outcomes
    )
    found = compare(a, msgspec.structs.replace(b, outcomes=broken), metrics=("error_rate",))
    assert found.metrics[0].effect == pytest.approx(0.2)
    assert found.verdict is Verdict.WORSE
    assert any("80 of 400" in note for note in found.notes)


def test_no_errors_in_few_requests_are_not_proof_of_none():
    found = [compare(*two_runs(1, size=size), metrics=("error_rate",)) for size in (60, 1000)]
    assert [one.verdict for one in found] == [Verdict.INCONCLUSIVE, Verdict.EQUIVALENT]
    assert found[0].metrics[0].interval.high == pytest.approx(3.69 / 60, rel=0.01)  # -ln(0.025) / n


def test_goodput_is_by_given_limits_or_those_of_the_run():
    a, b = two_runs(1, 1.5, size=400)
    limits = {"ttft": 70.0 * MS}
    assert compare(a, b, metrics=("goodput",), limits=limits).verdict is Verdict.WORSE
    own = msgspec.structs.replace(a, slo=limits)
    assert compare(own, b, metrics=("goodput",)).verdict is Verdict.WORSE
    with pytest.raises(ConfigError, match="goodput needs a limit"):
        compare(a, b, metrics=("goodput",))


@pytest.mark.parametrize("metric", ["chunk_gap_p90", "token_gap_mean", "max_stall_p50", "tpot_p50", "service_e2e_mean"])
def test_every_kind_of_metric_can_be_paired_and_not(metric):
    a, b = of_one_schedule(1, 1.5)
    for other in (b, msgspec.structs.replace(b, schedule_digest="other")):
        assert compare(a, other, metrics=(metric,)).verdict is Verdict.WORSE


def test_rates_are_compared():
    a, b = of_one_schedule(1)
    slow = tuple(
        msgspec.structs.replace(one, end_ns=2 * one.end_ns, chunk_ns=tuple(2 * ns for ns in one.chunk_ns))
        for one in b.outcomes
    )
    stretched = msgspec.structs.replace(b, outcomes=slow, measured_until_ns=2 * b.measured_until_ns)
    found = compare(a, stretched, metrics=("throughput", "request_rate"))
    assert [one.verdict for one in found.metrics] == [Verdict.WORSE, Verdict.WORSE]
    assert found.metrics[0].effect == pytest.approx(0.5, abs=0.05)


def test_what_cannot_be_told_is_inconclusive():
    a, b = two_runs(1)
    untold = tuple(msgspec.structs.replace(one, chunk_tokens=None, output_tokens=None) for one in b.outcomes)
    found = compare(a, msgspec.structs.replace(b, outcomes=untold), metrics=("tpot_mean", "token_gap_mean"))
    assert [one.verdict for one in found.metrics] == [Verdict.INCONCLUSIVE] * 2
    zero = compare(a, b, metrics=("schedule_lag_mean",)).metrics[0]  # 0 in all of them
    assert (zero.verdict, zero.interval) == (Verdict.INCONCLUSIVE, None)


def test_an_empty_run_is_inconclusive():
    a, b = two_runs(1)
    found = compare(a, msgspec.structs.replace(b, outcomes=()))
    assert found.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": ("ttft_p98",)}, "ttft_p98"),
        ({"metrics": ()}, "named"),
        ({"metrics": ("ttft_p50", "ttft_p50")}, "once"),
        ({"metrics": ("itl_p50",)}, "itl"),
        ({"margin": 0.0}, "margin"),
        ({"margin": 5.0}, "margin"),
        ({"confidence": 1.0}, "confidence"),
        ({"confidence": 95.0}, "confidence"),
    ],
)
def test_terms_out_of_range_are_refused(changes, words):
    a, b = two_runs(1, size=20)
    with pytest.raises(ConfigError, match=words):
        compare(a, b, **changes)


def test_one_run_against_three_is_refused():
    a, b = two_runs(1, size=20)
    with pytest.raises(ConfigError, match="1 runs against 3"):
        compare(a, [b, b, b])


def test_notes_name_what_else_differs():
    a, b = two_runs(1, size=400)
    longer = tuple(msgspec.structs.replace(one, output_tokens=9, prompt_tokens=500) for one in b.outcomes)
    rising = tuple(
        msgspec.structs.replace(one, chunk_ns=tuple(t + i * MS // 2 for t in one.chunk_ns))
        for i, one in enumerate(longer)
    )
    changed = msgspec.structs.replace(b, outcomes=rising, stopped="the server was overloaded", schedule_digest="x")
    notes = " ".join(compare(a, changed, **QUICK).notes)
    for words in ("One run a side", "not send the same", "was stopped", "rising", "Mean prompt", "Mean output"):
        assert words in notes


def test_exit_codes():
    assert EXIT_CODES == {Verdict.BETTER: 0, Verdict.EQUIVALENT: 0, Verdict.WORSE: 1, Verdict.INCONCLUSIVE: 2}


def test_it_is_shown_within_100_columns_and_survives_json():
    found = compare(*of_one_schedule(1, 1.5))
    assert [one.name for one in found.metrics] == list(DEFAULT_METRICS)
    assert found.level == pytest.approx(0.99)  # five intervals, all together at 95 %
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(render_comparison(found))
    shown = out.getvalue()
    assert all(len(line.rstrip()) <= 100 for line in shown.splitlines()), shown
    assert "B against A: WORSE" in shown
    assert "ttft_p50" in shown
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found
