"""When runs by turns decide, and what a change gains."""

import math
from collections.abc import Mapping

import client_runs
import msgspec
import pytest
from simulated_runs import HEALTHY, LOAD, SimulatedRuns, load, measurer

from splittime.bench.book.records import Run
from splittime.bench.book.slo import parse_slo
from splittime.diagnose.compare import compare
from splittime.diagnose.comparison import Verdict
from splittime.tune.goal import (
    CLEARLY,
    LOOKS,
    Goal,
    Score,
    Verified,
    decided,
    gain,
    has_all_that_was_asked,
    middle,
    score_of,
    verify,
)
from splittime.tune.knobs import KNOBS
from splittime.tune.measure import TimeBudget
from splittime.tune.tuner import Tuner

MS = client_runs.MS
GOAL = Goal(slo=parse_slo("ttft_p99=100ms"), seeks="e2e_mean")


def run_with(ttft_ms: float, e2e_ms: float) -> Run:
    """Returns a run whose requests are all alike."""
    first, last = round(ttft_ms * MS), round(e2e_ms * MS)
    times = {"chunk_ns": (first, last), "chunk_tokens": (1, 5), "end_ns": last}
    return client_runs.run([client_runs.outcome(number, **times) for number in range(40)])


def verdict_of(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> Verified:
    """Returns the verdict on runs with these TTFT and E2E, in ms."""
    return decided([run_with(*one) for one in before], [run_with(*one) for one in after], GOAL)


def score(slack: float, worth: float = 0.0) -> Score:
    return Score(slack, worth, "ttft_p99", {}, None)


def test_a_look_of_three_needs_more_than_one_that_is_the_only_one() -> None:
    before, after = [(50, 495), (50, 505)], [(50, 457), (50, 466)]
    runs = [[run_with(*one) for one in side] for side in (before, after)]
    assert compare(*runs, metrics=("e2e_mean",)).verdict is Verdict.BETTER
    assert verdict_of(before, after).verdict is Verdict.INCONCLUSIVE
    assert verdict_of(before, [(50, 407), (50, 415)]).verdict is Verdict.BETTER


def test_a_gain_that_breaks_a_kept_slo_is_worse() -> None:
    found = verdict_of([(99, 500), (99, 501)], [(102, 300), (102, 301)])
    assert found.verdict is Verdict.WORSE
    assert "e2e_mean got better. But ttft_p99 of the SLO is missed with it." in found.why
    assert verdict_of([(102, 500), (102, 501)], [(101, 300), (101, 301)]).verdict is not Verdict.WORSE


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (50, 111, Verdict.WORSE),
        (111, 50, Verdict.BETTER),
        (99, 103, Verdict.INCONCLUSIVE),
        (97, 98, Verdict.INCONCLUSIVE),
    ],
)
def test_the_slo_decides_only_where_it_is_clearly_missed(before: float, after: float, verdict: Verdict) -> None:
    """The times of a request differ too much from run to run to decide."""
    found = verdict_of([(before, 300), (before, 600)], [(after, 310), (after, 610)])
    assert (found.verdict, found.comparison is None) == (verdict, verdict is not Verdict.INCONCLUSIVE)


def test_one_run_that_keeps_the_slo_is_enough_for_it_not_to_decide() -> None:
    assert verdict_of([(50, 300), (50, 600)], [(111, 310), (99, 610)]).verdict is Verdict.INCONCLUSIVE


def test_the_middle_is_the_lower_of_two() -> None:
    assert middle([score(0.3), score(-0.1)]).slack == -0.1
    assert middle([score(0.3), score(0.1), score(0.4), score(0.2)]).slack == 0.2
    assert middle([score(0.3), score(0.1), score(0.2)]).slack == 0.2


def test_both_sides_take_turns_at_being_first() -> None:
    made = []

    def measure(changes: Mapping[str, object], number: int) -> Run:
        made.append((changes["side"], number))
        return run_with(50, 300 * (number + 1))

    verify(measure, {"side": "A"}, {"side": "B"}, GOAL, lambda: True)
    assert made == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2), ("B", 3), ("A", 3)]


def judged(before_ms: list[float], after_ms: list[float], pairs: int = LOOKS[-1]) -> Verified:
    """Returns the verdict on runs with these TTFTs, of which so many pairs fit into the time."""
    runs = {"A": before_ms, "B": after_ms}
    left = iter(range(pairs))
    return verify(
        lambda changes, number: run_with(runs[changes["side"]][number % 4], 500),
        {"side": "A"},
        {"side": "B"},
        GOAL,
        lambda: next(left, None) is not None,
    )


