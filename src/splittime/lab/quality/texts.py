"""Both models over the same windows of text: what each token cost, and the checks that come of it.

The last tokens of each window of the longest length are computed one a step, as in a generation, because a step of one
token runs other kernels than a chunk does; they are a sample of their own (`DECODE`).

Figures of single tokens, from both models' predictions of the same text.

For a position with base distribution p and candidate q, in nats:

    nll         -log p(next), -log q(next)
    kl          sum p log(p / q), how much worse q is at coding what p says
    agrees      whether both have the same likeliest token

Where a server tells only the likeliest few, the vocabulary is merged into what both know and one rest. Merging never
adds divergence (the log-sum inequality; Cover and Thomas, Elements of Information Theory, 2.7), so what comes out is a
*lower bound* of the true KL: it can show that a candidate is too far off, never that it is near enough.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import EngineError
from splittime.lab.quality.documents import DocumentTokens, TextWindow
from splittime.lab.quality.margins import MIN_DOCUMENTS, MIN_TOKENS, Check, Margins, judge
from splittime.lab.quality.model import Dense, Model, Piece, Sparse
from splittime.stats import paired
from splittime.stats.paired import BootstrapEstimate, Floats

CHUNK_ELEMENTS = 1 << 21  # 16 MiB of float64 in each of the few arrays that KL needs at once
ROUNDING = 1e-6  # of a sum of probabilities that came as float32


@dataclass(frozen=True)
class Figures:
    """For each token in the order of the text its position, what it cost both models, KL, and 1.0 where both
    agree on the likeliest; that is nan where a server does not tell."""

    positions: NDArray[np.int64]
    base_nll: Floats
    candidate_nll: Floats
    kl: Floats
    agrees: Floats

    def part(self, where: NDArray[np.bool_]) -> "Figures":
        return Figures(*(getattr(self, each.name)[where] for each in fields(self)))


def joined(parts: Sequence[Figures]) -> Figures:
    return Figures(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Figures)))


def compare(token_ids: Sequence[int], base: Iterable[Piece], candidate: Iterable[Piece]) -> Figures:
    """Both models' pieces over the same positions of one text. Raises `EngineError` where they are not the same."""
    parts = []
    for ours, theirs in zip_longest(base, candidate):
        if ours is None or theirs is None or (ours.begin, _length(ours)) != (theirs.begin, _length(theirs)):
            raise EngineError("the two models predicted different positions of one text")
        following = np.asarray(token_ids[ours.begin + 1 : ours.begin + 1 + _length(ours)], dtype=np.int64)
        parts.append(_figures(ours, theirs, following))
    if not parts:
        raise EngineError("the models predicted nothing of a text", value=len(token_ids))
    return joined(parts)


def _figures(base: Piece, candidate: Piece, following: NDArray[np.int64]) -> Figures:
    """`positions` are those of the tokens that came, one after the predictions'."""
    places = base.begin + 1 + np.arange(len(following))
    if isinstance(base, Dense) and isinstance(candidate, Dense):
        kl = divergence(base.logprobs, candidate.logprobs)
        agrees = (base.logprobs.argmax(1) == candidate.logprobs.argmax(1)).astype(np.float64)
    else:
        kl = np.array([_bound(*pair) for pair in _known_to_both(base, candidate, len(following))])
        agrees = _same(_likeliest(base), _likeliest(candidate))
    return Figures(places, -_of(base, following), -_of(candidate, following), kl, agrees)


