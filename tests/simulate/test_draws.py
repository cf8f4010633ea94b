"""Draws over several processes: the same answer as in one."""

import msgspec
import pytest
from known_runs import TIGHT, record_run

from splittime.core.errors import ConfigError
from splittime.simulate import draws, what_if
from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.replica import AnyReplica
from splittime.simulate.what_if import predict

CONFIG = msgspec.structs.replace(TIGHT, max_num_seqs=4, num_blocks=60)


def test_the_answer_hangs_on_the_number_of_processes_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, change, done = record_run(CONFIG, seed=9, count=60, have_deadlines=False), Change({"max_num_seqs": 8}), []
    alone = predict(recorded, change, 3)
    monkeypatch.setattr(draws, "TOKENS_OF_A_PROCESS", 1)
    with monkeypatch.context() as patch:
        patch.delattr(AnyReplica, "figures")  # in this process; others import it anew
        assert predict(recorded, change, 3, on_draw=done.append, processes=2) == alone
        assert done == [1, 2, 3]
        with pytest.raises(ConfigError, match="max_num_seqs"):
            predict(recorded, Change({"max_num_seqs": 0}), 3, processes=2)


class OfRecordedHours:
    """A replica that knows no slower hour than 1.1."""

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace

    def slower(self, factor: float) -> "OfRecordedHours":
        return OfRecordedHours(self.pace * factor)

    def figures(self, requests: object, change: Change, seed: int) -> dict[str, float]:
        if self.pace > 1.1:
            raise OutOfRange("no step is like it")
        return {"x": self.pace}


def test_an_hour_too_slow_to_simulate_is_counted() -> None:
    change = Change({"max_num_seqs": 8})
    drawn = [draws._figures(draws.Draw(OfRecordedHours(), pace, 0), [], change) for pace in (0.9, 1.05, 1.3)]  # type: ignore[arg-type]
    assert [(one.again["x"], one.is_same_hour) for one in drawn] == [(0.9, False), (1.05, False), (1.0, True)]
    figure = what_if._predicted("x", 1.0, drawn)
    assert (figure.low, figure.high) == pytest.approx((0.9, 1.05))


def test_few_draws_hold_one_more_less_often() -> None:
    assert [round(draws.share_within(count), 2) for count in (1, 2, 10, 18, 19, 100)] == [0, 0.33, 0.82, 0.89, 0.9, 0.9]


def test_a_small_job_stays_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record_run(CONFIG, seed=9, count=60, have_deadlines=False)
    monkeypatch.delattr(draws, "ProcessPoolExecutor")
    assert predict(recorded, Change({"max_num_seqs": 8}), 2, processes=64).draws == 2


def test_an_interval_leaves_out_as_many_draws_below_as_above() -> None:
    """Of 109, one more lies between the 5th and the 105th with a probability of 100 / 110."""
    assert draws.interval(list(range(109, 0, -1))) == (5, 105)
    assert draws.interval(list(range(1, 40))) == (2, 38)
    assert draws.interval([3, 1, 2]) == (1, 3)
