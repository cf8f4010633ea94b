"""The wards of the doctor's benchmark on paper: their loads on the fake runner, at the pace of a slow model. So it is
seen without a quiet machine that each load makes the illness that it is to make, and that the healthy are healthy."""

from collections.abc import Iterator
from typing import Any

import pytest
from ward import Case, Ward

from benchmarks.scenarios.doctor import wards
from benchmarks.scenarios.doctor.healthy import HEALTHY
from benchmarks.scenarios.doctor.illnesses import ILLNESSES
from benchmarks.scenarios.doctor.patients import Pace, Patient
from benchmarks.scenarios.doctor.proxies import Deadline
from splittime.bench.schedule import Planned
from splittime.diagnose.books import Books
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import NOTHING_FOUND, changed_by, flags_of
from splittime.scheduler.config import SchedulerConfig

SLOW = Patient("slow", ("slow.gguf",), "slow", 368_640, Pace(0.008, 0.0008))
TRIALS = ("speculation_would_pay",)


def settings_of(ward: wards.Ward) -> dict[str, Any] | None:
    """Returns the scheduler's settings; None where it has others too."""
    typed = ward.settings(SLOW) if callable(ward.settings) else ward.settings
    found = dict(map(changed_by, flags_of(typed)))
    if size := found.pop("kv_cache_memory_bytes", None):
        found["num_blocks"] = size // SLOW.block_bytes
    return found if set(found) <= set(SchedulerConfig.__struct_fields__) else None


def cases(ward: wards.Ward) -> Iterator[Case]:
    spoiler = ward.spoiler(SLOW) if ward.spoiler is not None else None
    limit_ms = float(spoiler.header.split()[1]) if isinstance(spoiler, Deadline) else None
    for planned in ward.load(1, SLOW).requests:
        assert isinstance(planned.prompt, tuple)
        assert planned.at_ns is not None
        choices = planned.body.get("n", 1)
        yield Case(planned.at_ns / 1e6, list(planned.prompt), planned.output_tokens, deadline_ms=limit_ms, n=choices)


def is_plain(planned: Planned) -> bool:
    """The fake engine knows no more of requests."""
    return planned.messages is None and planned.cancel_after_ns is None and set(planned.body) <= {"n", "temperature"}


def is_on_paper(ward: wards.Ward) -> bool:
    """Nothing of it happens outside the scheduler and the requests' deadlines."""
    beside = (ward.sabotage, ward.beside, ward.quota, ward.model, ward.furnish, ward.blocks_client, ward.is_early)
    client = (ward.max_in_flight, ward.has_gateway, ward.embeds, ward.slo)
    is_deadline = ward.spoiler is None or isinstance(ward.spoiler(SLOW), Deadline)
    is_inside = not any((*beside, *client)) and is_deadline and settings_of(ward) is not None
    return is_inside and all(map(is_plain, ward.load(1, SLOW).requests))


def on_paper(ward: wards.Ward) -> Books:
    pace, settings = SLOW.pace, settings_of(ward)
    assert settings is not None
    step_ms, token_ms = 1e3 * (pace.step_s - pace.token_s), 1e3 * pace.token_s
    usual = {"max_prefill_tokens": round(0.25 / pace.token_s)}  # as a start measures it
    return Ward(step_ms=step_ms, token_ms=token_ms, settings=usual | settings).run(*cases(ward))


ON_PAPER = {ward.name: ward for ward in (*ILLNESSES, *HEALTHY) if is_on_paper(ward)}
ILL = [name for name, ward in ON_PAPER.items() if ward.expected is not None]


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_named_first_and_no_other_is(name: str) -> None:
    ward = ON_PAPER[name]
    illnesses = [finding.name for finding in diagnose(on_paper(ward)).illnesses]
    assert illnesses[0] == ward.expected
    assert set(illnesses) <= ward.may_be_named | set(TRIALS)


@pytest.mark.parametrize("name", [name for name in ON_PAPER if name not in ILL])
def test_the_healthy_have_nothing(name: str) -> None:
    diagnosis = diagnose(on_paper(ON_PAPER[name]))
    assert [finding.name for finding in diagnosis.findings if finding.name not in TRIALS] == []
    assert diagnosis.exit_code == NOTHING_FOUND


def test_most_wards_are_on_paper() -> None:
    assert len(ILL) >= 20
    assert len(ON_PAPER) - len(ILL) >= 10
