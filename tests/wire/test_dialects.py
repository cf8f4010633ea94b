"""Other servers' words: every name is in its fixture, growth is exact, a restart is noticed, nothing is made up.

The fixtures of vLLM 0.32.0 and llama.cpp are recorded (benchmarks/scenarios/foreign_servers.py); those of SGLang and
TGI are written after the names in their code, with values made up.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, Sample
from splittime.bench.join_view import SEEN, render_server_view, server_view
from splittime.wire.dialects import DIALECTS, RESTARTED, Notation, parse, read, values

FIXTURES = Path(__file__).parents[1] / "bench" / "fixtures"
FILES = {"vllm": "vllm", "sglang": "sglang", "tgi": "tgi", "llama.cpp": "llama_cpp"}
KINDS = sorted(DIALECTS)
MS = 1_000_000


def scraped(kind: str, when: str) -> dict[str, float]:
    return parse((FIXTURES / f"{FILES[kind]}_{when}.txt").read_text())


def told(kind: str) -> dict[str, float]:
    reading = read(DIALECTS[kind], scraped(kind, "before"), scraped(kind, "after"))
    assert reading.notes == ()
    return {one.quantity.name: one.value for one in reading.told}


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_one_that_the_server_has(kind: str) -> None:
    dialect, after = DIALECTS[kind], scraped(kind, "after")
    for quantity in dialect.quantities:
        labels = dict(quantity.labels)
        names = [quantity.metric + "_sum", quantity.metric + "_count"] if quantity.form is Notation.MEAN else []
        names = names or [quantity.metric, *([quantity.per] if quantity.per else [])]
        for name in names:
            assert values(after, name, labels), f"{name} {labels} is not in the fixture of {kind}"
            assert name.startswith(dialect.prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantity_is_read_and_has_its_counterpart(kind: str) -> None:
    dialect = DIALECTS[kind]
    names = [quantity.name for quantity in dialect.quantities]
    assert len(names) == len(set(names))
    assert set(told(kind)) == {q.name for q in dialect.quantities if q.form is not Notation.STATE}
    assert all(quantity.name in SEEN for quantity in dialect.quantities if quantity.form is not Notation.STATE)
    assert all(q.trap for q in dialect.quantities if q.unit == "s"), "every time has a trap in its definition"
    assert dialect.cannot


def test_made_up_values_come_back() -> None:
    sglang = told("sglang")
    assert sglang["queue"] == pytest.approx(0.05)
    assert sglang["prefill"] == pytest.approx(0.02)
    assert sglang["ttft"] == pytest.approx(0.075)
    assert sglang["itl"] == pytest.approx(0.004)
    assert sglang["e2e"] == pytest.approx(0.2)
    assert sglang["prefix_hits"] == pytest.approx(0.3)
    assert sglang["preemptions"] == 2
    tgi = told("tgi")
    assert (tgi["queue"], tgi["tokenize"], tgi["inference"]) == pytest.approx((0.05, 0.001, 0.14))
    assert (tgi["prefill"], tgi["e2e"]) == pytest.approx((0.02, 0.191))
    assert (tgi["requests"], tgi["prompt_tokens"], tgi["output_tokens"]) == (50, 6000, 1600)


def test_recorded_runs_make_sense() -> None:
    """50 requests over four slots, faster than they serve; the parts of vLLM's E2E are not longer than it."""
    vllm, llama = told("vllm"), told("llama.cpp")
    assert vllm["requests"] == 50
    assert vllm["queue"] + vllm["prefill"] + vllm["decode"] <= vllm["e2e"]
    assert vllm["queue"] + vllm["prefill"] <= vllm["ttft"] <= vllm["e2e"]
    assert vllm["output_tokens"] == llama["output_tokens"] > 50
    assert vllm["prompt_tokens"] == llama["prompt_tokens"] + llama["prefix_hit_tokens"]
    assert 0 < llama["itl"] < 1
    assert llama["decode_slots"] > llama["prefill_busy"] > 0


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_growth_is_exact_and_a_reset_is_noticed(kind: str, data) -> None:
    """Whatever a counter was before, only what it grew by counts; if it fell, what it shows since."""
    dialect = DIALECTS[kind]
    counters = [q for q in dialect.quantities if q.form is Notation.GROWTH]
    before, after = {}, {}
    for quantity in counters:
        before[quantity.metric] = data.draw(st.integers(0, 10**9)) * 1.0
        after[quantity.metric] = data.draw(st.integers(0, 10**9)) * 1.0
    reading = read(dialect, before, after)
    by_metric = {one.quantity.name: one.value for one in reading.told if one.quantity.form is Notation.GROWTH}
    for quantity in counters:
        was, is_now = before[quantity.metric], after[quantity.metric]
        assert by_metric[quantity.name] == (is_now - was if is_now >= was else is_now)
    has_fallen = any(after[name] < before[name] for name in after)
    assert reading.notes == ((RESTARTED,) if has_fallen else ())


