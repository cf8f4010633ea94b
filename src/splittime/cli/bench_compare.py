"""`splittime bench compare A.json B.json`: is B better? Exit codes: `bench_flags`.

An SLO is asked of B alone; one that is missed makes the exit code 1, whatever the comparison says.

`splittime bench books RUN.json` and `splittime bench report RUN.json`: views of a saved run.

`books` shows what the client felt beside what the server says. At a splittime server each request is joined with its
account, and TTFT and E2E become lines that sum to them, with the residual in sight. Of others it shows what their
metrics tell, and says what they cannot. `report` gives tables, one HTML page, CSV or JSON, and a verdict on an SLO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.bench.book.metrics import shown
from splittime.bench.book.records import Run, load_run
from splittime.bench.book.slo import SloResult, falls_short, limits_of, parse_slo, with_slo
from splittime.bench.report.csv import write_csv
from splittime.bench.report.table import render
from splittime.cli.bench_flags import SHORT, UNCLEAR, DefinitionsFlag, codes, exit_code
from splittime.cli.options import JsonFlag, argument, fails_clearly, flag, talk, wide, with_options, write_data
from splittime.core.errors import ConfigError
from splittime.diagnose.compare import compare_files
from splittime.diagnose.comparison import DEFAULT_METRICS, SHARE_MARGIN, Compared, Comparison, Design, Terms, Verdict
from splittime.present.tables import FittingTable, Sentence, at_most
from splittime.stats.intervals import Interval

if TYPE_CHECKING:
    from splittime.bench.join import JoinedBooks

BOOKS_EXAMPLES = f"""\b
Examples:
  splittime bench books run.json
  splittime bench books run.json --request bench-5f3a-17-0

{codes("books")}"""
REPORT_EXAMPLES = f"""\b
Examples:
  splittime bench report run.json
  splittime bench report run.json --html run.html --csv run.csv
  splittime bench report run.json --slo ttft_p99=300ms,tpot_p99=40ms

Without --slo it shows and does not judge.

{codes("report")}"""
STYLES = {
    Verdict.BETTER: "green",
    Verdict.WORSE: "bold red",
    Verdict.EQUIVALENT: "cyan",
    Verdict.INCONCLUSIVE: "yellow",
}


@fails_clearly
def books(
    run_file: Path = argument("RUN.json", "What `splittime bench` saved.", ...),
    request: str | None = flag("ID", "One request's lines, by its id or its number."),
    json: JsonFlag = False,
) -> None:
    """Show both books of a saved run side by side: what the client felt, and what the server did meanwhile."""
    from splittime.bench.join import join
    from splittime.bench.join_view import find_request, server_view

    run = load_run(run_file)
    arms = range(len(run.arms))
    joined = [join(run, arm) for arm in arms]
    chosen = find_request(joined, request) if request is not None else None
    if json:
        whole = {"books": joined, "servers": [server_view(run, arm) for arm in arms]}
        write_data(msgspec.json.encode(chosen if chosen is not None else whole))
        return
    console = wide()
    for arm in arms if chosen is None else ():
        console.print(_rendered(run, arm, joined[arm]))
    if chosen is not None:
        from splittime.bench.join_view import render_request

        console.print(render_request(chosen))


def _rendered(run: Run, arm: int, joined: "JoinedBooks") -> "RenderableType":
    from splittime.bench.join_view import render_books, render_server_view

    has_books = run.arms[arm].accounts or run.arms[arm].kind == "splittime"
    return render_books(joined) if has_books else render_server_view(run, arm)


@fails_clearly
def report(
    run_file: Path = argument("RUN.json", "What `splittime bench` saved.", ...),
    html: Path | None = flag("FILE", "Write one self-contained page."),
    csv: Path | None = flag("FILE", "Write a row for each request."),
    slo: str | None = flag("TERMS", "Judge by this instead of the run's own."),
    definitions: DefinitionsFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show a saved run again: as a table, an HTML page, CSV or JSON."""
    run = load_run(run_file)
    run = with_slo(run, slo) if slo else run
    _write_files(run, html, csv)
    if json:
        from splittime.bench.report import as_json

        write_data(msgspec.json.encode(as_json(run)))
    elif definitions or (html is None and csv is None):
        wide().print(render(run, with_definitions=definitions))
    if slo:
        raise typer.Exit(exit_code(is_void=run.is_void, falls_short=falls_short(run, run.slo)))


def _write_files(run: Run, html: Path | None, csv: Path | None) -> None:
    if html is not None:
        from splittime.bench.report.html import write_html

        write_html(run, html)
        talk().print(f"wrote {html}", markup=False)
    if csv is not None:
        write_csv(run, csv)
        talk().print(f"wrote {csv}", markup=False)


