"""Both models over the same windows of text: what each token cost, and the checks that come of it.

The last tokens of each window of the longest length are computed one a step, as in a generation, because a step of one
token runs other kernels than a chunk does; they are a sample of their own (`DECODE`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splittime.lab.quality.documents import DocumentTokens, TextWindow
from splittime.lab.quality.margins import MIN_DOCUMENTS, MIN_TOKENS, Check, Margins, judge
from splittime.lab.quality.measures import Figures, compare, joined
from splittime.lab.quality.model import Model
from splittime.stats import paired
from splittime.stats.paired import BootstrapEstimate, Floats

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
