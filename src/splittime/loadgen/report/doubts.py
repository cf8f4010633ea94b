"""Whether the figures of a run may be believed, for people: VOID, what has no interval, what the client's lateness may
have added, and what the client found of itself.
"""

from collections.abc import Iterator
from math import ceil

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from splittime.core.fitted import Sentence
from splittime.ledger.client_book import Check, Run
from splittime.ledger.client_figures import Summary
from splittime.ledger.client_intervals import MIN_INDEPENDENT, MOST_ABOVE, Estimate
from splittime.ledger.client_lateness import failed_by_lateness, off_ns
from splittime.ledger.client_metrics import parse_metric
from splittime.loadgen.report.latencies import ROWS
from splittime.loadgen.report.text import digits, line, listed, ms

ROW_NAMES = {name: title.replace(",", "") for name, title in ROWS}
MAY_BE_OFF = ("ttft", "e2e", "tpot", "chunk_gap")


def banner(run: Run) -> RenderableType:
    """VOID with its reasons, or nothing."""
    if not run.is_void:
        return Group()
    failed = [check for check in run.checks if check.voids and not check.ok]
    text = Text("The client was at fault: these figures are about it, not about the server.", style="bold")
    for check in failed:
        text.append(f"\n{check.name}: {_check_sentence(check)}", style="not bold")
    return Panel(text, title="VOID", border_style="red", box=box.HEAVY)


def _check_sentence(check: Check) -> str:
    if check.value is None or check.limit is None:
        return f"{check.sentence}."
    return f"{check.sentence} (allowed: {_allowed(check.limit, check.unit)})"


def _allowed(limit: float, unit: str) -> str:
    """A share has no unit, and is written as the sentences write it."""
    amount = limit if unit else 100 * limit
    shown = f"{amount:.3g}" if abs(amount) < 1000 else f"{amount:,.0f}"
    return f"{shown} {unit}" if unit else f"{shown}%"


def cannot_tell(found: Summary) -> Iterator[Sentence]:
    """Names the figures whose mean has no interval, or no upper end, for want of independent requests."""
    unsure = [(name, its) for name, its in found.figures.items() if _is_open(its.mean)]
    if not unsure:
        return
    name, worst = min(unsure, key=lambda one: one[1].independent)
    names = listed([ROW_NAMES[name] for name, _ in unsure])
    if worst.num_requests < MIN_INDEPENDENT:
        said = f"cannot tell for {names}: {worst.num_requests} requests, and {MIN_INDEPENDENT} are the least"
    else:
        longer = max(2, ceil(MIN_INDEPENDENT / max(0.1, worst.independent)))
        said = (
            f"cannot tell for {names}: the {worst.num_requests:,} requests are about {digits(worst.independent, 0)} "
            f"independent ones ({ROW_NAMES[name]}), as they waited in the same queues; {_too_few(worst.independent)}."
            f" A run about {longer} times as long would tell, or a lower rate"
        )
    yield line("intervals", f"{said}.", "yellow")


def _is_open(mean: Estimate) -> bool:
    return mean.interval is None or mean.interval.high is None


def _too_few(independent: float) -> str:
    if independent < MIN_INDEPENDENT:
        return f"{MIN_INDEPENDENT} are the least"
    return f"for all that they tell, another run's mean may be over {MOST_ABOVE:.0f} times as high"


def may_be_off(run: Run, arm: int, found: Summary) -> Iterator[Sentence]:
    """By how much the client's own lateness may have lengthened each figure, where its checks found some."""
    if not failed_by_lateness(run):
        return
    told = []
    for name in MAY_BE_OFF:
        if name in found.figures:
            p50, p99 = (ms(off_ns(run, arm, parse_metric(f"{name}_{statistic}"))) for statistic in ("p50", "p99"))
            told.append(f"{ROW_NAMES[name]} {p50} ms at p50 and {p99} ms at p99")
    yield line("lateness", f"the client's own may have made longer, by at most: {', '.join(told)}.", "yellow")


def checks(run: Run) -> RenderableType:
    """What the client found of itself: the good in one line, each other by itself."""
    good = [check.name.replace("_", " ") for check in run.checks if check.ok]
    lines = [line("note", _check_sentence(check), "yellow") for check in run.checks if not check.ok and not check.voids]
    if good:
        lines.append(line("checked", f"in order: {listed(good)}"))
    return Group(*lines)
