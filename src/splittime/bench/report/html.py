"""A run as one HTML page: everything in it, nothing fetched. It opens from disk, on paper and in a mail ten years on.

`write_html` is the door. The order is that of a reader's questions: may I believe it, how fast was it, when and how
was it slow, for whom, why, what does the server say, how was it measured. Plots are drawn by `present.plot` as SVG,
with no charting library: plotly alone is 4.8 MB, in a report that is 0.3 MB with all its requests, and would have to
run before anything is seen. The page's own script (`assets/report.js`) only adds zoom and read-out.

Colours of stages are the dashboard's own file, read as it is: one stage has one colour everywhere. All that comes from
a run goes through the template's escaping, and a content policy lets no other script run and nothing be loaded.
`tests/bench/test_html_report.py` and `tests/browser/test_report.py` check it.

How latencies are spread: a histogram of each, and TTFT against prompt length with the buckets' medians.

Histograms count complete, measured requests. Bins have one width on the plot's scale, which is logarithmic where the
spread is wide. Chunk gaps and token gaps are drawn together and apart: a server that sends several tokens in a chunk
has long gaps between chunks, and many token gaps of 0, which a logarithmic scale cannot show and the caption counts.

The run as it went: latencies, tokens, requests in flight and the server's own state, one above the other in time.

All panels share one axis, seconds from the run's begin, so that what a client felt stands above what the server said at
that moment. Each request is at its *intended* start: a request that a frozen server made late is where its user began
to wait, not where it was sent. Grey dots are service times; where they hide behind the others the clocks agree.
"""

import base64
import hashlib
import string
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import orjson
from markupsafe import Markup

from splittime.bench.book import requests as one
from splittime.bench.book.figures import DEFINITIONS, Summary, prompt_tokens, summary
from splittime.bench.book.records import Outcome, Run, Sample
from splittime.bench.book.requests import arrivals, complete, in_time_order, per_request, series, token_arrivals
from splittime.bench.book.slo import judge
from splittime.bench.join import join
from splittime.bench.join_view import server_view
from splittime.bench.report import html_books as words
from splittime.bench.report.html_books import BAD, largest_part, left_out, part_lines, slowest, time_went
from splittime.bench.report.table import ms, percent
from splittime.core.files import write_whole
from splittime.ledger.derive import PROMPT_BUCKET_EDGES, prompt_bucket
from splittime.present.plot import Array, Plot, Scale, duration, fitting, from_zero, number, plot_styles, share
from splittime.stats.intervals import nearest_rank
from splittime.wire.dialects import DIALECTS

TIME_BINS = 100
MEDIAN_BINS = 40
MIN_OF_MEDIAN = 5  # requests in a bin, for a median
MIN_SILENCE_NS = 250_000_000
MIN_SILENCE_GAPS = 20  # times the median chunk gap
MOST_SILENCES = 20

LATENCY_KEYS = (
    ("response", "from the intended start"),
    ("service", "from the actual send, where it differs"),
    ("median", "median"),
)


