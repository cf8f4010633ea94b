"""The highest rate within an SLO, where queueing theory knows it; and what a plan makes of it."""

import msgspec
import pytest
from known_replicas import ONE_AT_A_TIME, REPLICA, STEP_NS, unsure

from splittime.bench.book.slo import parse_slo
from splittime.core.errors import ConfigError
from splittime.plan.capacity import RESOLUTION, Capacity, capacity
from splittime.plan.page import render_page, write_csv
from splittime.plan.worksheet import PlanTerms, Sheet, SheetLine, worksheet

LOAD = {"duration_s": 15.0, "input_tokens": "16", "output_tokens": "1", "seed": 5}
SLO = parse_slo("ttft_mean=20ms")


@pytest.fixture(scope="module")
def found() -> Capacity:
    return capacity(unsure(ONE_AT_A_TIME), LOAD, SLO, draws=3)


def test_the_knee_is_where_queueing_theory_has_it(found: Capacity) -> None:
    """M/D/1: the mean time is S + rho S / (2 (1 - rho)), so twice S at rho = 2/3 (Pollaczek and Khinchine)."""
    knee = found.likeliest
    assert knee.kept.rate == pytest.approx(2 / 3 / (STEP_NS / 1e9), rel=0.12)
    assert 1 < knee.broken.rate / knee.kept.rate <= RESOLUTION
    assert knee.kept.keeps
    assert not knee.broken.keeps


def test_what_is_not_known_of_the_machine_widens_the_interval(found: Capacity) -> None:
    low, middle, high = found.rate
    assert low < found.kept.rate * 0.9 < middle < high
    assert found.knee[0] == low
    assert found.knee[1] >= high


def test_an_slo_that_no_rate_keeps_says_what_can_be_kept() -> None:
    with pytest.raises(ConfigError, match="no rate keeps the SLO") as error:
        capacity(ONE_AT_A_TIME, LOAD, parse_slo("ttft_p50=5ms"), draws=1)
    assert "ttft_p50 from the intended start is 10" in error.value.info.hint


def test_what_the_model_does_not_know_is_not_planned_with() -> None:
    wide = msgspec.structs.replace(
        REPLICA, costs=msgspec.structs.replace(REPLICA.costs, most=(1, 10**6, 1, 10**6, 10**6, 10**6))
    )
    load = {**LOAD, "output_tokens": "40", "rate": 1.0}
    found = capacity(wide, load, parse_slo("e2e_p50=10s"), draws=1)
    assert found.likeliest.broken is None
    assert "of the recorded ones none has more than 1" in found.likeliest.stopped
    sheet = worksheet("a", wide, found, PlanTerms())
    assert "more may be kept" in line(sheet, "highest rate").formula
    assert any("no higher rate was simulated" in note for note in sheet.notes)


def test_a_slow_server_gets_long_trials() -> None:
    slow = msgspec.structs.replace(
        ONE_AT_A_TIME, costs=msgspec.structs.replace(ONE_AT_A_TIME.costs, device=(20e9, 0.0, 0.0, 0.0, 0.0, 0.0))
    )
    found = capacity(slow, {**LOAD, "duration_s": 5.0}, parse_slo("ttft_mean=40s"), draws=1)
    assert found.kept.rate == pytest.approx(2 / 3 / 20, rel=0.4)
    assert found.kept.num_requests > 50


def line(sheet: Sheet, name: str) -> SheetLine:
    return next(each for each in sheet.lines if each.name == name)


def test_a_sheet_counts_servers_and_money(found: Capacity) -> None:
    terms = PlanTerms(peak=300.0, price=2.0, growth=1.5, regions=2).validate()
    sheet = worksheet("a", ONE_AT_A_TIME, found, terms)
    low, _, high = found.rate
    most, fewest = -(-225 // low) * 2, -(-225 // high) * 2
    assert (line(sheet, "servers").low, line(sheet, "servers").high) == (fewest, most)
    assert line(sheet, "servers with spares").value == most + 2
    assert line(sheet, "an hour").value == 2.0 * (most + 2)
    paid = sum(
        line(sheet, f"a million {kind} tokens").value * 300 * 1.5 * 3600 * tokens / 1e6
        for kind, tokens in (("input", 16), ("output", 1))
    )
    assert paid == pytest.approx(line(sheet, "an hour").value)
    assert line(sheet, "decode floor").value == pytest.approx(10.0)
    assert line(sheet, "KV cache").value == pytest.approx(4096 * 16 * 1024 / 2**20)
    # what is to spare leaves room for the longest request, without which no server starts
    assert line(sheet, "KV cache to spare").value == pytest.approx((4096 - 1024 // 16) * 16 * 1024 / 2**20, rel=0.01)
    assert line(sheet, "a lost server leaves").value == pytest.approx(found.rate.middle * 3)
    assert line(sheet, "breaks first").value.startswith("ttft_mean: ")
    assert "batch_slots (as many requests run as max_num_seqs allows)" in line(sheet, "breaks first").value


def test_a_page_and_a_csv_hold_every_line(found: Capacity, tmp_path_factory: pytest.TempPathFactory) -> None:
    sheet = worksheet("<i>", ONE_AT_A_TIME, found, PlanTerms(peak=300.0, price=2.0))
    page = render_page([sheet], SLO)
    assert "<i>" not in page
    assert "&lt;i&gt;" in page
    assert "To be kept: ttft_mean 20 ms." in page
    path = tmp_path_factory.mktemp("plan") / "plan.csv"
    write_csv([sheet], path)
    written = path.read_text()
    for each in sheet.lines:
        assert each.name in page
        assert each.name in written


@pytest.mark.parametrize(("name", "value"), [("peak", -1.0), ("price", float("inf")), ("regions", 0)])
def test_terms_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        PlanTerms(**{name: value}).validate()