EDGE_MS = [60.0, 1000.0, 1100.0, 1050.0]  # one run in four keeps the SLO of 100 ms


def test_a_tenfold_gain_over_a_server_that_is_well_now_and_then_takes_eight_runs() -> None:
    found = judged(EDGE_MS, [50, 51, 52, 50])
    assert (found.verdict, len(found.after)) == (Verdict.BETTER, LOOKS[-1])
    assert found.comparison is not None
    cut = judged(EDGE_MS, [50, 51, 52, 50], pairs=4)
    assert (cut.verdict, len(cut.after)) == (Verdict.INCONCLUSIVE, 4)


def test_equal_throughput_is_no_verdict_where_the_present_settings_miss_the_slo_now_and_then() -> None:
    goal = msgspec.structs.replace(GOAL, seeks="throughput")
    found = decided([run_with(60, 500), run_with(120, 500)], [run_with(50, 500), run_with(51, 500)], goal)
    assert found.verdict is not Verdict.EQUIVALENT
    assert found.gain is not None
    assert found.gain > math.log(2)


def test_what_gained_nothing_in_four_runs_gets_no_more() -> None:
    found = judged(EDGE_MS, [62, 1010, 1090, 1050])
    assert (found.verdict, len(found.after)) == (Verdict.INCONCLUSIVE, LOOKS[-2])


def test_runs_are_judged_at_the_looks_alone() -> None:
    """What is looked at more often is wrong more often."""
    found = judged([99, 110, 111, 110], [50, 51, 52, 53], pairs=3)
    assert (found.verdict, len(found.after)) == (Verdict.INCONCLUSIVE, 3)
    assert "time was up after 3 a side; runs are judged after 2, 4 and 8" in found.why


def test_what_breaks_a_kept_slo_gains_nothing() -> None:
    assert gain(score(0.1, worth=0.0), score(-0.2, worth=5.0)) == -0.2
    assert gain(score(0.1, worth=1.0), score(0.0, worth=1.5)) == 0.5
    assert gain(score(-0.3, worth=1.0), score(-0.1, worth=0.0)) == pytest.approx(0.2)


def test_less_of_what_is_better_small_is_worth_more() -> None:
    slow, quick = (score_of(run_with(50, e2e_ms), GOAL) for e2e_ms in (400, 200))
    assert gain(slow, quick) == pytest.approx(math.log(2))
    assert slow.slack == pytest.approx(math.log(2))
    many = msgspec.structs.replace(GOAL, seeks="throughput")
    assert score_of(run_with(50, 400), many).worth == pytest.approx(math.log(240))


def test_a_miss_that_decides_is_at_least_as_large_as_a_gain_that_counts() -> None:
    assert pytest.approx(math.log(1.05)) == CLEARLY


@pytest.mark.parametrize("changes_numbers", [True, False])
def test_better_numbers_are_not_kept_where_no_gate_asks_whether_they_are_good(
    changes_numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOBS, "max_num_seqs", KNOBS["max_num_seqs"]._replace(changes_numbers=changes_numbers))
    goal = Goal(slo=parse_slo("ttft_p99=200ms,itl_p99=12ms"))
    runs = measurer(SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=1), goal))
    found = Tuner(runs, load(), TimeBudget(5), lambda what, share: None, None, ("max_num_seqs",)).run()
    assert found.trials
    assert ("max_num_seqs" in found.changes) is not changes_numbers
    assert (found.trials[0].verdict is Verdict.BETTER) is not changes_numbers


@pytest.mark.parametrize(("slots", "duration_s", "done"), [(64, 2.0, 12), (64, 10.0, 12), (2, 2.0, 0), (4, 10.0, 0)])
def test_a_kept_slo_is_done_unless_the_server_falls_behind(slots: int, duration_s: float, done: int) -> None:
    """An answer takes about a second. Those under way as a window of two seconds begins and ends are no shortage."""
    goal = Goal(slo=parse_slo("ttft_p99=100s"))
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=slots), goal, {("num_threads", 1): 12.0})
    found = []
    for seed in range(12):
        runs.load = {
            **LOAD,
            "rate": 5.0,
            "duration_s": duration_s,
            "warm_up_s": 2.0,
            "output_tokens": "60",
            "seed": seed,
        }
        run = runs.make({"num_threads": 1}, 0)
        found.append(has_all_that_was_asked(run, goal, score_of(run, goal)))
    assert sum(found) == done, found
