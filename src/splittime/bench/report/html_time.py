"""The run as it went: latencies, tokens, requests in flight and the server's own state, one above the other in time.

All panels share one axis, seconds from the run's begin, so that what a client felt stands above what the server said at
that moment. Each request is at its *intended* start: a request that a frozen server made late is where its user began
to wait, not where it was sent. Grey dots are service times; where they hide behind the others the clocks agree.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from splittime.bench.book import requests as one
from splittime.bench.book.records import Outcome, Run, Sample
from splittime.bench.book.series import arrivals, complete, in_time_order, token_arrivals
from splittime.bench.report.html_words import BAD
from splittime.present.plot import Plot
from splittime.present.scale import Array, Scale, duration, fitting, from_zero, number, share

BINS = 100
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
        for ink, words in LATENCY_KEYS:
            found[0].key(ink, words)
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
        edges = np.linspace(0, self.time.high, BINS + 1)
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
    edges = np.linspace(0, until, 8 * BINS + 1)
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
