"""A report as one HTML page: everything in it, nothing fetched, no script. `render_html` is the door.

In a reader's order: the verdict and why, the figures with their intervals against their margins, where in a text the
candidate differs and for which texts, questions and needle, what was read, how it was measured.
"""

import math
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from splittime.lab.quality.margins import RULES, Check
from splittime.lab.quality.needle import Needle
from splittime.lab.quality.report import KL_FLOOR, Report, TextFigures
from splittime.lab.quality.texts import DECODE
from splittime.present.plot import Plot, plot_styles
from splittime.present.scale import Scale, around_zero, share

MOST_DOCUMENTS = 400  # that a plot tells apart


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
