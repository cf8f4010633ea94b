"""What a run of the gate leaves: a value that JSON holds whole, and that the HTML page is drawn from.

Figures of single tokens are not kept: plots need KL by position, its histogram, and one line for each document.

A report as one HTML page: everything in it, nothing fetched, no script. `render_html` is the door.

In a reader's order: the verdict and why, the figures with their intervals against their margins, where in a text the
candidate differs and for which texts, questions and needle, what was read, how it was measured.
"""

import math
from collections.abc import Mapping
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup

from splittime.lab.quality.margins import RULES, Check, Margins, Verdict
from splittime.lab.quality.needle import Needle
from splittime.lab.quality.questions import Paired
from splittime.lab.quality.texts import DECODE, TokenSample, nll_difference
from splittime.present.plot import Plot, Scale, around_zero, plot_styles, share
from splittime.stats.paired import CONFIDENCE, RESAMPLES, BootstrapEstimate, Floats

POSITION_BINS, KL_BINS = 48, 40
KL_FLOOR = 1e-7  # nats: below it is the rounding of float32; the histogram's first bin holds all that is less
MOST_DOCUMENTS = 400  # that a plot tells apart


class ReportSide(msgspec.Struct, frozen=True, kw_only=True):
    """facts: how it was run. claims, read: of `model.Reads`; None for a server."""

    name: str
    facts: dict[str, Any]
    claims: tuple[str, ...] | None = None
    read: dict[str, int] | None = None


class ByPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens at positions [begin, end)."""

    begin: int
    end: int
    tokens: int
    mean: float
    p99: float


class OfDocument(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tokens: int
    base_nll: float
    nll_difference: float
    kl: float


class TextFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one context. kl_edges, kl_counts: a histogram; the first bin begins at 0, the others are equal in
    logarithm. kl_is_bound: of every kl here, that the true one may be larger."""

    where: str
    tokens: int
    kl_is_bound: bool
    base_perplexity: float
    candidate_perplexity: float
    nll_difference: BootstrapEstimate
    kl_by_position: list[ByPosition]
    kl_edges: list[float]
    kl_counts: list[int]
    documents: list[OfDocument]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """reasons: why the verdict is not PASS. notes: what was left out, and what bounds what was said."""

    verdict: Verdict
    reasons: list[str]
    base: ReportSide
    candidate: ReportSide
    checks: list[Check]
    texts: list[TextFigures]
    questions: list[Paired]
    needle: Needle | None
    margins: Margins
    notes: list[str]
    seconds: float
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    version: str = ""


def text_figures(sample: TokenSample) -> TextFigures:
    figures = sample.figures
    edges, counts = _histogram(figures.kl)
    return TextFigures(
        where=sample.where,
        tokens=sample.num_tokens,
        kl_is_bound=sample.is_bound,
        base_perplexity=math.exp(figures.base_nll.mean()),
        candidate_perplexity=math.exp(figures.candidate_nll.mean()),
        nll_difference=nll_difference(sample),
        kl_by_position=_by_position(sample),
        kl_edges=edges,
        kl_counts=counts,
        documents=_documents(sample),
    )


def _histogram(kl: Floats) -> tuple[list[float], list[int]]:
    top = max(10 * KL_FLOOR, float(kl.max()))
    edges = np.concatenate([[0.0], np.geomspace(KL_FLOOR, top * (1 + 1e-9), KL_BINS)])
    return edges.tolist(), np.histogram(kl, edges)[0].tolist()


def _by_position(sample: TokenSample) -> list[ByPosition]:
    positions, kl = sample.figures.positions, sample.figures.kl
    edges = np.unique(np.linspace(positions.min(), positions.max() + 1, POSITION_BINS + 1).astype(int)).tolist()
    found = []
    for begin, end in pairwise(edges):
        inside = kl[(positions >= begin) & (positions < end)]
        if len(inside):
            p99 = float(np.quantile(inside, 0.99))
            found.append(ByPosition(begin=begin, end=end, tokens=len(inside), mean=float(inside.mean()), p99=p99))
    return found


def _documents(sample: TokenSample) -> list[OfDocument]:
    figures, counts = sample.figures, sample.counts
    columns = [
        sample.per_document(values) / counts
        for values in (figures.base_nll, figures.candidate_nll - figures.base_nll, figures.kl)
    ]
    return [
        OfDocument(name=name, tokens=int(count), base_nll=float(nll), nll_difference=float(difference), kl=float(kl))
        for name, count, nll, difference, kl in zip(sample.names, counts, *columns, strict=True)
    ]


def as_json(report: Report) -> bytes:
    """Infinite ends of intervals become null: JSON has no word for them."""
    return msgspec.json.format(msgspec.json.encode(_finite(msgspec.to_builtins(report))), indent=2) + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render_html(report: Report) -> str:
    """The page. The same report gives the same bytes."""
    package = files("splittime")
    style = package.joinpath("lab/quality/assets/quality.css").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"figure": figure}
    template = environment.from_string(package.joinpath("lab/quality/assets/quality.html").read_text("utf-8"))
    return template.render(
        report=report,
        rows=[check_row(check) for check in report.checks],
        texts=[_plots(text, report) for text in report.texts],
        needle=None if report.needle is None else needle_plot(report.needle, report.margins.needle),
        rules=RULES,
        sides=(("base", report.base), ("candidate", report.candidate)),
        styles=Markup(plot_styles() + style),
    )


class CheckRow(NamedTuple):
    check: Check
    value: str
    interval: str
    limit: str


