"""A run for people: the tables that `splittime bench` ends with, the same without colour.

All of it fits the terminal, and `COLUMNS` at the most (`present.tables`).

`render` shows, in this order: whether the figures may be believed (VOID comes first, with the checks that failed), what
was asked of whom, how many requests ended how, latencies by both clocks with their intervals, rates, drift, prompt
lengths, the SLO, what the server said of itself, and if asked what every word means.

Whether the figures may be believed is: VOID, what has no interval, what the client's lateness may have added, and what
the client found of itself.

The latencies of a run as tables: of all requests, and by prompt lengths.

Where there is no room for all side by side, the two ends of an interval stand one below the other; then `LEAST_MISSED`
go, and the table says so. tests/bench/test_narrow.py checks that nothing is lost without a word.

How figures are written in a report: milliseconds with four digits, an interval as its two ends; and a line of it.
"""

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from splittime.bench.book.figures import DEFINITIONS, Drift, Figure, Summary, Trend, summary
from splittime.bench.book.metrics import failed_by_lateness, off_ns, parse_metric
from splittime.bench.book.records import Ending, Phase, Run, RunCheck
from splittime.bench.book.slo import judge, limits_of
from splittime.present.tables import FittingTable, Sentence, at_most
from splittime.present.terminal import plain
from splittime.stats.intervals import MIN_INDEPENDENT, MOST_ABOVE, Estimate, Interval

UNKNOWN = "-"
OUT_OF_REACH = ".."  # an end of an interval that so few requests do not tell
STATISTICS = ("p50", "p90", "p95", "p99")
LEAST_MISSED = ("p90", "p95")
ROWS = (
    ("ttft", "TTFT, response"),
    ("service_ttft", "TTFT, service"),
    ("e2e", "E2E, response"),
    ("service_e2e", "E2E, service"),
    ("tpot", "TPOT"),
    ("itl", "ITL, server's"),
    ("chunk_gap", "chunk gap"),
    ("token_gap", "token gap"),
    ("max_stall", "max stall"),
    ("schedule_lag", "schedule lag"),
)


