"""The highest rate within an SLO, where queueing theory knows it; and what a plan makes of it."""

from pathlib import Path

import msgspec
import pytest
from known_replicas import ONE_AT_A_TIME, REPLICA, STEP_NS, unsure

from splittime.bench.book.slo import SloResult, parse_slo
from splittime.core.errors import ConfigError, EngineError
from splittime.plan import capacity as capacity_module
from splittime.plan.capacity import RESOLUTION, Capacity, RateInterval, capacity
from splittime.plan.page import load_words, render_page, require_replaceable, write_csv
from splittime.plan.worksheet import PlanTerms, Sheet, SheetLine, first_to_break, money, worksheet

LOAD = {"duration_s": 8.0, "input_tokens": "16", "output_tokens": "1", "seed": 5}
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
    assert found.share == 3 / 5, "of four rates, the lowest to the highest"
    assert found.knee[0] == low
    assert found.knee[1] >= high


def test_an_slo_that_no_rate_keeps_says_what_can_be_kept() -> None:
    with pytest.raises(EngineError, match="no rate keeps the SLO") as error:
        capacity(ONE_AT_A_TIME, LOAD, parse_slo("ttft_p50=5ms"), draws=1)
    assert "each alone on the server: ttft_p50 from the intended start is 10" in error.value.info.hint
    assert error.value.info.hint.endswith("Set limits that are no stricter than these values.")


