"""The search against a queue whose knee is known and whose verdicts are noisy near it."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.bench.book.records import Run, RunCheck
from splittime.bench.search import LevelVerdict, SearchBounds, Trial, highest_rate, sweep
from splittime.core.errors import ConfigError

CAPACITY, LIMIT_MS, BASE_MS = 40.0, 500.0, 50.0
KNEE = CAPACITY * (1 - BASE_MS / LIMIT_MS)  # where BASE / (1 - rate / CAPACITY) is LIMIT: 36 requests/s


class Queue:
    """p99 TTFT of a queue, base / (1 - load), times log-normal noise from run to run."""

    def __init__(
        self, seed: int = 0, noise: float = 0.0, void_above: float = float("inf"), hiccups: tuple[int, ...] = ()
    ) -> None:
        self._random = random.Random(seed)
        self._noise, self._void_above, self._hiccups = noise, void_above, hiccups
        self.rates: list[float] = []

    async def measure(self, rate: float) -> Run:
        self.rates.append(rate)
        await asyncio.sleep(0)
        noise = self._random.lognormvariate(0, self._noise)
        ttft_ms = noise * BASE_MS / (1 - rate / CAPACITY) if rate < CAPACITY else 1e9
        is_void = rate > self._void_above or len(self.rates) - 1 in self._hiccups
        return run_of(ttft_ms, is_void)


def run_of(ttft_ms: float, is_void: bool = False) -> Run:
    lag = RunCheck(name="lag", ok=not is_void, value=9.0, limit=1.0, unit="ms", sentence="the client lagged by 9 ms")
    times = {"begin_ns": 0, "begin_unix_ns": 0, "measured_from_ns": 0, "measured_until_ns": 1}
    return Run(**times, arms=(), outcomes=(), settings={"ttft_ms": ttft_ms}, checks=(lag,))


def keeps(run: Run) -> bool | None:
    return None if run.is_void else run.settings["ttft_ms"] <= LIMIT_MS


def found_by(queue: Queue, low: float = 1.0, high: float = 1000.0, on_trial=None, **options):
    return asyncio.run(highest_rate(queue.measure, keeps, SearchBounds(low, high, **options), on_trial))


def verdicts(found, rate: float) -> list[LevelVerdict]:
    return [trial.verdict for trial in found.trials if trial.level == rate]


@given(st.floats(0.01, 30), st.floats(0.006, 0.5))
def test_without_noise_the_knee_is_in_the_interval(low, resolution):
    found = found_by(Queue(), low=low, resolution=resolution)
    assert found.stopped is None
    assert found.kept <= KNEE * 1.001
    assert found.broken >= KNEE * 0.999
    assert found.broken / found.kept <= 1 + resolution
    assert len(verdicts(found, found.kept)) == len(verdicts(found, found.broken)) == 2


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.05, 0.2, 0.5]), st.integers(1, 4))
def test_with_noise_both_ends_are_confirmed(seed, noise, confirmations):
    """Whatever the noise, an answer rests on agreeing runs at both ends, and on no kept run above a broken one."""
    found = found_by(Queue(seed, noise), confirmations=confirmations, max_runs=200)
    assert found.stopped is None
    assert found.kept < found.broken <= found.kept * 1.05
    for rate, verdict in ((found.kept, LevelVerdict.KEPT), (found.broken, LevelVerdict.BROKEN)):
        said = verdicts(found, rate)
        assert said.count(verdict) >= confirmations
        assert said.count(verdict) > len(said) / 2
    assert not any(trial.level < found.kept and _is_broken(found, trial.level) for trial in found.trials)


def _is_broken(found, rate: float) -> bool:
    said = verdicts(found, rate)
    return said.count(LevelVerdict.KEPT) <= said.count(LevelVerdict.BROKEN)


def test_confirming_pays():
    """With noise of 30 %, the answers' typical error over 200 seeds is smaller with three confirmations than with
    one, and the middle one is right."""

    def errors(confirmations: int) -> list[float]:
        answers = [found_by(Queue(seed, 0.3), confirmations=confirmations, max_runs=200) for seed in range(200)]
        return sorted(abs(found.kept * found.broken) ** 0.5 / KNEE - 1 for found in answers)

    once, thrice = errors(1), errors(3)
    assert thrice[100] == pytest.approx(0, abs=0.04)
    assert thrice[180] - thrice[20] < once[180] - once[20]


def test_runs_are_not_wasted():
    assert len(found_by(Queue()).trials) <= 14  # 7 to bracket 36 from 1, 4 to narrow 2 to 1.05, 3 to confirm


def test_low_already_breaks():
    found = found_by(Queue(), low=38.0, high=100.0)
    assert (found.kept, found.broken) == (None, 38.0)
    assert len(found.trials) == 2
    assert "not even 38" in found.sentence


def test_high_still_keeps():
    found = found_by(Queue(), low=1.0, high=30.0)
    assert (found.kept, found.broken) == (30.0, None)
    assert found.trials[-1].level == found.trials[-2].level == 30.0


def test_it_goes_on_below_a_rate_that_the_client_cannot_judge():
    seen: list[Trial] = []
    found = found_by(Queue(void_above=10.0), on_trial=seen.append)
    assert [trial.level for trial in found.trials[:6]] == [1, 2, 4, 8, 16, 16]
    assert tuple(seen) == found.trials
    assert 9.5 <= found.kept <= 10.0 < found.broken <= found.kept * 1.05
    assert len(verdicts(found, found.kept)) == 2
    assert found.stopped is None
    assert found.is_unjudged
    assert not found.is_void
    assert f"{found.kept:g} requests/s keep the promise; at {found.broken:g} the client itself" in found.sentence
    assert "lagged by 9 ms" in found.sentence


def test_a_client_at_fault_at_the_lowest_rate_finds_nothing():
    found = found_by(Queue(void_above=0.5))
    assert [trial.level for trial in found.trials] == [1, 1]
    assert found.is_void
    assert "nothing was found" in found.sentence


def test_it_gives_up_after_so_many_runs():
    found = found_by(Queue(), resolution=0.006, max_runs=9)
    assert len(found.trials) == 9
    assert "9 runs" in found.stopped
    assert found.kept < KNEE < found.broken


@pytest.mark.parametrize(
    "bounds", [{"low": 0.0}, {"low": 5.0, "high": 5.0}, {"resolution": 0.0}, {"resolution": 1.0}, {"confirmations": 0}]
)
def test_bounds_that_are_none(bounds):
    with pytest.raises(ConfigError):
        found_by(Queue(), **bounds)


def test_a_sweep_runs_each_level_in_order():
    queue = Queue()
    swept = asyncio.run(sweep(queue.measure, [5.0, 38.0, 10.0, 10.0], keeps))
    assert queue.rates == [5.0, 38.0, 10.0, 10.0]
    assert [trial.verdict for trial in swept.trials] == [
        LevelVerdict.KEPT,
        LevelVerdict.BROKEN,
        LevelVerdict.KEPT,
        LevelVerdict.KEPT,
    ]
    assert swept.stopped is None


def test_one_void_run_is_made_again_and_says_nothing():
    queue = Queue(hiccups=(2, 9))
    found = found_by(queue)
    assert (found.kept, found.broken) == (found_by(Queue()).kept, found_by(Queue()).broken)
    assert [trial.verdict for trial in found.trials].count(LevelVerdict.VOID) == 2
    assert not found.is_unjudged
    assert queue.rates[2] == queue.rates[3] == 4.0
    swept = asyncio.run(sweep(Queue(hiccups=(0,)).measure, [5.0, 20.0]))
    assert [trial.level for trial in swept.trials] == [5.0, 5.0, 20.0]
    assert swept.stopped is None


def test_a_sweep_goes_on_after_a_level_that_is_void_twice():
    swept = asyncio.run(sweep(Queue(hiccups=(1, 2)).measure, [5.0, 20.0, 30.0]))
    assert [trial.verdict for trial in swept.trials] == [
        LevelVerdict.KEPT,
        LevelVerdict.VOID,
        LevelVerdict.VOID,
        LevelVerdict.KEPT,
    ]
    assert swept.stopped is None
    assert swept.is_void
    assert swept.sentence.startswith("at 20 the client itself was at fault each time")