def check_row(check: Check) -> CheckRow:
    """A check in words and digits; also for the terminal."""
    low, high = check.estimate.low, check.estimate.high
    sign = "at most" if check.is_ceiling else "at least"
    unit = " nats" if check.unit == "nats" else ""
    interval = f"{_shown(low, check.unit)} to {_shown(high, check.unit)}" if math.isfinite(low) else "not known"
    return CheckRow(
        check, _shown(check.estimate.value, check.unit), interval, f"{sign} {_shown(check.limit, check.unit)}{unit}"
    )


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if unit == "ratio" else figure(value)


def figure(value: float) -> str:
    """Four digits that count."""
    if value == 0:
        return "0"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:,.4g}"


def _plots(text: TextFigures, report: Report) -> dict[str, Any]:
    bound = " (lower bound)" if text.kl_is_bound else ""
    limits = {check.rule: check.limit for check in report.checks if check.where == text.where}
    plots = [histogram(text, bound, limits.get("kl_p99")), by_document(text)]
    if not text.where.endswith(DECODE):  # few tokens, at the ends of texts of many lengths
        plots.insert(0, by_position(text, bound, limits.get("kl")))
    return {"text": text, "plots": plots}


def by_position(text: TextFigures, bound: str, limit: float | None) -> Plot:
    """Mean and 99th percentile over the place in the text, on a logarithmic scale."""
    bins = text.kl_by_position
    tops = [max(one.p99, one.mean, 10 * KL_FLOOR) for one in bins]
    least = min(max(one.mean, KL_FLOOR) for one in bins)
    ends = [*tops, least, *([limit] if limit else [])]
    plot = Plot(
        Scale(float(bins[0].begin), float(bins[-1].end)),
        Scale(min(ends) / 2, max(ends) * 2, is_log=True),
        title=f"KL by position, nats{bound}",
        described=f"mean KL from {figure(bins[0].mean)} at the first to {figure(bins[-1].mean)} nats at the last",
    )
    plot.x_axis(lambda value: f"{value:,.0f}").y_axis(figure)
    middles = [(one.begin + one.end) / 2 for one in bins]
    plot.line(middles, [max(one.p99, KL_FLOOR) for one in bins], "p99")
    plot.line(middles, [max(one.mean, KL_FLOOR) for one in bins], "mean")
    plot.key("p99", "99th percentile")
    plot.key("mean", "mean")
    if limit:
        plot.across(limit, "limit")
        plot.key("limit", "margin of the mean")
    return plot


def histogram(text: TextFigures, bound: str, limit: float | None) -> Plot:
    """Shares of tokens; the first bin holds what is no more than rounding."""
    edges, counts = np.array(text.kl_edges), np.array(text.kl_counts)
    edges[0] = KL_FLOOR / 3
    shares = counts / counts.sum()
    high = max(float(edges[-1]), 2 * limit if limit else 0.0)
    plot = Plot(
        Scale(float(edges[0]), high, is_log=True),
        Scale(0.0, float(shares.max()) * 1.1),
        title=f"tokens by their KL, nats{bound}",
        described=f"{shares[0]:.1%} of the tokens have a KL below {KL_FLOOR:g} nats",
    )
    plot.x_axis(lambda value: f"{value:g}").y_axis(share)
    plot.steps(edges, shares, "mean", "area")
    if limit:
        plot.upright(limit, "limit")
        plot.key("limit", "margin of the 99th percentile")
    return plot


def by_document(text: TextFigures) -> Plot:
    """In the order of the difference, so that a document that lost much stands at the end."""
    found = sorted(one.nll_difference for one in text.documents)
    shown = (
        [found[i * len(found) // MOST_DOCUMENTS] for i in range(MOST_DOCUMENTS)]
        if len(found) > MOST_DOCUMENTS
        else found
    )
    estimate = text.nll_difference
    ends = [each for each in (*shown, estimate.low, estimate.high) if math.isfinite(each)]
    plot = Plot(
        Scale(0.0, len(shown) + 1.0),
        around_zero(ends),
        title="NLL by document, candidate less base, nats a token",
        described=f"from {figure(found[0])} to {figure(found[-1])} over {len(found)} documents",
    )
    plot.y_axis(figure)
    plot.across(0.0, "zero")
    plot.dots(np.arange(1, len(shown) + 1), shown, "mean")
    plot.across(estimate.low, "p99")
    plot.across(estimate.high, "p99")
    plot.key("mean", f"{len(found):,} documents, least to most")
    plot.key("p99", "95 % interval of the mean")
    return plot


def needle_plot(needle: Needle, margin: float) -> Plot:
    """The difference at each depth with its interval."""
    values = [each for one in needle.depths for each in (one.difference.low, one.difference.high)]
    plot = Plot(
        Scale(-5.0, 105.0),
        around_zero([*values, -margin]),
        title="log-probability of the answer, candidate less base, nats a token",
        described=f"at depths of 0 to 100 %: from {figure(min(values))} to {figure(max(values))}",
    )
    depths = [one.depth for one in needle.depths]
    plot.x_axis(lambda value: f"{value:.0f} %", depths).y_axis(figure)
    plot.across(0.0, "zero")
    plot.across(-margin, "limit")
    plot.spans(
        depths, [one.difference.low for one in needle.depths], [one.difference.high for one in needle.depths], "p99"
    )
    plot.dots(depths, [one.difference.value for one in needle.depths], "mean")
    plot.key("mean", "mean over the texts, with its interval")
    plot.key("limit", "margin")
    return plot