class TimePlots:
    """The panels of one arm."""

    def __init__(self, run: Run, arm: int) -> None:
        self.run = run
        self.outcomes = in_time_order(outcome for outcome in run.outcomes if outcome.arm == arm)
        self.samples = [sample for sample in run.samples if sample.arm == arm]
        ends = [o.end_ns for o in self.outcomes if o.end_ns is not None]
        self.time = Scale(0.0, max([run.measured_until_ns, *ends]) / 1e9 or 1.0)
        self.silences = silences(self.outcomes)

    def panels(self) -> list[Plot]:
        found = [
            self._latency("TTFT", "ttft sttft", one.response_ttft_ns, one.service_ttft_ns),
            self._latency("E2E", "e2e se2e", one.response_ns, one.service_ns),
            self._tokens(),
            self._requests(),
            *self._kv_use(),
        ]
        for ink, label in LATENCY_KEYS:
            found[0].key(ink, label)
        if any(outcome.ending in BAD for outcome in self.outcomes):
            found[0].key("error", "failed or refused")
        self._window_notes(found[0])
        found[-1].x_axis(lambda seconds: f"{number(seconds)} s")
        return found

    @property
    def silence_words(self) -> str:
        """Empty if there was none."""
        if not self.silences:
            return ""
        begin_ns, end_ns = max(self.silences, key=lambda silence: silence[1] - silence[0])
        more = f", and {len(self.silences) - 1} more such silences" if len(self.silences) > 1 else ""
        from_to = f"for {duration(end_ns - begin_ns)} from second {begin_ns / 1e9:.1f} on"
        return f"No token came to anyone {from_to}, although answers were under way{more}."

    def _panel(self, y: Scale, title: str, described: str, height_px: int) -> Plot:
        plot = Plot(self.time, y, title=title, described=described, height_px=height_px)
        low, high = self.run.measured_from_ns / 1e9, min(self.run.measured_until_ns / 1e9, self.time.high)
        for begin, end in ((0.0, low), (high, self.time.high)):
            if end > begin:
                plot.band(begin, end, "outside")
        for begin_ns, end_ns in self.silences:
            plot.band(begin_ns / 1e9, end_ns / 1e9, "silence")
        return plot

    def _latency(
        self,
        name: str,
        fields: str,
        response: Callable[[Outcome], float | None],
        service: Callable[[Outcome], float | None],
    ) -> Plot:
        whole = complete(self.outcomes)
        times = np.array([o.intended_ns / 1e9 for o in whole])
        felt, served = _values(whole, response), _values(whole, service)
        scale = fitting(np.concatenate([felt, served]))
        plot = self._panel(scale, name, f"{name} of each request by its intended start.", 190)
        plot.y_axis(duration).dots(times, served, "service")
        plot.dots(times, felt, "response")
        plot.line(*binned_median(times, felt, self.time.high), "median")
        plot.answers("t", fields)
        if failed := [o.intended_ns / 1e9 for o in self.outcomes if o.ending in BAD]:
            plot.rug(failed, "error")
        return plot

    def _window_notes(self, plot: Plot) -> None:
        low, high = self.run.measured_from_ns / 1e9, self.run.measured_until_ns / 1e9
        top = plot.y.high
        if low > 0.08 * self.time.high:
            plot.note("warm-up", 0.0, top, "dim", "right above", moves=True)
        plot.note("measured", low, top, "dim", "right above", moves=True)
        if high < 0.9 * self.time.high:
            plot.note("after the window", high, top, "dim", "right above", moves=True)
        for begin_ns, end_ns in sorted(self.silences, key=lambda s: s[0] - s[1])[:3]:
            words = f"no token for {duration(end_ns - begin_ns)}"
            plot.note(words, begin_ns / 1e9, plot.y.low, "text", "right up", moves=True)

    def _tokens(self) -> Plot:
        at_ns, tokens = token_arrivals(self.outcomes)
        edges = np.linspace(0, self.time.high, TIME_BINS + 1)
        rates = np.histogram(at_ns / 1e9, edges, weights=tokens)[0] / np.diff(edges)
        described = "Output tokens that arrived, per second, over the run."
        plot = self._panel(from_zero(rates), "output tokens/s", described, 100)
        plot.y_axis(number).steps(edges, rates, "tokens", "area")
        return plot

    def _requests(self) -> Plot:
        """The client's own count is exact at every instant; the server's are what it said when it was asked."""
        edges, flight = in_flight(self.outcomes, self.time.high)
        text = {name: _sampled(self.samples, name) for name in ("waiting", "running")}
        highest = [flight, *(values for _, values in text.values())]
        scale = from_zero(np.concatenate(highest), headroom=1.12)
        described = "Requests in flight by the client's count; waiting and running by the server's own metrics."
        plot = self._panel(scale, "requests", described, 130)
        plot.y_axis(number).steps(edges, flight, "flight")
        plot.key("flight", "in flight, by the client")
        for name, (times, values) in text.items():
            if len(times):
                plot.line(times, values, name)
                plot.key(name, f"{name}, by the server")
        return plot

    def _kv_use(self) -> Iterator[Plot]:
        times, values = _sampled(self.samples, "kv_usage")
        if len(times):
            scale = Scale(0.0, 1.0) if values.max(initial=0) > 0.3 else from_zero(values, headroom=1.2)
            described = "The share of the server's KV cache in use, by its own metrics."
            plot = self._panel(scale, "KV cache in use", described, 80)
            plot.y_axis(share).line(times, values, "kv")
            yield plot