def divergence(base: Floats, candidate: Floats) -> Floats:
    """KL of each row, [n, vocab] of log-probabilities both; a few rows at a time."""
    step = max(1, CHUNK_ELEMENTS // base.shape[1])
    return np.concatenate([_divergence(base[i : i + step], candidate[i : i + step]) for i in range(0, len(base), step)])


def _divergence(base: Floats, candidate: Floats) -> Floats:
    """Returns the divergence: what p excludes counts nothing, and rounding below zero is taken off."""
    with np.errstate(invalid="ignore"):
        terms = np.exp(base) * (base - candidate)
    return np.maximum(np.where(np.isneginf(base), 0.0, terms).sum(axis=1), 0.0)


def _of(piece: Piece, following: NDArray[np.int64]) -> Floats:
    if isinstance(piece, Sparse):
        return piece.following
    return piece.logprobs[np.arange(len(following)), following]


def _length(piece: Piece) -> int:
    return len(piece.logprobs) if isinstance(piece, Dense) else len(piece.following)


def _likeliest(piece: Piece) -> Floats:
    if isinstance(piece, Dense):
        return piece.logprobs.argmax(1).astype(np.float64)
    return np.array([max(top, key=lambda token: top[token]) if top else math.nan for top in piece.tops], dtype=float)


def _same(first: Floats, second: Floats) -> Floats:
    known = ~(np.isnan(first) | np.isnan(second))
    return np.where(known, (first == second).astype(np.float64), np.nan)


def _known_to_both(base: Piece, candidate: Piece, count: int) -> Iterator[tuple[list[float], list[float]]]:
    """For each position, both models' log-probabilities of the tokens that both tell of."""
    tellers = [piece for piece in (base, candidate) if isinstance(piece, Sparse)]
    for line in range(count):
        tokens = frozenset.intersection(*(frozenset(teller.tops[line]) for teller in tellers))
        yield _some(base, line, tokens), _some(candidate, line, tokens)


def _some(piece: Piece, line: int, tokens: Iterable[int]) -> list[float]:
    source: Mapping[int, float] | Floats = piece.logprobs[line] if isinstance(piece, Dense) else piece.tops[line]
    return [float(source[token]) for token in sorted(tokens)]


def _bound(base: Sequence[float], candidate: Sequence[float]) -> float:
    """KL of what is left when all other tokens are one. What is told is rounded, and so is the rest's share."""
    p, q = np.exp(base), np.exp(candidate)
    p = np.append(p, max(0.0, 1.0 - p.sum() - ROUNDING))
    q = np.append(q, max(0.0, 1.0 - q.sum()) + ROUNDING)
    used = p > 0
    return max(0.0, float((p[used] * np.log(p[used] / q[used])).sum()))


DECODE = "decoded"
DECODE_TOKENS = 32
MIN_DECODED = 300
Tell = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""


@dataclass(frozen=True)
class TokenSample:
    """where: which context. documents: the number of each token's document, 0, 1, ...; names: theirs."""

    where: str
    figures: Figures
    documents: NDArray[np.int64]
    names: list[str]
    is_bound: bool

    @property
    def num_tokens(self) -> int:
        return len(self.documents)

    def per_document(self, values: Floats) -> Floats:
        return np.bincount(self.documents, weights=values, minlength=len(self.names)).astype(np.float64)

    @property
    def counts(self) -> Floats:
        return np.bincount(self.documents, minlength=len(self.names)).astype(np.float64)


def read_windows(
    base: Model,
    candidate: Model,
    texts: Sequence[DocumentTokens],
    windows: Sequence[TextWindow],
    where: str,
    tell: Tell,
    decode: bool,
) -> list[TokenSample]:
    """The sample of these windows, and if `decode` is asked for and possible that of their last tokens."""
    can_decode = decode and base.has_decode and candidate.has_decode
    chunked, decoded = [], []
    for number, window in enumerate(windows):
        tell(f"text, {where}", number, len(windows))
        ids, begin = window.token_ids, window.first - 1
        decode_tokens = DECODE_TOKENS if can_decode and len(ids) - window.first >= 2 * DECODE_TOKENS else 0
        predicted = (model.predictions(ids, begin, decode_tokens) for model in (base, candidate))
        figures = compare(ids, *predicted)
        late = figures.positions >= len(ids) - decode_tokens
        chunked.append((window.document, figures.part(~late)))
        if decode_tokens:
            decoded.append((window.document, figures.part(late)))
    tell(f"text, {where}", len(windows), len(windows))
    is_bound = base.reads is None or candidate.reads is None
    samples = [_sample(where, chunked, texts, is_bound)]
    return samples + ([_sample(f"{where}, {DECODE}", decoded, texts, is_bound)] if decoded else [])


def _sample(
    where: str, parts: Sequence[tuple[int, Figures]], texts: Sequence[DocumentTokens], is_bound: bool
) -> TokenSample:
    used = sorted({document for document, _ in parts})
    place = {document: number for number, document in enumerate(used)}
    owners = [np.full(len(figures.kl), place[document]) for document, figures in parts]
    names = [texts[document].name for document in used]
    return TokenSample(where, joined([figures for _, figures in parts]), np.concatenate(owners), names, is_bound)


def checks(sample: TokenSample, margins: Margins) -> Iterator[Check]:
    """Returns the checks. For tokens computed one by one KL alone is judged: these few are there to find broken
    kernels."""
    figures, where = sample.figures, sample.where
    is_decode = where.endswith(DECODE)
    thin = _thin(sample, MIN_DECODED if is_decode else MIN_TOKENS)
    yield judge("kl", where, mean_of(sample, figures.kl), margins.kl, thin, sample.is_bound)
    if is_decode:
        return
    yield judge("perplexity", where, perplexity_ratio(sample), margins.perplexity, thin)
    p99 = paired.quantile_of_tokens(figures.kl, sample.documents, 0.99)
    yield judge("kl_p99", where, p99, margins.kl_p99, thin, sample.is_bound)
    told = ~np.isnan(figures.agrees)
    if told.any():
        sums = sample.per_document(np.where(told, figures.agrees, 0.0))
        counts = sample.per_document(told.astype(np.float64))
        some = counts > 0
        yield judge("top1", where, paired.ratio_of_sums(sums[some], counts[some]), margins.top1, thin)


def mean_of(sample: TokenSample, values: Floats) -> BootstrapEstimate:
    return paired.ratio_of_sums(sample.per_document(values), sample.counts)


def nll_difference(sample: TokenSample) -> BootstrapEstimate:
    """Candidate less base, nats a token."""
    return mean_of(sample, sample.figures.candidate_nll - sample.figures.base_nll)


def perplexity_ratio(sample: TokenSample) -> BootstrapEstimate:
    return nll_difference(sample).mapped_by_exp()


def _thin(sample: TokenSample, least_tokens: int) -> str:
    if len(sample.names) < MIN_DOCUMENTS:
        return f"{len(sample.names)} documents are too few to say how documents differ; give {MIN_DOCUMENTS} at least"
    if sample.num_tokens < least_tokens:
        return f"{sample.num_tokens} tokens are too few, give {least_tokens} at least"
    return ""