def digits(value: float, most: int = 3) -> str:
    """Four significant digits where there are that many after the point, thousands with commas."""
    if value == 0:
        return "0"
    decimals = min(most, max(0, 3 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def ms(duration_ns: float | None) -> str:
    return UNKNOWN if duration_ns is None else digits(duration_ns / 1e6)


def ends(interval: Interval | None, scale: float = 1.0, between: str = " ") -> str:
    """`47.00 52.10`; empty if there is no interval."""
    if interval is None:
        return ""
    low, high = (OUT_OF_REACH if end is None else digits(end * scale) for end in (interval.low, interval.high))
    return f"{low}{between}{high}"


def estimate(found: Estimate, scale: float = 1.0) -> str:
    """`367.4 [335.6-398.4]`"""
    shown = digits(found.value * scale)
    return f"{shown} [{ends(found.interval, scale, '-')}]" if found.interval else shown


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{digits(100 * share, 2)} %"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`"""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def sentence(name: str, text: str, style: str = "") -> Sentence:
    """Returns a sentence: its subject, and what is said of it, which may be a server's words."""
    return Sentence(plain(text.translate(_SPACES)), style, head=f"{name:<10}", indent=10)


_SPACES = dict.fromkeys(map(ord, "\t\n\v\f\r"), " ")


def latencies(found: Summary) -> FittingTable:
    """The whole table; the same with intervals on two lines; the same without what is missed least."""
    fewer = tuple(name for name in STATISTICS if name not in LEAST_MISSED)
    narrow = _latency_table(found, fewer, "-\n")
    narrow.caption = f"{listed(LEAST_MISSED)} have no room here: a wider terminal, --json or --html shows them."
    return FittingTable(_latency_table(found, STATISTICS, "-"), _latency_table(found, STATISTICS, "-\n"), narrow)


def _latency_table(found: Summary, statistics: Sequence[str], between: str) -> Table:
    """A row for the estimates, one beneath for their intervals."""
    table = _table()
    table.add_column(f"ms, {found.confidence:.0%} beneath", overflow="fold")
    for name in ("mean", *statistics, "max"):
        table.add_column(name, justify="right", overflow="fold")
    for name, title in ROWS:
        if (figure := latency(found, name)) is not None:
            shown = estimates(figure, statistics)
            count = gaps_counted(figure) or f"{figure.count:,}"
            table.add_row(Text(title), *(ms(one.value) for one in shown), ms(figure.max))
            intervals = (Text(ends(one.interval, 1e-6, between), "dim") for one in shown)
            table.add_row(Text(f"  {count}", "dim"), *intervals, Text(""))
    return table


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True, show_edge=False, pad_edge=False, caption_justify="left"
    )


def latency(found: Summary, name: str) -> Figure | None:
    """Returns a figure that says something new: token gaps are the chunk gaps where every chunk is a token."""
    figure = found.figures.get(name)
    return None if name == "token_gap" and figure == found.figures.get("chunk_gap") else figure


def gaps_counted(figure: Figure) -> str:
    """Empty where every request has one value."""
    return "" if figure.count == figure.num_requests else f"{figure.count:,} gaps"


def estimates(figure: Figure, statistics: Sequence[str]) -> tuple[Estimate, ...]:
    return figure.mean, *(figure.percentiles[name] for name in statistics)


BUCKET_COLUMNS = tuple((name, statistic) for name in ("ttft", "tpot", "e2e") for statistic in ("p50", "p99"))


def bucket_cells(found: Summary) -> Iterator[tuple[str, ...]]:
    """Yields a row for each bucket of prompt lengths: its name, its requests, and `BUCKET_COLUMNS` in ms."""
    for bucket, figures in found.buckets.items():
        cells = [ms(figures[n].percentiles[s].value) if n in figures else UNKNOWN for n, s in BUCKET_COLUMNS]
        yield bucket, f"{figures['e2e'].count:,}" if "e2e" in figures else UNKNOWN, *cells


def buckets(found: Summary) -> FittingTable:
    return FittingTable(_bucket_table(found, " "), _bucket_table(found, "\n"))


def _bucket_table(found: Summary, between: str) -> Table:
    """between: the words of a heading."""
    table = _table()
    table.add_column(f"prompt{between}tokens", overflow="fold")
    table.add_column("requests", justify="right", overflow="fold")
    for name, statistic in BUCKET_COLUMNS:
        table.add_column(f"{name.upper()}{between}{statistic}", justify="right", overflow="fold")
    for cells in bucket_cells(found):
        table.add_row(*cells)
    return table


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


def _check_sentence(check: RunCheck) -> str:
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
        text = f"cannot tell for {names}: {worst.num_requests} requests, and {MIN_INDEPENDENT} are the least"
    else:
        longer = max(2, ceil(MIN_INDEPENDENT / max(0.1, worst.independent)))
        text = (
            f"cannot tell for {names}: the {worst.num_requests:,} requests are about {digits(worst.independent, 0)} "
            f"independent ones ({ROW_NAMES[name]}), as they waited in the same queues; {_too_few(worst.independent)}."
            f" A run about {longer} times as long would tell, or a lower rate"
        )
    yield sentence("intervals", f"{text}.", "yellow")


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
    known = []
    for name in MAY_BE_OFF:
        if name in found.figures:
            p50, p99 = (ms(off_ns(run, arm, parse_metric(f"{name}_{statistic}"))) for statistic in ("p50", "p99"))
            known.append(f"{ROW_NAMES[name]} {p50} ms at p50 and {p99} ms at p99")
    yield sentence("lateness", f"the client's own may have made longer, by at most: {', '.join(known)}.", "yellow")


def checks(run: Run) -> RenderableType:
    """Returns what the client found of itself: the good in one line, each other by itself."""
    good = [check.name.replace("_", " ") for check in run.checks if check.ok]
    lines = [
        sentence("note", _check_sentence(check), "yellow") for check in run.checks if not check.ok and not check.voids
    ]
    if good:
        lines.append(sentence("checked", f"in order: {listed(good)}"))
    return Group(*lines)


ERRORS_SHOWN, ERROR_CHARACTERS = 3, 200
ERRORS = (Ending.REFUSED, Ending.FAILED, Ending.TIMED_OUT)
CLOCKS_DIFFER = 0.05
TREND_STYLES = {Trend.STEADY: "green", Trend.UNCLEAR: "yellow"}


def render(run: Run, slo: Mapping[str, float] | None = None, *, with_definitions: bool = False) -> RenderableType:
    """All arms of a run. `slo`, if given, is judged instead of the run's own; {} judges nothing."""
    terms = dict(run.slo if slo is None else slo)
    parts: list[RenderableType] = [banner(run), _header(run)]
    parts += [render_arm(run, arm, terms) for arm in range(len(run.arms))]
    return at_most(Group(*parts, checks(run), _definitions() if with_definitions else Group()))


def render_arm(run: Run, arm: int, slo: Mapping[str, float]) -> RenderableType:
    """One server's figures."""
    found = summary(run, arm, limits=limits_of(slo, run.slo))
    parts: list[RenderableType] = [
        _arm_line(run, arm),
        _endings(found),
        *_errors(run, arm),
        Text(),
        latencies(found),
        Text(),
    ]
    parts += [*cannot_tell(found), *may_be_off(run, arm, found), *_clocks(found), *_rates(found), *_drifts(found)]
    if len(found.buckets) > 1:
        parts += [Text(), buckets(found)]
    if slo:
        parts += [Text(), *_slo(found, slo)]
    return Group(*parts, *_of_server(run, arm), Text())


def _header(run: Run) -> RenderableType:
    began = datetime.datetime.fromtimestamp(run.begin_unix_ns / 1e9, datetime.UTC)
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    lines = [
        ("run", f"{run.label}  {began:%Y-%m-%d %H:%M:%S} UTC".strip()),
        ("load", _settings(run)),
        ("window", f"{digits(seconds)} s of intended starts, from {digits(run.measured_from_ns / 1e9)} s on"),
    ]
    if run.stopped:
        lines.append(("stopped", run.stopped))
    return Group(*(sentence(name, text) for name, text in lines))


def _settings(run: Run) -> str:
    asked = [f"{name} {value}" for name, value in run.settings.items() if value not in (None, "", [], {})]
    digest = [f"schedule {run.schedule_digest}"] if run.schedule_digest else []
    return ", ".join([*asked, *digest]) or UNKNOWN


def _arm_line(run: Run, arm: int) -> Sentence:
    server = run.arms[arm]
    words = [server.url, " ".join(filter(None, (server.kind, server.version))), f"model {server.model or UNKNOWN}"]
    if server.round_trip_ns:
        words.append(f"round trip {ms(sorted(server.round_trip_ns)[len(server.round_trip_ns) // 2])} ms")
    name = "server" if len(run.arms) == 1 else f"server {'AB'[arm]}"
    return sentence(name, ", ".join(words), "bold")


def _endings(found: Summary) -> RenderableType:
    counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in found.endings.items() if count]
    text = f"{found.intended:,} intended: {listed(counts)}"
    if found.errors:
        text += f"; {percent(found.error_rate)} errors, which are in no latency below"
    if found.endings[Ending.CANCELLED.value]:
        text += "; what was cancelled counts neither as good nor as bad"
    return sentence("requests", text, "yellow" if found.errors else "")