def test_what_is_not_there_is_left_out() -> None:
    for kind in KINDS:
        assert read(DIALECTS[kind], {}, {}).told == ()
        assert read(DIALECTS[kind], scraped(kind, "after"), scraped(kind, "after")).notes == ()
    nothing_happened = read(DIALECTS["vllm"], scraped("vllm", "after"), scraped("vllm", "after"))
    assert "ttft" not in {one.quantity.name for one in nothing_happened.told}, "a mean of nothing is no mean"


def test_older_names_and_several_engines() -> None:
    before = {
        'vllm:time_per_output_token_seconds_sum{engine="0"}': 1.0,
        'vllm:time_per_output_token_seconds_count{engine="0"}': 100.0,
    }
    after = {
        'vllm:time_per_output_token_seconds_sum{engine="0"}': 2.0,
        'vllm:time_per_output_token_seconds_sum{engine="1"}': 3.0,
        'vllm:time_per_output_token_seconds_count{engine="0"}': 200.0,
        'vllm:time_per_output_token_seconds_count{engine="1"}': 100.0,
    }
    (itl,) = read(DIALECTS["vllm"], before, after).told
    assert (itl.quantity.name, itl.value, itl.observations) == ("itl", 4.0 / 200, 200.0)


# ---- beside what was seen


def outcome(index: int, **more) -> Outcome:
    facts = {
        "phase": Phase.WARM_UP,
        "ending": Ending.COMPLETE,
        "intended_ns": 0,
        "sent_ns": 5 * MS,
        "chunk_ns": (25 * MS, 35 * MS, 55 * MS),
        "chunk_tokens": (1, 1, 2),
        "end_ns": 60 * MS,
        "prompt_tokens": 100,
        "output_tokens": 4,
        "cached_tokens": 20,
    }
    return Outcome(index=index, request_id=f"r{index}", **(facts | more))


def run_on(kind: str, outcomes, samples=(), **arm) -> Run:
    facts = (
        {"metrics_before": scraped(kind, "before"), "metrics_after": scraped(kind, "after")} if kind in FILES else {}
    )
    return Run(
        begin_ns=0,
        begin_unix_ns=0,
        measured_from_ns=0,
        measured_until_ns=10**12,
        arms=(Arm(url="http://a", kind=kind, **(facts | arm)),),
        outcomes=tuple(outcomes),
        samples=tuple(samples),
    )


def test_seen_is_from_the_actual_send_and_over_all_that_were_sent() -> None:
    outcomes = [
        outcome(0),
        outcome(1, chunk_ns=(45 * MS,), chunk_tokens=(1,), output_tokens=1, end_ns=46 * MS),
        outcome(2, ending=Ending.FAILED, chunk_ns=(), chunk_tokens=None, output_tokens=None, cached_tokens=None),
        outcome(3, ending=Ending.UNSENT, sent_ns=None, chunk_ns=(), end_ns=None),
    ]
    samples = [
        Sample(at_ns=1, in_flight=4, waiting=1, running=2, kv_usage=0.5),
        Sample(at_ns=2, in_flight=2, waiting=None, running=4, kv_usage=0.7),
    ]
    rows = {row.name: row for row in server_view(run_on("vllm", outcomes, samples)).rows}
    assert rows["ttft"].seen == pytest.approx((0.020 + 0.040) / 2)
    assert rows["e2e"].seen == pytest.approx((0.055 + 0.041) / 2)
    assert rows["tpot"].seen == rows["itl"].seen == pytest.approx(0.030 / 3)
    assert rows["requests"].seen == 3
    assert rows["prefix_hits"].seen == pytest.approx(0.2)
    assert (rows["running"].told, rows["running"].seen) == (3, 3)
    assert (rows["waiting"].told, rows["kv_usage"].told) == (1, pytest.approx(0.6))


def shown(run: Run) -> str:
    with Path("/dev/null").open("w") as nowhere:
        console = Console(width=150, record=True, file=nowhere)
        console.print(render_server_view(run))
        return console.export_text()


@pytest.mark.parametrize("kind", KINDS)
def test_view_shows_what_is_told_and_what_cannot_be(kind: str) -> None:
    text = shown(run_on(kind, [outcome(0)], version="1.2"))
    assert f"What {kind} 1.2 tells" in text
    assert "It cannot tell: the network and the client." in text
    assert "ttft" in text


def test_a_server_without_metrics_or_without_a_dialect() -> None:
    text = shown(run_on("vllm", [outcome(0)], metrics_before={}, metrics_after={}))
    assert "20.000 ms" in text, "what was seen from outside is shown all the same"
    assert "understood here" in shown(run_on("unknown", [outcome(0)]))
