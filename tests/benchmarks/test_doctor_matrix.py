"""The doctor's matrix, as far as it needs no server: what a slow model is asked for, and what the summary counts."""

from argparse import Namespace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import msgspec
import pytest

from benchmarks.scenarios.doctor import __main__ as main
from benchmarks.scenarios.doctor.__main__ import Row, chosen, counted, summary
from benchmarks.scenarios.doctor.cures import Applied, _compared
from benchmarks.scenarios.doctor.healthy import HEALTHY
from benchmarks.scenarios.doctor.illnesses import ILLNESSES
from benchmarks.scenarios.doctor.kinds import poisson
from benchmarks.scenarios.doctor.patients import WRITTEN, WRITTEN_FOR, Pace, Patient
from benchmarks.scenarios.doctor.visit import Seen
from splittime.simulate.change import PredictedFigure

SLOW = Patient("slow", ("slow.gguf",), "slow", 368_640, Pace(0.008, 0.0008))
EVERY = [ward for ward in (*ILLNESSES, *HEALTHY) if ward.model is None]


@pytest.mark.parametrize("patient", [WRITTEN, SLOW], ids=["written", "slow"])
def test_each_load_is_short_and_has_enough_requests(patient):
    for ward in EVERY:
        schedule = ward.load(1, patient)
        seconds = max(planned.at_ns for planned in schedule.requests) / 1e9
        assert len(schedule.requests) >= 20, ward.name
        assert seconds <= 17, ward.name


def test_there_are_as_many_wards_as_are_asked_for():
    for patient in (WRITTEN, SLOW):
        ill, well = (sum(ward.can_have(patient) for ward in wards) for wards in (ILLNESSES, HEALTHY))
        assert ill >= 40
        assert well >= 12
    names = [ward.name for ward in (*ILLNESSES, *HEALTHY)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("patient", [WRITTEN, SLOW], ids=["written", "slow"])
def test_one_of_each_is_still_as_many_as_are_asked_for(patient):
    asked = Namespace(seeds=1, held_out=False, only=None, piece=None, one_each=True)
    found = [ward for ward, _ in chosen(asked, patient)]
    ill = [ward.expected for ward in found if ward.expected is not None]
    assert len(ill) == len(set(ill)) >= 40
    assert len(found) - len(ill) >= 12
    pieces = [chosen(Namespace(**vars(asked) | {"piece": f"{piece}/3"}), patient) for piece in (1, 2, 3)]
    assert sorted(ward.name for piece in pieces for ward, _ in piece) == sorted(ward.name for ward in found)


def test_the_written_load_is_asked_of_the_machine_that_it_is_written_for():
    schedule = poisson(4, 24, 40)(1, WRITTEN)
    assert len(schedule.requests) == pytest.approx(40, abs=20)
    assert all(18 <= len(planned.prompt) <= 30 and 30 <= planned.output_tokens <= 50 for planned in schedule.requests)


def test_a_slow_model_is_asked_for_the_same_part_of_its_time():
    """Of a load that is about how much it is."""

    def asked(patient, pace):
        schedule = poisson(70, 300, 16, 6.0)(1, patient)
        seconds = max(planned.at_ns for planned in schedule.requests) / 1e9
        return sum(pace.work_s(len(planned.prompt), planned.output_tokens) for planned in schedule.requests) / seconds

    assert asked(SLOW, SLOW.pace) == pytest.approx(asked(WRITTEN, WRITTEN_FOR), rel=0.3)


def seen(name, expected, found, **more):
    told = {"name": name, "expected": expected, "seed": 1, "found": found, "shares": (0.5,) * len(found), "limits": ()}
    return Seen(**told, could_not_tell=False, requests=40, steps=100, seconds=1.0, **more)


@pytest.mark.parametrize(("behind", "is_inside"), [(100.0, False), (150.0, True), (0.0, False)])
def test_a_ratio_is_of_the_runs_on_both_sides(behind, is_inside):
    """The machine had slowed down: 70 of the mean of 100 and 150 is 0.57."""
    printed = figure("e2e_ms_mean", 100.0, 0.5, 0.4, 0.6)
    compared = _compared(printed, {"e2e_ms_mean": 70.0}, {"e2e_ms_mean": behind})
    assert (compared.is_inside, compared.is_ratio_inside, compared.again) == (False, is_inside, behind)


def test_the_summary_counts_each_kind():
    inside, outside = (
        _compared(figure("e2e_ms_mean", 100.0, 0.5, 0.4, 0.6), {"e2e_ms_mean": measured}, {})
        for measured in (50.0, 70.0)
    )
    good = Applied(name="slot_bound", flags=("--x",), starts=True, figures=(inside,))
    bad = Applied(name="kv_bound", flags=("--x",), starts=False, figures=(outside,))
    rows = [
        Row(seen("a", "slot_bound", ("slot_bound",)), (good,)),
        Row(seen("b", "slot_bound", ("overload", "slot_bound"), false=("overload",))),
        Row(seen("c", "kv_bound", ()), (bad,)),
        Row(seen("d", None, ())),
        Row(seen("e", None, (), false=("weight_bandwidth_bound",))),
        Row(seen("f", None, ("paused",), exit_code=1, false=("paused",))),
    ]
    told = counted(rows)
    assert (told["right_first"], told["later"], told["missed"]) == (1, 1, 1)
    assert (told["healthy"], told["healthy_clean"], told["false_names"]) == (3, 1, 3)
    assert (told["flags"], told["flags_that_start"], told["figures"], told["figures_inside"]) == (2, 1, 2, 1)
    assert "1 of 3 right first" in summary("any", told)
    assert msgspec.convert(msgspec.to_builtins(rows), list[Row]) == rows


def figure(name, recorded, ratio, low, high):
    after = [recorded * part for part in (ratio, low, high)]
    return PredictedFigure(name, recorded, recorded, after[0], ratio, low, high, after[1], after[2])


def test_what_is_sabotaged_is_there():
    """Where a class has moved, its sabotage would wait for it in vain, and the ward be healthy."""
    path = Path(main.__file__).parent / "sabotage" / "sitecustomize.py"
    spec = spec_from_file_location("sabotage_of_the_doctor", path)
    sabotage = module_from_spec(spec)
    spec.loader.exec_module(sabotage)
    for module, name, _ in sabotage.ILLNESSES.values():
        assert hasattr(import_module(module), name), name
    assert {ward.sabotage for ward in (*ILLNESSES, *HEALTHY)} - {""} <= set(sabotage.ILLNESSES)
