"""What a run of the gate leaves: a value that JSON holds whole, and that the HTML page is drawn from.

Figures of single tokens are not kept: plots need KL by position, its histogram, and one line for each document.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from splittime.lab.quality.margins import Check, Margins, Verdict
from splittime.lab.quality.needle import Needle
from splittime.lab.quality.questions import Paired
from splittime.lab.quality.texts import TokenSample, nll_difference
from splittime.stats.paired import CONFIDENCE, RESAMPLES, BootstrapEstimate, Floats

POSITION_BINS, KL_BINS = 48, 40
KL_FLOOR = 1e-7  # nats: below it is the rounding of float32; the histogram's first bin holds all that is less


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