def _values(outcomes: Sequence[Outcome], of: Callable[[Outcome], float | None]) -> Array:
    return np.array([np.nan if (ns := of(outcome)) is None else ns for outcome in outcomes], dtype=np.float64)


def _sampled(samples: Sequence[Sample], name: str) -> tuple[Array, Array]:
    known = [(s.at_ns / 1e9, value) for s in samples if (value := getattr(s, name)) is not None]
    times, values = np.array(known, dtype=np.float64).reshape(-1, 2).T
    return times, values


def binned_median(times: Array, values: Array, until: float) -> tuple[Array, Array]:
    """In the middle of each of `MEDIAN_BINS` bins; nan where there are too few."""
    edges = np.linspace(0, until, MEDIAN_BINS + 1)
    place = np.digitize(times, edges) - 1
    members = [values[(place == i) & ~np.isnan(values)] for i in range(MEDIAN_BINS)]
    medians = [float(np.median(m)) if len(m) >= MIN_OF_MEDIAN else np.nan for m in members]
    return (edges[1:] + edges[:-1]) / 2, np.array(medians)


def in_flight(outcomes: Sequence[Outcome], until: float) -> tuple[Array, Array]:
    """The most at once, between sent and ended, in each of some bins over the run."""
    spans = [(o.sent_ns, o.end_ns) for o in outcomes if o.sent_ns is not None and o.end_ns is not None]
    edges = np.linspace(0, until, 8 * TIME_BINS + 1)
    begins, ends = np.sort(np.array(spans, dtype=np.float64).reshape(-1, 2).T / 1e9, axis=1)
    at_edge = np.searchsorted(begins, edges, "right") - np.searchsorted(ends, edges, "right")
    most = np.maximum(at_edge[:-1], at_edge[1:]).astype(np.float64)
    at_begin = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, "right")
    np.maximum.at(most, np.clip(np.searchsorted(edges, begins, "right") - 1, 0, len(most) - 1), at_begin)
    return edges, most


def silences(outcomes: Sequence[Outcome]) -> list[tuple[int, int]]:
    """The longest spans in which no chunk came to anyone although some request was in the midst of its answer: what a
    frozen server looks like from outside. At least `MIN_SILENCE_NS`, and many times the usual gap between chunks."""
    streamed = [o for o in outcomes if len(o.chunk_ns) > 1]
    at_ns, counts = arrivals(streamed)
    if not len(at_ns):
        return []
    within = np.repeat(np.arange(len(streamed)), counts)
    usual_ns = float(np.median(np.diff(at_ns)[within[1:] == within[:-1]]))
    every = np.sort(np.concatenate([at_ns, arrivals([o for o in outcomes if len(o.chunk_ns) == 1])[0]]))
    gaps = np.diff(every)
    long = np.flatnonzero(gaps >= max(MIN_SILENCE_NS, MIN_SILENCE_GAPS * usual_ns))
    begun, ended = (np.sort([o.chunk_ns[i] for o in streamed]) for i in (0, -1))
    midst = [i for i in long if np.searchsorted(begun, every[i], "right") > np.searchsorted(ended, every[i], "right")]
    longest = sorted(sorted(midst, key=lambda i: -gaps[i])[:MOST_SILENCES])
    return [(int(every[i]), int(every[i + 1])) for i in longest]


MOST_NAMED = 20_000  # requests whose dots say who they are; beyond, that alone would be megabytes
BINS = 60
PERCENTS = (50, 99)


