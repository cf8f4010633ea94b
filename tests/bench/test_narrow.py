"""On a terminal of 80 columns the tables lose no figure: p50, p99 and max stand there, and both ends of intervals."""

import functools
import io

import client_runs as runs
import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from splittime.bench.book.figures import DEFINITIONS, summary
from splittime.bench.book.records import Ending, RunCheck
from splittime.bench.report.table import LEAST_MISSED, STATISTICS, digits, ms, render
from splittime.cli.bench_compare import render_comparison
from splittime.diagnose.compare import compare
from splittime.present.tables import COLUMNS, FittingTable, Sentence, at_most

RUNS = {
    "usual": runs.drawn_run(1, 300),
    "slow": runs.run(  # figures of eleven characters
        [runs.outcome(i, chunk_ns=(k := 10**13 + i * 10**9, 2 * k, 3 * k), end_ns=3 * k) for i in range(40)]
    ),
}


@functools.cache
def report(name: str):
    """Made once: it is printed at any width."""
    return render(RUNS[name])


@functools.cache
def comparison():
    return compare(RUNS["usual"], runs.drawn_run(1, 300, 1.5))


@functools.cache
def vague_comparison():
    """The longest words and intervals there are."""
    return compare(partly_failed(runs.drawn_run(1, 30)), partly_failed(runs.drawn_run(2, 30)))


def partly_failed(run):
    outcomes = [msgspec.structs.replace(one, ending=Ending.FAILED) if one.index < 4 else one for one in run.outcomes]
    return msgspec.structs.replace(run, outcomes=tuple(outcomes))


def printed(shown, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(shown)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert all(len(line) <= width for line in lines)
    return lines


def latencies(lines: list[str]) -> list[str]:
    """From the heading to the blank line."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("ms, "))
    return lines[begin : lines.index("", begin)]


def ends_of(figure, statistics) -> list[str]:
    intervals = [figure.mean.interval, *(figure.percentiles[name].interval for name in statistics)]
    return [digits(end / 1e6) for one in intervals if one for end in (one.low, one.high) if end is not None]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [80, 100])
def test_all_latencies_and_both_ends_of_their_intervals_are_there(name, width):
    lines = latencies(printed(report(name), width))
    left_out = LEAST_MISSED if any("have no room here" in line for line in lines) else ()
    kept = [name for name in STATISTICS if name not in left_out]
    assert lines[0].split()[3:] == ["mean", *kept, "max"]
    said = set(" ".join(lines).replace("-", " ").split())
    figures = summary(RUNS[name], 0).figures
    for figure in (figures["ttft"], figures["service_e2e"]):
        assert {ms(figure.percentiles["p50"].value), ms(figure.percentiles["p99"].value), ms(figure.max)} <= said
        assert set(ends_of(figure, kept)) <= said


def test_what_is_left_out_is_said_with_how_to_see_it():
    assert not any("no room" in line for line in printed(report("usual"), COLUMNS))
    narrow = latencies(printed(report("slow"), 70))
    assert narrow[0].split()[3:] == ["mean", "p50", "p99", "max"]
    assert " ".join(narrow).endswith("p90 and p95 have no room here: a wider terminal, --json or --html shows them.")


@pytest.mark.parametrize("width", [60, 40, 12, 1])
def test_no_width_is_too_narrow(width):
    for name in RUNS:
        assert printed(report(name), width)
    assert printed(render_comparison(comparison()), width)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_prompt_buckets_are_whole(width):
    lines = printed(report("usual"), width)
    begin = next(i for i, line in enumerate(lines) if line.startswith("prompt") and "requests" in " ".join(lines[i:]))
    table = " ".join(lines[begin:])
    figures = summary(RUNS["usual"], 0).buckets
    assert len(figures) > 1
    for figure in (found[name] for found in figures.values() for name in ("ttft", "tpot", "e2e")):
        assert ms(figure.percentiles["p50"].value) in table
        assert ms(figure.percentiles["p99"].value) in table


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_comparison_has_both_ends_of_each_interval(width):
    found = comparison()
    text = " ".join(printed(render_comparison(found), width))
    for one in found.metrics:
        if one.interval is not None and not one.is_difference:
            for end in (one.interval.low, one.interval.high):
                assert end is None or f"{end:.3f}" in text


@pytest.mark.parametrize("width", [80, 100])
def test_a_comparison_has_each_metric_on_a_line_with_its_verdict(width):
    lines = printed(render_comparison(vague_comparison()), width)
    begin = next(i for i, line in enumerate(lines) if line.startswith("metric ")) + 2
    for one, line in zip(vague_comparison().metrics, lines[begin : lines.index("", begin)], strict=True):
        assert line.startswith(f"{one.name} ")
        assert line.endswith(f" {one.verdict.value}")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_sentences_are_wrapped_once_at_the_width_there_is(width):
    """A word stands alone only where the next has no room beside it."""
    lines = printed(render(RUNS["usual"], with_definitions=True), width)
    for name, sentence in DEFINITIONS:
        begin = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
        words = f"{name}: {sentence}".split()
        while words:
            said = lines[begin].split()
            assert said == words[: len(said)]
            words, begin = words[len(said) :], begin + 1
            assert not words or len(lines[begin - 1]) + 1 + len(words[0]) > min(width, COLUMNS)


@pytest.mark.parametrize(
    ("limit", "unit", "text"),
    [
        (0.005, "", "(allowed: 0.5%)"),
        (0, "", "(allowed: 0%)"),
        (2.38719, "ms", "(allowed: 2.39 ms)"),
        (2.0, "ms", "(allowed: 2 ms)"),
        (64000, "sockets", "(allowed: 64,000 sockets)"),
    ],
)
def test_what_is_allowed_has_the_unit_and_the_digits_of_what_was_found(limit, unit, text):
    told = RunCheck(name="steal", ok=False, value=0.011, limit=limit, unit=unit, sentence="found (1.1%)", voids=False)
    assert f"found (1.1%) {text}" in " ".join(printed(render(runs.run([runs.outcome()], checks=(told,))), 100))


def test_the_first_form_that_has_room_is_shown():
    def table(heading: str) -> Table:
        return Table(heading, box=None, padding=0)

    forms = FittingTable(table("a wide heading"), table("narrower"), table("least"))
    for width, shown in ((14, "a wide heading"), (13, "narrower"), (8, "narrower"), (5, "least")):
        assert printed(forms, width) == [shown]
    assert printed(at_most(forms, 8), 80) == ["narrower"]
    assert "".join(printed(Sentence("one two", head="x ", indent=2), 5)) == "x one  two"