@pytest.mark.parametrize("slo", ["error_rate=100%", "goodput=0,ttft=1ms,error_rate=1"])
def test_an_slo_that_no_rate_breaks_is_refused(slo: str) -> None:
    terms = {name: limit for name, limit in parse_slo(slo).items() if name != "ttft"}
    with pytest.raises(ConfigError, match="no rate breaks"):
        capacity(ONE_AT_A_TIME, LOAD, terms, draws=1)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (PlanTerms(peak=5.0, growth=1e308), "more than 1e\\+09"),
        (PlanTerms(peak=1e308), "more than 1e\\+09"),
        (PlanTerms(peak=5.0, regions=10**8), "1 to 1000"),
        (PlanTerms(peak=5.0, regions=0), "1 to 1000"),
    ],
)
def test_a_slip_of_the_pen_is_refused(terms: PlanTerms, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        terms.validate()


@pytest.mark.parametrize("term", ["throughput=10", "request_rate=2"])
def test_a_term_that_asks_for_a_rate_is_refused(term: str) -> None:
    with pytest.raises(ConfigError, match="grows with the rate") as error:
        capacity(ONE_AT_A_TIME, LOAD, parse_slo(f"ttft_mean=20ms,{term}"), draws=1)
    assert "the rate is what plan looks for" in error.value.info.hint


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
    (note,) = (note for note in sheet.notes if "no higher rate was simulated" in note)
    assert note.endswith("none has more than 1. Plan from a heavier load.")


def test_a_rate_of_too_many_requests_ends_the_search_and_wants_a_shorter_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "MAX_REQUESTS", 500)
    found = capacity(ONE_AT_A_TIME, LOAD, parse_slo("ttft_mean=20ms"), draws=1)
    assert found.kept.num_requests <= 500
    assert found.likeliest.stopped.endswith("requests are too many for a trial. Give a shorter --duration.")


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
    assert "million in an hour at 450 requests/s" in line(sheet, "a million input tokens").formula
    paid = sum(
        line(sheet, f"a million {kind} tokens").value * 300 * 1.5 * 3600 * tokens / 1e6
        for kind, tokens in (("input", 16), ("output", 1))
    )
    assert paid == pytest.approx(line(sheet, "an hour").value)
    assert line(sheet, "decode floor").value == pytest.approx(10.0)
    assert line(sheet, "KV cache").value == pytest.approx(4096 * 16 * 1024 / 2**20)
    # what is to spare leaves room for the longest request, without which no server starts
    assert line(sheet, "KV cache to spare").value == pytest.approx((4096 - 1024 // 16) * 16 * 1024 / 2**20, rel=0.01)
    assert line(sheet, "a lost server leaves").value == -(-450 * 3 // most)
    assert "without a spare" in line(sheet, "a lost server leaves").formula
    assert any("3 others that fit as well" in note and "probability of 60%" in note for note in sheet.notes)
    assert line(sheet, "breaks first").value.startswith("ttft_mean: ")
    assert "batch_slots (as many requests run as max_num_seqs allows)" in line(sheet, "breaks first").value


def test_without_a_peak_tokens_cost_less_the_more_a_server_carries(found: Capacity) -> None:
    sheet = worksheet("a", ONE_AT_A_TIME, found, PlanTerms(price=2.0))
    cost, (low, middle, high) = line(sheet, "a million output tokens"), found.rate
    assert (cost.low, cost.high) == pytest.approx((cost.value * middle / high, cost.value * middle / low))


def test_where_most_models_keep_no_rate_nobody_can_tell_a_price(found: Capacity) -> None:
    none = msgspec.structs.replace(found, rate=RateInterval(0.0, 0.0, found.rate.high))
    for terms in (PlanTerms(price=2.0), PlanTerms(price=2.0, peak=300.0)):
        sheet = worksheet("a", ONE_AT_A_TIME, none, terms)
        assert not any(each.name.startswith("a million") for each in sheet.lines)
        assert any("keep the SLO at no rate" in note for note in sheet.notes)


def test_what_breaks_first_waits_in_the_time_that_its_term_is_about(found: Capacity) -> None:
    waits = {"first_waits": {"batch_slots": 0.8}, "later_waits": {"preempted": 0.2}, "all_waits": {"kv_blocks": 0.5}}
    trial = msgspec.structs.replace(found.likeliest.broken, **waits)

    def told(*names: str) -> str:
        terms = [SloResult(name=name, limit=1.0, value=2.0, ok=False, sentence="") for name in names]
        return first_to_break(msgspec.structs.replace(trial, terms=tuple(terms)), parse_slo("ttft=2s"))

    assert "80% of the time to the first token is a wait for batch_slots" in told("service_ttft_p99", "e2e_p99")
    shown = {"e2e_p99": "e2e_p99", "goodput": "goodput (ttft within 2.000s), limit 100%"}
    for name, words in shown.items():
        assert f"{words}: 50% of the time of a request is a wait for kv_blocks" in told(name)
    assert "20% of the time behind the first token is a wait for preempted" in told("itl_p99", "error_rate")


def test_the_waits_of_a_whole_request_have_the_queue(found: Capacity) -> None:
    """One token each: nothing lies behind the first one."""
    broken = found.likeliest.broken
    assert broken.later_waits == {}
    assert broken.all_waits == pytest.approx(broken.first_waits)
    assert broken.all_waits["batch_slots"] > 0.2


def test_weights_are_read_at_the_rate_of_so_many_bytes(found: Capacity) -> None:
    """10^9 bytes come from memory, and half of them from a cache."""
    rates = ((5 * 10**8, 4e11), (10**9, 1e11))
    cached = msgspec.structs.replace(ONE_AT_A_TIME.machine, read_rates=rates, read_bytes_per_s=5e10)
    sheet = worksheet("a", msgspec.structs.replace(ONE_AT_A_TIME, machine=cached), found, PlanTerms())
    assert line(sheet, "decode floor").value == pytest.approx(10.0)
    assert line(sheet, "smaller weights save").value == pytest.approx(10.0 - 1.25)


def test_kv_bytes_are_told_with_what_is_known_of_them(found: Capacity) -> None:
    def formula(**changed: object) -> str:
        sheet = worksheet("a", msgspec.structs.replace(ONE_AT_A_TIME, **changed), found, PlanTerms())
        return line(sheet, "KV bytes of a token").formula

    assert formula() == "as the server says: keys, values of all layers"
    assert formula(settings={"kv_cache_dtype": "int8"}) == "as the server says: keys, values and scales of all layers"


def test_nothing_is_told_of_a_cache_that_nobody_sees(found: Capacity) -> None:
    about = {"off": {}, "void": 0, "runs": 1}
    costs = msgspec.structs.replace(ONE_AT_A_TIME.costs, about=about)
    outside = msgspec.structs.replace(ONE_AT_A_TIME, costs=costs, token_cost=None)
    assert not any("KV" in each.name for each in worksheet("a", outside, found, PlanTerms()).lines)


def test_a_server_that_guesses_ahead_is_planned_without(found: Capacity) -> None:
    def notes(settings: dict[str, str]) -> tuple[str, ...]:
        return worksheet("a", msgspec.structs.replace(ONE_AT_A_TIME, settings=settings), found, PlanTerms()).notes

    words = "nobody knows what it would guess of these requests"
    assert any(words in note for note in notes({"speculative_config": '{"method": "ngram"}'}))
    assert not any(words in note for note in notes({}))


def test_costs_that_cannot_be_separated_are_named(found: Capacity) -> None:
    costs = msgspec.structs.replace(ONE_AT_A_TIME.costs, unsure=("prompt token", "decode row"))
    sheet = worksheet("a", msgspec.structs.replace(ONE_AT_A_TIME, costs=costs), found, PlanTerms())
    assert any(note.startswith("the recorded steps cannot separate the costs of prompt token") for note in sheet.notes)


def test_a_page_draws_what_is_judged_where_the_slo_limits_each_request() -> None:
    slo = parse_slo("ttft=20ms,goodput=90%")
    sheet = worksheet("a", ONE_AT_A_TIME, capacity(ONE_AT_A_TIME, LOAD, slo, draws=1), PlanTerms())
    page = render_page([sheet], slo)
    assert "To be kept: ttft 20 ms, goodput 90 %." in page
    assert page.count("<svg") == 2, "goodput, error_rate"


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


def test_a_search_says_which_trial_and_which_draw() -> None:
    told: list[tuple[str, float | None]] = []
    capacity(ONE_AT_A_TIME, LOAD, SLO, draws=2, say=lambda *words: told.append(words))
    trials = [words for words, share in told if share is None]
    assert trials[0].startswith("likeliest model, before 2 draws, trial 1: 1 requests/s keep the SLO")
    assert f"trial {len(trials)}:" in trials[-1]
    assert told[-3:] == [(f"{done} of 2 draws simulated", done / 2) for done in (0, 1, 2)]


@pytest.mark.parametrize(
    ("amount", "words"), [(0.4, "0.40"), (6.8e-05, "0.000068"), (0.0132, "0.0132"), (1250.0, "1,250.00"), (0.0, "0.00")]
)
def test_money_has_no_exponent(amount: float, words: str) -> None:
    assert money(amount) == words


@pytest.mark.parametrize(
    ("param", "begin"),
    [("out", b"<title>splittime plan</title>"), ("csv", b"server,source,name,value,low,high,unit,formula")],
)
def test_only_a_former_plan_is_replaced(tmp_path: Path, param: str, begin: bytes) -> None:
    path = tmp_path / "file"
    require_replaceable(path, param)
    path.write_bytes(begin)
    require_replaceable(path, param)
    path.write_bytes(b"SQLite format 3")
    with pytest.raises(ConfigError, match="is there already, and is no former plan"):
        require_replaceable(path, param)


def test_a_page_says_what_load_it_is_about() -> None:
    load = {"input_tokens": "64", "output_tokens": "32", "rate": 200.0, "cv": 3}
    terms = PlanTerms(peak=200.0, growth=1.5, regions=2)
    assert load_words(load, terms) == "200 requests/s x 1.5, 2 regions, poisson, 64 + 32 tokens, cv 3"
    assert load_words({"trace": "a.csv"}, PlanTerms(peak=3.0)) == "3 requests/s, the trace's own times, trace a.csv"
    assert load_words({"output_tokens": "8"}, terms).endswith("poisson, its own + 8 tokens")
    assert load_words({}, PlanTerms()) == "one server, no rate given, poisson"
