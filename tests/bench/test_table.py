"""The tables of a run: what stands first, that all fits, and that any run can be shown."""

import io

import client_runs as runs
import msgspec
import pytest
from client_runs import MS
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from splittime.bench.book.figures import DEFINITIONS
from splittime.bench.book.records import Arm, Ending, RunCheck
from splittime.bench.book.slo import parse_slo
from splittime.bench.report.table import digits, ends, ms, percent, render
from splittime.present.tables import COLUMNS
from splittime.stats.intervals import Interval


def shown(run, **options) -> str:
    out = io.StringIO()
    Console(file=out, width=COLUMNS, color_system=None).print(render(run, **options))
    return out.getvalue()


def check(**changes) -> RunCheck:
    plain = {"name": "loop_lag", "ok": False, "value": 12.0, "limit": 2.0, "unit": "ms", "sentence": "late by 12 ms"}
    return RunCheck(**{**plain, **changes})


def test_a_void_run_says_so_first_and_why():
    text = shown(runs.run([runs.outcome()], checks=(check(), check(name="cpu", sentence="all of a core"))))
    first = text.splitlines()[:5]
    assert "VOID" in first[0]
    assert "loop_lag: late by 12 ms (allowed: 2 ms)" in text
    assert text.index("late by 12 ms") < text.index("TTFT")
    assert "VOID" not in shown(runs.run([runs.outcome()], checks=(check(voids=False), check(ok=True, name="cpu"))))


def test_a_plain_run_tells_both_clocks_rates_drift_buckets_and_slo():
    run = runs.drawn_run(1, 300, settings={"rate": 20.0, "empty": None}, schedule_digest="abc123", label="a run")
    text = shown(run, slo=parse_slo("ttft=150ms,tpot_p99=1ms"))
    for words in (
        "a run  2023-11-14 22:13:20 UTC",
        "rate 20.0, schedule abc123",
        "300 intended: 300 complete",
        "TTFT, response",
        "TTFT, service",
        "E2E, response",
        "max stall",
        "] tokens/s",
        "in flight",
        "second half / first half",
        "prompt tokens",
        "tpot_p99 is",
        "MISSED",
        "goodput",
    ):
        assert words in text, words
    assert "empty" not in text
    assert "token gap  " not in text  # each chunk is a token: it would say the same as the chunk gap


def test_figures_in_the_table_are_those_of_the_run():
    line = next(line for line in shown(runs.run([runs.outcome()])).splitlines() if line.startswith("TTFT, service"))
    assert line.split()[2:] == ["50.00"] * 6


def test_a_client_that_was_late_is_told_in_words():
    late = [runs.outcome(i, sent_ns=40 * MS) for i in range(10)]
    assert "sent later than intended: 40.00 ms" in shown(runs.run(late))
    assert "sent later than intended" not in shown(runs.run([runs.outcome(sent_ns=1 * MS)]))


def test_errors_and_unknown_tpot_are_told():
    run = runs.run([runs.outcome(0), runs.outcome(1, ending=Ending.TIMED_OUT), runs.outcome(2, chunk_tokens=None)])
    text = shown(run)
    assert "3 intended: 2 complete and 1 timed out; 33.33 % errors" in text
    assert "unknown for 1 request" in text


def test_definitions_stand_at_the_end_if_asked_for():
    assert DEFINITIONS[0][1] not in " ".join(shown(runs.run([runs.outcome()])).split())
    text = " ".join(shown(runs.run([runs.outcome()]), with_definitions=True).split())
    places = [text.index(f"{name}: {' '.join(sentence.split())}") for name, sentence in DEFINITIONS]
    assert places == sorted(places)


def test_each_arm_is_shown():
    arms = (Arm(url="http://a", kind="mock"), Arm(url="http://b", kind="vllm", version="0.9", model="m"))
    text = shown(runs.run([runs.outcome(0), runs.outcome(0, arm=1)], arms=arms))
    assert text.index("http://a, mock") < text.index("http://b, vllm 0.9, model m")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(runs.outcomes(), max_size=12, unique_by=lambda one: one.index),
    st.lists(st.builds(check, ok=st.booleans(), voids=st.booleans(), value=st.none() | st.floats(0, 1e9)), max_size=3),
    st.sampled_from(["", "ttft=1s,tpot=5ms,goodput=95%,e2e_p99=10s,throughput=5"]),
    st.none() | st.text(max_size=200),
)
def test_any_run_can_be_shown_and_fits(outcomes, checks, slo, stopped):
    terms = parse_slo(slo) if slo else {}
    run = runs.run(outcomes, checks=tuple(checks), slo=terms, stopped=stopped, settings={"rate": 3.0, "why": "x " * 90})
    for line in shown(run).splitlines():
        assert len(line.rstrip()) <= COLUMNS


def test_a_terminal_sees_the_same_words_in_colour():
    run = runs.drawn_run(1, 60)
    out = io.StringIO()
    Console(file=out, width=COLUMNS, force_terminal=True, color_system="standard", legacy_windows=False).print(
        render(run)
    )
    from rich.text import Text

    assert Text.from_ansi(out.getvalue()).plain.split() == shown(run).split()
    assert "\x1b[" in out.getvalue()


def test_a_wide_or_narrow_value_keeps_the_columns():
    slow = [runs.outcome(i, chunk_ns=(10**13, 2 * 10**13, 3 * 10**13), end_ns=3 * 10**13) for i in range(20)]
    assert all(len(line) <= COLUMNS for line in shown(runs.run(slow)).splitlines())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "0.000"),
        (0.1234, "0.123"),
        (1.23456, "1.235"),
        (12.3456, "12.35"),
        (1234.5, "1,234"),
        (9.9999, "10.000"),
    ],
)
def test_four_digits(value, text):
    assert digits(value) == text


def test_what_is_not_known_is_shown_as_such():
    assert ms(None) == "-"
    assert percent(None) == "-"
    assert ends(None) == ""
    assert ends(Interval(1.0, None)) == "1.000 .."
    assert msgspec.json.decode(msgspec.json.encode(Interval(1.0, None)), type=Interval) == Interval(1.0, None)


def test_the_commonest_errors_are_told_and_nothing_is_obeyed_by_a_terminal():
    failed = [runs.outcome(i, ending=Ending.FAILED, error="no model \x1b[31mx", chunk_ns=()) for i in range(3)]
    said = shown(runs.run(failed))
    assert "3 failed: no model \ufffd[31mx" in said
    assert "\x1b" not in said