def write_html(run: Run, path: Path) -> None:
    """Write whole or not at all. Raises `ConfigError` where it cannot be written."""
    write_whole(path, render_html(run).encode("utf-8", "replace"), param="html")


def render_html(run: Run) -> str:
    """The page. The same run gives the same bytes."""
    package = files("splittime")
    assets = {name: package.joinpath("bench/report/assets", name).read_text("utf-8") for name in _ASSETS}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    script = assets["report.js"]
    return environment.from_string(assets["report.html"]).render(
        run=run,
        words=words,
        arms=[_arm(run, arm) for arm in range(len(run.arms))],
        failed_checks=[check for check in run.checks if check.voids and not check.ok],
        definitions=DEFINITIONS,
        styles=Markup(plot_styles() + assets["report.css"]),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


_ASSETS = ("report.html", "report.css", "report.js")


def _arm(run: Run, arm: int) -> dict[str, Any]:
    """All that the page says of one server."""
    found, joined = summary(run, arm), join(run, arm)
    server = run.arms[arm]
    view = server_view(run, arm)
    outcomes = [outcome for outcome in run.outcomes if outcome.arm == arm]
    return {
        "key": string.ascii_uppercase[arm],
        "found": found,
        "server": server,
        "slo": judge(found, run.slo) if run.slo else [],
        "time": TimePlots(run, arm),
        "histograms": histograms(run, found),
        "ttft_by_prompt": ttft_by_prompt(run, arm),
        "time_went": time_went(joined),
        "parts": part_lines(joined),
        "largest_part": largest_part(joined),
        "left_out": left_out(joined),
        "slowest": slowest(run, arm, joined),
        "has_accounts": bool(joined.books),
        "view": view if server.kind in DIALECTS and server.metrics_after else None,
        "notes": view.notes,
        "data": _embedded(outcomes),
    }


def _embedded(outcomes: Sequence[Outcome]) -> Markup:
    """Returns what the read-out of a dot says, by columns. `<` is written so that no text can end the script
    element."""
    named = outcomes if len(outcomes) <= MOST_NAMED else []
    columns = {
        "index": [o.index for o in named],
        "id": [o.request_id for o in named],
        "t": [round(o.intended_ns / 1e9, 4) for o in named],
        "prompt": [prompt_tokens(o) for o in named],
        "output": [one.output_tokens(o) for o in named],
        "ttft": [one.response_ttft_ns(o) for o in named],
        "sttft": [one.service_ttft_ns(o) for o in named],
        "e2e": [one.response_ns(o) for o in named],
        "se2e": [one.service_ns(o) for o in named],
        "ending": [o.ending.value for o in named],
        "phase": [o.phase.value for o in named],
    }
    text = orjson.dumps(columns).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(text)


class SpreadPlot(NamedTuple):
    """A plot with its heading; `clause` says what the plot cannot show."""

    title: str
    plot: Plot
    clause: str


def histograms(run: Run, found: Summary) -> list[SpreadPlot]:
    whole = complete(in_time_order(run.measured(found.arm)))
    pairs = (
        ("Time to first token", "ttft", "service_ttft"),
        ("End to end", "e2e", "service_e2e"),
        ("Time per output token", "tpot", None),
        ("Gaps", "chunk_gap", "token_gap"),
    )
    made = []
    for title, main, other in pairs:
        values = series(whole, main).values
        if len(values):
            beside = series(whole, other).values if other else np.empty(0)
            made.append(_histogram(title, main, values, beside))
    return made


def _histogram(title: str, name: str, values: Array, beside: Array) -> SpreadPlot:
    is_gaps = name == "chunk_gap"
    together = np.array_equal(np.sort(values), np.sort(beside))
    other = np.empty(0) if together else beside
    zeros = int((other <= 0).sum()) if is_gaps else 0
    scale = fitting(np.concatenate([values, other]))
    edges = scale.edges(BINS)
    shares = [_shares(array, edges) for array in (values, other) if len(array)]
    plot = Plot(scale, from_zero(np.concatenate(shares), 1.25), described=_described(title, values), height_px=150)
    plot.x_axis(duration).steps(edges, shares[0], "chunk" if is_gaps else "response", "area")
    if len(shares) > 1:
        plot.steps(edges, shares[1], "token" if is_gaps else "service")
    for percent_, value, place in zip(PERCENTS, nearest_rank(values, PERCENTS), ("below", "lower"), strict=True):
        plot.upright(value, "text")
        side = "left" if scale.share(value) > 0.6 else "right"
        plot.note(f"p{percent_} {duration(value)}", value, plot.y.high, "text", f"{side} {place}")
    return SpreadPlot(title, plot, _clause(is_gaps, together, len(beside), zeros))


def _clause(is_gaps: bool, together: bool, num_beside: int, zeros: int) -> str:
    if not is_gaps:
        return "" if together or not num_beside else "Outline: service time, from the actual send."
    if not num_beside:
        return "Between chunks. The server does not tell how many tokens a chunk holds."
    if together:
        return "Every chunk was one token: chunk gaps and token gaps are the same."
    came = f"; {percent(zeros / num_beside)} of the tokens came in one chunk with the token before (0 ms)"
    return f"Filled: between chunks. Outline: between tokens{came if zeros else ''}."


def _shares(values: Array, edges: Array) -> Array:
    """Returns the share of all values in each bin; what is 0 on a logarithmic scale is counted in none."""
    return np.histogram(values, edges)[0] / len(values)


def _described(title: str, values: Array) -> str:
    middle, high = nearest_rank(values, PERCENTS)
    return f"{title}: half within {ms(middle)} ms, 99 % within {ms(high)} ms, of {len(values):,}."


def ttft_by_prompt(run: Run, arm: int) -> Plot | None:
    """None if there are no lengths, or only one."""
    whole = [o for o in complete(in_time_order(run.measured(arm))) if prompt_tokens(o) and o.chunk_ns]
    lengths = np.array([prompt_tokens(o) for o in whole], dtype=np.float64)
    if len(np.unique(lengths)) < 2:
        return None
    felt = per_request(whole, "ttft")
    across = _lengths_scale(lengths)
    described = "TTFT of each request against the tokens of its prompt, with the median of each bucket of lengths."
    plot = Plot(across, fitting(felt), title="TTFT", described=described, height_px=280)
    ticks = [e for e in PROMPT_BUCKET_EDGES if across.low <= e <= across.high] if across.is_log else None
    plot.x_axis(lambda tokens: f"{number(tokens)}", ticks).y_axis(duration).dots(lengths, felt, "response")
    plot.answers("prompt", "ttft sttft")
    plot.key("response", "a request")
    plot.key("median", "median of a bucket of lengths")
    for low, high, median in bucket_medians(lengths, felt):
        left, right = max(low, across.low), min(high, across.high)
        plot.level(left, right, median, "median")
        plot.note(
            duration(median),
            (left * right) ** 0.5 if across.is_log else (left + right) / 2,
            median,
            "text",
            "middle on",
        )
    return plot


def _lengths_scale(lengths: Array) -> Scale:
    if lengths.max() / lengths.min() < 4:
        return Scale(float(lengths.min()) * 0.95, float(lengths.max()) * 1.05)
    return Scale(float(lengths.min()) / 1.1, float(lengths.max()) * 1.1, is_log=True)


def bucket_medians(lengths: Array, values: Array) -> list[tuple[float, float, float]]:
    """From, to (tokens) and median of each prompt-length bucket that has requests."""
    buckets: dict[str, list[float]] = {}
    for length, value in sorted(zip(lengths, values, strict=True)):
        buckets.setdefault(prompt_bucket(int(length)), []).append(value)
    return [(*_ends(name, lengths), float(np.median(members))) for name, members in buckets.items()]


def _ends(bucket: str, lengths: Sequence[float] | Array) -> tuple[float, float]:
    low, _, high = bucket.partition("-")
    return (float(low), float(high)) if high else (float(low.rstrip("+")), float(max(lengths)))
