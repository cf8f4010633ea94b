"""`splittime bench compare A.json B.json`: is B better? Exit codes: `bench_exit`.

An SLO is asked of B alone; one that is missed makes the exit code 1, whatever the comparison says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from splittime.cli.bench_exit import SHORT, UNCLEAR, codes, exit_code
from splittime.cli.options import JsonFlag, argument, flag, wide, with_options, write_data
from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from splittime.bench.book.slo import SloResult
    from splittime.diagnose.comparison import Comparison, Terms
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splittime.bench.book.metrics import shown
from splittime.diagnose.comparison import SHARE_MARGIN, Compared, Comparison, Design, Verdict
from splittime.present.tables import FittingTable, Sentence, at_most
from splittime.stats.intervals import Interval

STYLES = {
    Verdict.BETTER: "green",
    Verdict.WORSE: "bold red",
    Verdict.EQUIVALENT: "cyan",
    Verdict.INCONCLUSIVE: "yellow",
}


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
    from splittime.bench.book.slo import parse_slo
    from splittime.diagnose.compare import compare_files

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


def _terms(given: CompareOptions, slo: dict[str, float]) -> "Terms":
    from splittime.bench.book.slo import limits_of
    from splittime.diagnose.comparison import DEFAULT_METRICS, Terms

    terms = Terms(
        metrics=tuple(given.metric or DEFAULT_METRICS),
        margin=parse_share(given.margin, "margin"),
        confidence=parse_share(given.confidence, "confidence"),
        limits=limits_of(slo, {}) or None,
    )
    terms.validate()
    return terms


def _show(found: "Comparison", results: Sequence["SloResult"]) -> None:
    from splittime.cli.bench_compare import render_comparison

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
