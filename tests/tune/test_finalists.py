"""Which changes a search names, by what is simulated of them."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from splittime.simulate.cost import OutOfRange
from splittime.tune.goal import WORTH_IT, Score
from splittime.tune.knobs import DRAWS
from splittime.tune.search import DrawnGains, Forecast, Forecaster, finalists

NOW = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "enable_chunked_prefill": False}
SURE, UNSURE = [0.1, 0.15, *[0.2] * (DRAWS - 4), 0.3, 0.4], [-0.2, -0.1, *[0.2] * (DRAWS - 4), 0.5, 0.6]
NAMES = ("enable_chunked_prefill", "max_num_seqs")


class Known(Forecaster):
    """Simulates nothing: slots gain up to 16, chunked prefill gains. gains: of each knob's draws."""

    def __init__(self, gains: Mapping[str, list[float]], slack: float, is_missed: bool = False) -> None:
        self._gains, self._slack, self.is_missed = gains, slack, is_missed
        self._seen = self.score({})

    @property
    def now(self) -> dict[str, Any]:
        return dict(NOW)

    def score(self, change: Mapping[str, Any]) -> Score:
        slots = change.get("max_num_seqs", 4)
        gained = min(slots, 32 - slots) / 16 + 2 * change.get("enable_chunked_prefill", False)
        return Score(self._slack + gained * (self._slack < 0), gained, "ttft_p99", {}, gained)

    def drawn_gains(self, change: Mapping[str, Any], draws: int) -> DrawnGains:
        assert draws == DRAWS
        own = next(gains for name, gains in self._gains.items() if name in change)
        return DrawnGains(own, [own[0] - 0.2, own[1] - 0.1, *own[2:-2], own[-2] + 0.2, own[-1] + 0.2])


def found_of(gains: Mapping[str, list[float]], slack: float = 0.1) -> list[Forecast]:
    return finalists(Known(gains, slack), lambda what, share: None, NAMES)


def test_an_interval_leaves_out_the_lowest_and_the_highest_draw() -> None:
    (found,) = finalists(Known({"max_num_seqs": SURE}, 0.1), lambda what, share: None, ("max_num_seqs",))
    assert (found.own_low, found.gain) == (0.15, 0.2)
    assert (found.low, found.high) == pytest.approx((0.05, 0.5)), "of a run in another hour"
    assert found.change == {"max_num_seqs": 16}


def test_one_bad_draw_of_seven_keeps_nothing_out() -> None:
    (found,) = finalists(Known({"max_num_seqs": [-1.0, *SURE[1:]]}, 0.1), lambda what, share: None, ("max_num_seqs",))
    assert found.own_low > 0


def test_what_the_simulation_misses_of_the_runs_widens_what_is_told() -> None:
    known = Known({"max_num_seqs": SURE}, -5.0)
    known._seen = known._seen._replace(slack=known._seen.slack - 1)
    (found,) = finalists(known, lambda what, share: None, ("max_num_seqs",))
    assert found.gain - found.low == pytest.approx(math.hypot(0.15, 1.0))
    assert found.high - found.gain == pytest.approx(math.hypot(0.3, 1.0))


def test_what_the_doctor_names_is_measured_first() -> None:
    gains = {"enable_chunked_prefill": SURE, "max_num_seqs": SURE}
    for more in ({}, {"max_num_seqs": 12}):
        found = finalists(Known(gains, 0.1), lambda what, share: None, NAMES, more)
        assert [list(one.change) for one in found] == [[name] for name in (reversed(NAMES) if more else NAMES)]


def test_what_may_lose_is_not_tried_where_the_slo_is_kept() -> None:
    found = found_of({"enable_chunked_prefill": UNSURE, "max_num_seqs": SURE})
    assert [one.change for one in found] == [{"max_num_seqs": 16}]


def test_what_may_lose_is_tried_last_where_the_slo_is_missed() -> None:
    found = found_of({"enable_chunked_prefill": UNSURE, "max_num_seqs": SURE}, slack=-20.0)
    assert [list(one.change) for one in found] == [["max_num_seqs"], ["enable_chunked_prefill"]]


@pytest.mark.parametrize(("middle", "count"), [(WORTH_IT * 1.01, 1), (WORTH_IT * 0.99, 0)])
def test_what_gains_too_little_in_most_draws_is_no_finalist(middle: float, count: int) -> None:
    gains = [middle] * (DRAWS - 2) + [1.0, 1.0]
    assert len(finalists(Known({"max_num_seqs": gains}, 0.1), lambda what, share: None, ("max_num_seqs",))) == count


class KeptBySlots(Known):
    """By its simulations the SLO is kept with any slots, the better the more there are, and nothing else is gained."""

    def score(self, change: Mapping[str, Any]) -> Score:
        slots = change.get("max_num_seqs", 4)
        return Score(0.01 + min(slots, 32 - slots) / 16, 1.0, "ttft_p99", {}, 1.0)


@pytest.mark.parametrize("is_missed", [False, True])
def test_what_real_runs_miss_is_sought_though_the_simulation_keeps_it(is_missed: bool) -> None:
    found = finalists(KeptBySlots({"max_num_seqs": SURE}, 0.0, is_missed), lambda what, share: None, ("max_num_seqs",))
    assert [one.change for one in found] == ([{"max_num_seqs": 16}] if is_missed else [])


class FarOut(Known):
    """Other hours have steps that nobody has recorded, with each of these knobs."""

    far: tuple[str, ...] = NAMES

    def drawn_gains(self, change: Mapping[str, Any], draws: int) -> DrawnGains:
        if any(name in change for name in self.far):
            raise OutOfRange("a step would have 9 rows", limit=8)
        return super().drawn_gains(change, draws)


def test_what_cannot_be_drawn_is_left_out_and_if_nothing_can_that_is_told() -> None:
    some = FarOut({"max_num_seqs": SURE}, 0.1)
    some.far = ("enable_chunked_prefill",)
    assert [one.change for one in finalists(some, lambda what, share: None, NAMES)] == [{"max_num_seqs": 16}]
    with pytest.raises(OutOfRange, match="9 rows"):
        finalists(FarOut({}, 0.1), lambda what, share: None, NAMES)


def test_what_gains_in_few_hours_is_tried_last_where_the_slo_is_missed() -> None:
    doubtful = [-0.9, -0.5, *[-0.1] * (DRAWS - 4), 0.5, 0.6]
    gains = {"enable_chunked_prefill": doubtful, "max_num_seqs": UNSURE}
    assert [list(one.change) for one in found_of(gains, slack=-20.0)] == [["max_num_seqs"], ["enable_chunked_prefill"]]
    assert found_of(gains) == []
