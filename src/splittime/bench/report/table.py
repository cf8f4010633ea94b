"""A run for people: the tables that `splittime bench` ends with, the same without colour.

All of it fits the terminal, and `COLUMNS` at the most (`present.tables`): `latencies` says how.

`render` shows, in this order: whether the figures may be believed (VOID comes first, with the checks that failed), what
was asked of whom, how many requests ended how, latencies by both clocks with their intervals, rates, drift, prompt
lengths, the SLO, what the server said of itself, and if asked what every word means.

Whether the figures may be believed is: VOID, what has no interval, what the client's lateness may have added, and what
the client found of itself.
"""

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from splittime.bench.book.figures import Summary, summary
from splittime.bench.book.metrics import failed_by_lateness, off_ns, parse_metric
from splittime.bench.book.rates import DEFINITIONS, Drift, Trend
from splittime.bench.book.records import Ending, Phase, Run, RunCheck
from splittime.bench.book.slo import judge, limits_of
from splittime.bench.report.latencies import ROWS, buckets, latencies
from splittime.bench.report.text import UNKNOWN, digits, ends, estimate, listed, ms, percent, sentence
from splittime.present.tables import Sentence, at_most
from splittime.stats.intervals import MIN_INDEPENDENT, MOST_ABOVE, Estimate

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
        text += "; what the schedule cancelled counts neither as good nor as bad"
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
    from splittime.bench.server_view import render_server_view
    from splittime.wire.dialects import DIALECTS

    if run.arms[arm].kind in DIALECTS and run.arms[arm].metrics_after:
        yield Text()
        yield render_server_view(run, arm)
    for note in run.arms[arm].notes:
        yield sentence("note", note)


def _definitions() -> RenderableType:
    return Group(Text(), *(Sentence(f"{name}: {text}", "dim", indent=2) for name, text in DEFINITIONS))