def _errors(run: Run, arm: int) -> Iterator[Sentence]:
    """What went wrong most often, in the server's words where it gave any."""
    known = Counter(
        (outcome.ending.value.replace("_", " "), (outcome.error or "")[:ERROR_CHARACTERS])
        for outcome in run.outcomes
        if outcome.arm == arm and outcome.phase is Phase.MEASURED and outcome.error and outcome.ending in ERRORS
    )
    for (ending, error), count in known.most_common(ERRORS_SHOWN):
        yield sentence("", f"{count:,} {ending}: {error}", "yellow")
    if len(known) > ERRORS_SHOWN:
        yield sentence("", f"and {len(known) - ERRORS_SHOWN:,} other errors; --out or --csv has all", "yellow")


def _clocks(found: Summary) -> Iterator[Sentence]:
    """When the two clocks tell different stories, say which one the user felt."""
    felt, served = found.figures.get("ttft"), found.figures.get("service_ttft")
    if felt is None or served is None:
        return
    late_ns = felt.percentiles["p99"].value - served.percentiles["p99"].value
    if late_ns > CLOCKS_DIFFER * served.percentiles["p99"].value:
        text = (
            f"Requests were sent later than intended: {ms(late_ns)} ms lie between the clocks at p99 of TTFT. Users "
            "feel the response times; service times alone would have hidden this."
        )
        yield sentence("clocks", text, "yellow")
    if found.tpot_unknown:
        text = f"unknown for {found.tpot_unknown:,} requests: the server did not tell how many tokens came in a chunk."
        yield sentence("TPOT", text, "yellow")


