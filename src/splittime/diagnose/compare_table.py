"""A comparison for people: a row a metric, then the verdict in one sentence, then what else there is to know."""

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
