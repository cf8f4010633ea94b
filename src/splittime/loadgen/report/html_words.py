"""What the page says in words: verdict, headline figures, remarks. Plain text; the template escapes it.

The figures are those of `ledger.client_figures`, formatted as in the terminal's tables.
"""

import datetime
from typing import NamedTuple

from splittime.ledger.client_book import Check, Run
from splittime.ledger.client_figures import Figure, Summary, Trend
from splittime.ledger.client_intervals import Estimate, Interval
from splittime.loadgen.report.html_scale import number
from splittime.loadgen.report.text import OUT_OF_REACH, digits, ends, listed, ms, percent

CLOCKS_DIFFER = 0.05
LONG_NS = 10e9  # from which on headlines are in seconds


class Tile(NamedTuple):
    """name: of the figure; parts: (which, value, interval); under: a clause beneath."""

    name: str
    unit: str
    parts: tuple[tuple[str, str, str], ...]
    under: str = ""


def range_words(interval: Interval | None, scale: float = 1.0) -> str:
    """`335.6-398.4` with an en dash; where one end is not known, the other alone."""
    if interval is None or (interval.low is None and interval.high is None):
        return ""
    if interval.low is None or interval.high is None:
        known = ends(interval, scale).replace(OUT_OF_REACH, "").strip()
        return f"{'≤' if interval.low is None else '≥'} {known}"
    return ends(interval, scale).replace(" ", "\N{EN DASH}", 1)


def began(run: Run) -> str:
    at = datetime.datetime.fromtimestamp(run.begin_unix_ns / 1e9, datetime.UTC)
    return f"{at:%-d %B %Y, %H:%M:%S} UTC"


def server_words(run: Run, arm: int) -> str:
    server = run.arms[arm]
    kind = " ".join(filter(None, (server.kind, server.version)))
    return f"{kind} at {server.url}" + (f", model {server.model}" if server.model else "")


def load_words(run: Run, found: Summary) -> str:
    seconds = (run.measured_until_ns - run.measured_from_ns) / 1e9
    counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in found.endings.items() if count]
    return (
        f"{found.intended:,} requests intended in {digits(seconds)} s ({digits(found.intended_rate)} a second): "
        f"{listed(counts)}."
    )


def check_sentence(check: Check) -> str:
    sentence = check.sentence[:1].upper() + check.sentence[1:]
    if check.ok or check.value is None or check.limit is None:
        return f"{sentence}."
    return f"{sentence}. Allowed: {number(check.limit)} {check.unit}".rstrip() + "."


def tiles(found: Summary) -> list[Tile]:
    made = [_latency_tile(found, *names) for names in (("TTFT", "ttft", "service_ttft"), ("E2E", "e2e", "service_e2e"))]
    made.insert(1, _latency_tile(found, "TPOT", "tpot", None))
    parts = [
        ("tokens/s", *_rate(found.output_token_rate)),
        ("requests/s", *_rate(found.request_rate)),
    ]
    made.append(Tile("Output", "", tuple(parts), f"{digits(found.intended_rate)} requests/s were intended"))
    if found.goodput is not None:
        good = found.goodput
        limits = listed([f"{name} ≤ {ms(limit)} ms" for name, limit in good.limits.items()])
        under = f"{good.good:,} of {good.intended:,} within {limits}"
        made.append(Tile("Goodput", "", (("of intended", percent(good.share.value), _range(good.share, 100)),), under))
    return [tile for tile in made if tile.parts]


def _latency_tile(found: Summary, title: str, name: str, service: str | None) -> Tile:
    figure = found.figures.get(name)
    if figure is None:
        return Tile(title, "ms", ())
    middle, high = (figure.percentiles[statistic] for statistic in ("p50", "p99"))
    unit, scale = ("s", 1e-9) if middle.value >= LONG_NS else ("ms", 1e-6)
    parts = tuple((s, digits(e.value * scale), _range(e, scale)) for s, e in (("p50", middle), ("p99", high)))
    served = found.figures.get(service or "")
    return Tile(title, unit, parts, _service_clause(figure, served, unit, scale) if served else "")


def _service_clause(felt: Figure, served: Figure, unit: str, scale: float) -> str:
    """Figures only where the clocks tell different stories."""
    pairs = [(felt.percentiles[s].value, served.percentiles[s].value) for s in ("p50", "p99")]
    if all(late <= (1 + CLOCKS_DIFFER) * sent for late, sent in pairs):
        return f"the same from the actual send, within {CLOCKS_DIFFER:.0%}"
    return f"from the actual send only {digits(pairs[0][1] * scale)} and {digits(pairs[1][1] * scale)} {unit}"


def _range(found: Estimate, scale: float = 1e-6) -> str:
    return range_words(found.interval, scale)


def _rate(found: Estimate) -> tuple[str, str]:
    return digits(found.value), range_words(found.interval)


def remarks(run: Run, found: Summary) -> list[str]:
    """Sentences beneath the headline figures: what a reader must know to read them."""
    said = []
    if found.errors:
        said.append(f"{percent(found.error_rate)} of the requests failed; latencies are of the others.")
    said.append(
        f"{digits(found.concurrency.mean)} requests were in flight on average, {found.concurrency.peak:,} at most."
    )
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        its = found.drift[name]
        if its.ratio is not None and its.trend is not Trend.STEADY:
            between = range_words(its.interval)
            halves = f"the second half's mean was {digits(its.ratio)} times the first's (99 % interval {between})"
            said.append(f"{title} drift is {its.trend.value}: {halves}.")
    if found.cached_share is not None:
        expected = found.expected_cached_share
        of = f"; {percent(expected)} were expected to" if expected is not None else ""
        said.append(f"{percent(found.cached_share)} of the prompt tokens came from the server's prefix cache{of}.")
    if found.tpot_unknown:
        said.append(f"TPOT is unknown for {found.tpot_unknown:,} requests: the server told no tokens per chunk.")
    if run.stopped:
        said.append(f"The run was stopped: {run.stopped}.")
    return said