def _rates(found: Summary) -> Iterator[Sentence]:
    if found.window.is_makespan:
        yield sentence("rates", f"over {digits(found.window.seconds)} s, from the window's begin to the last end")
    yield sentence("output", f"{estimate(found.output_token_rate)} tokens/s")
    if found.prompt_token_rate.value:
        yield sentence("prompts", f"{estimate(found.prompt_token_rate)} tokens/s")
    done = estimate(found.request_rate)
    yield sentence("answered", f"{done} requests/s, of {digits(found.intended_rate)} intended")
    now = found.concurrency
    yield sentence("in flight", f"{digits(now.mean)} requests on average, {now.peak:,} at most")
    if found.goodput is not None:
        yield sentence("goodput", _goodput(found))
    if found.cached_share is not None:
        expected = found.expected_cached_share
        of = f", expected {percent(expected)}" if expected is not None else ""
        yield sentence(
            "prefixes", f"{percent(found.cached_share)} of the prompt tokens came from the server's cache{of}"
        )


def _goodput(found: Summary) -> str:
    good = found.goodput
    assert good is not None
    limits = listed([f"{name} <= {ms(limit)} ms" for name, limit in good.limits.items()])
    return (
        f"{estimate(good.share, 100)} % ({good.good:,} of {good.intended:,} intended) within {limits}; "
        f"{digits(good.per_s)} good requests/s"
    )


def _drifts(found: Summary) -> Iterator[Sentence]:
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        its: Drift = found.drift[name]
        if its.ratio is None:
            continue
        text = f"{title} {its.trend.value}: second half / first half {digits(its.ratio)} [{ends(its.interval, 1, '-')}]"
        yield sentence("drift", text, TREND_STYLES.get(its.trend, "red"))


def _slo(found: Summary, slo: Mapping[str, float]) -> Iterator[Sentence]:
    for result in judge(found, slo):
        text, style = ("kept", "green") if result.ok else ("MISSED", "bold red")
        yield sentence("SLO", f"{text}: {result.sentence}", style)


def _of_server(run: Run, arm: int) -> Iterator[RenderableType]:
    """The server's own metrics over the run, where it has any that are understood."""
    from splittime.bench.join_view import render_server_view
    from splittime.wire.dialects import DIALECTS

    if run.arms[arm].kind in DIALECTS and run.arms[arm].metrics_after:
        yield Text()
        yield render_server_view(run, arm)
    for note in run.arms[arm].notes:
        yield sentence("note", note)


def _definitions() -> RenderableType:
    return Group(Text(), *(Sentence(f"{name}: {text}", "dim", indent=2) for name, text in DEFINITIONS))