def render_comparison(found: Comparison) -> RenderableType:
    title = Text("B against A: ", style="bold")
    title.append(found.verdict.value, style=STYLES[found.verdict])
    lines = [_wrapped(f"A  {found.label_a}"), _wrapped(f"B  {found.label_b}"), _wrapped(_how(found), "dim")]
    why = _wrapped(f"{found.verdict.value}: {found.why}")
    notes = [_wrapped(f"Note: {note}", "yellow") for note in found.notes]
    return at_most(Group(title, *lines, Text(), _fitting(found), Text(), why, *notes))


def _how(found: Comparison) -> str:
    by = {
        Design.PAIRED: f"Paired, {found.num_pairs} requests on both sides.",
        Design.UNPAIRED: "Two runs, unpaired.",
        Design.RUNS: f"{found.runs_a} runs against {found.runs_b}; t interval over the runs.",
    }[found.design]
    return (
        f"{by} Each interval has {100 * found.level:.4g} %, so that all {len(found.metrics)} hold together with "
        f"{100 * found.confidence:.4g} %. Equivalent: within {100 * found.margin:.3g} %, of shares within "
        f"{100 * SHARE_MARGIN:g} points. Times are from the intended start."
    )


def _fitting(found: Comparison) -> FittingTable:
    """Less space between the columns first; then the ends of an interval one below the other."""
    return FittingTable(_table(found, " ", padding=1), _table(found, " ", padding=0), _table(found, "\n", padding=0))


def _table(found: Comparison, between: str, padding: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding), expand=True, show_edge=False, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for name in ("A", "B", "B / A", "interval"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for one in found.metrics:
        table.add_row(*_cells(one, between), Text(one.verdict.value, STYLES[one.verdict]))
    return table


def _cells(one: Compared, between: str) -> tuple[str, ...]:
    a, b = ("-" if value is None else shown(one.name, value) for value in (one.a, one.b))
    return one.name, a, b, _effect(one, one.effect), _interval(one, one.interval, between)


def _effect(one: Compared, value: float | None) -> str:
    if value is None:
        return ".."
    return f"{100 * value:+.2f} pt" if one.is_difference else f"{value:.3f}"


def _interval(one: Compared, found: Interval | None, between: str) -> str:
    return "-" if found is None else f"{_effect(one, found.low)} to{between}{_effect(one, found.high)}"


def _wrapped(words: str, style: str = "") -> Sentence:
    return Sentence(words, style, indent=3)


EXAMPLES = f"""\b
Examples:
  splittime bench compare before.json after.json
  splittime bench compare both.json             a run made with two servers
  splittime bench compare a1.json b1.json a2.json b2.json --metric ttft_p99
  splittime bench compare main.json branch.json --slo ttft_p99=300ms

{codes("compare")}"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    files: list[Path] = argument("A.json B.json ...", "Runs: A and B, or A B A B ..., or one of two servers.", ...)
    metric: list[str] | None = flag("NAME", "May be repeated; the first decides. Default: e2e_mean and others.")
    margin: str = flag("X%", "A difference within it does not matter.", "5%")
    confidence: str = flag("X%", "With which all verdicts hold together.", "95%")
    slo: str | None = flag("TERMS", "Asked of B, as in ttft_p99=300ms,error_rate=1%.")
    json: JsonFlag = False


@with_options(CompareOptions)
def compare(given: CompareOptions) -> None:
    """Compare saved runs: BETTER, WORSE, EQUIVALENT or INCONCLUSIVE, with intervals."""
    wanted = parse_slo(given.slo) if given.slo else {}
    both = compare_files(given.files, _terms(given, wanted), wanted)
    found, results = both.comparison, both.slo
    short = found.exit_code == SHORT or any(not result.ok for result in results)
    code = exit_code(falls_short=short, is_unclear=found.exit_code == UNCLEAR)
    if given.json:
        whole = {"comparison": found, "slo": results, "exit_code": code}
        write_data(msgspec.json.encode(whole))
    else:
        _show(found, results)
    raise typer.Exit(code)


def _terms(given: CompareOptions, slo: dict[str, float]) -> Terms:
    terms = Terms(
        metrics=tuple(given.metric or DEFAULT_METRICS),
        margin=parse_share(given.margin, "margin"),
        confidence=parse_share(given.confidence, "confidence"),
        limits=limits_of(slo, {}) or None,
    )
    terms.validate()
    return terms


def _show(found: Comparison, results: Sequence[SloResult]) -> None:
    console = wide()
    console.print(render_comparison(found))
    for result in results:
        verdict, style = ("kept", "") if result.ok else ("MISSED", "red")
        console.print(f"SLO {verdict}: {result.sentence}", style=style, markup=False)


def parse_share(text: str, param: str) -> float:
    """`5%` or `0.05`."""
    number, sign, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / 100 if sign else float(number)
    except ValueError:
        raise ConfigError(f"{param}: {text!r} is no share", param=param, value=text, hint=f"--{param} 5%") from None
