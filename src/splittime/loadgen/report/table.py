"""A run for people: the tables that `splittime bench` ends with, the same without colour.

All of it fits the terminal, and `COLUMNS` at the most (`core.fitted`): `latencies` says how.

`render` shows, in this order: whether the figures may be believed (VOID comes first, with the checks that failed), what
was asked of whom, how many requests ended how, latencies by both clocks with their intervals, rates, drift, prompt
lengths, the SLO, what the server said of itself, and if asked what every word means.
"""

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from splittime.core.fitted import COLUMNS, Sentence, at_most
from splittime.ledger.client_book import Ending, Phase, Run
from splittime.ledger.client_figures import Drift, Summary, Trend, definitions, summary
from splittime.loadgen.report.doubts import banner, cannot_tell, checks, may_be_off
from splittime.loadgen.report.latencies import buckets, latencies
from splittime.loadgen.report.text import UNKNOWN, digits, ends, estimate, line, listed, ms, percent
from splittime.loadgen.slo import judge, limits_of

__all__ = ["COLUMNS", "banner", "render", "render_arm"]
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
    return Group(*(line(name, said) for name, said in lines))


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
    return line(name, ", ".join(words), "bold")


def _endings(found: Summary) -> RenderableType:
    counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in found.endings.items() if count]
    said = f"{found.intended:,} intended: {listed(counts)}"
    if found.errors:
        said += f"; {percent(found.error_rate)} errors, which are in no latency below"
    if found.endings[Ending.CANCELLED.value]:
        said += "; what the schedule cancelled counts neither as good nor as bad"
    return line("requests", said, "yellow" if found.errors else "")


def _errors(run: Run, arm: int) -> Iterator[Sentence]:
    """What went wrong most often, in the server's words where it gave any."""
    told = Counter(
        (outcome.ending.value.replace("_", " "), (outcome.error or "")[:ERROR_CHARACTERS])
        for outcome in run.outcomes
        if outcome.arm == arm and outcome.phase is Phase.MEASURED and outcome.error and outcome.ending in ERRORS
    )
    for (ending, error), count in told.most_common(ERRORS_SHOWN):
        yield line("", f"{count:,} {ending}: {error}", "yellow")
    if len(told) > ERRORS_SHOWN:
        yield line("", f"and {len(told) - ERRORS_SHOWN:,} other errors; --out or --csv has all", "yellow")


def _clocks(found: Summary) -> Iterator[Sentence]:
    """When the two clocks tell different stories, say which one the user felt."""
    felt, served = found.figures.get("ttft"), found.figures.get("service_ttft")
    if felt is None or served is None:
        return
    late_ns = felt.percentiles["p99"].value - served.percentiles["p99"].value
    if late_ns > CLOCKS_DIFFER * served.percentiles["p99"].value:
        said = (
            f"Requests were sent later than intended: {ms(late_ns)} ms lie between the clocks at p99 of TTFT. Users "
            "feel the response times; service times alone would have hidden this."
        )
        yield line("clocks", said, "yellow")
    if found.tpot_unknown:
        said = f"unknown for {found.tpot_unknown:,} requests: the server did not tell how many tokens came in a chunk."
        yield line("TPOT", said, "yellow")


def _rates(found: Summary) -> Iterator[Sentence]:
    if found.window.is_makespan:
        yield line("rates", f"over {digits(found.window.seconds)} s, from the window's begin to the last end")
    yield line("output", f"{estimate(found.output_token_rate)} tokens/s")
    if found.prompt_token_rate.value:
        yield line("prompts", f"{estimate(found.prompt_token_rate)} tokens/s")
    done = estimate(found.request_rate)
    yield line("answered", f"{done} requests/s, of {digits(found.intended_rate)} intended")
    now = found.concurrency
    yield line("in flight", f"{digits(now.mean)} requests on average, {now.peak:,} at most")
    if found.goodput is not None:
        yield line("goodput", _goodput(found))
    if found.cached_share is not None:
        expected = found.expected_cached_share
        of = f", expected {percent(expected)}" if expected is not None else ""
        yield line("prefixes", f"{percent(found.cached_share)} of the prompt tokens came from the server's cache{of}")


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
        said = f"{title} {its.trend.value}: second half / first half {digits(its.ratio)} [{ends(its.interval, 1, '-')}]"
        yield line("drift", said, TREND_STYLES.get(its.trend, "red"))


def _slo(found: Summary, slo: Mapping[str, float]) -> Iterator[Sentence]:
    for result in judge(found, slo):
        said, style = ("kept", "green") if result.ok else ("MISSED", "bold red")
        yield line("SLO", f"{said}: {result.sentence}", style)


def _of_server(run: Run, arm: int) -> Iterator[RenderableType]:
    """Its own metrics over the run, where it has any that are understood."""
    from splittime.loadgen.dialects import DIALECTS
    from splittime.loadgen.dialects.view import render_server_view

    if run.arms[arm].kind in DIALECTS and run.arms[arm].metrics_after:
        yield Text()
        yield render_server_view(run, arm)
    for note in run.arms[arm].notes:
        yield line("note", note)


def _definitions() -> RenderableType:
    return Group(Text(), *(Sentence(f"{name}: {said}", "dim", indent=2) for name, said in definitions()))
