"""Figures of single tokens, from both models' predictions of the same text.

For a position with base distribution p and candidate q, in nats:

    nll         -log p(next), -log q(next)
    kl          sum p log(p / q), how much worse q is at coding what p says
    agrees      whether both have the same likeliest token

Where a server tells only the likeliest few, the vocabulary is merged into what both know and one rest. Merging never
adds divergence (the log-sum inequality; Cover and Thomas, Elements of Information Theory, 2.7), so what comes out is a
*lower bound* of the true KL: it can show that a candidate is too far off, never that it is near enough.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import EngineError
from splittime.lab.quality.model import Dense, Piece, Sparse
from splittime.stats.paired import Floats

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
