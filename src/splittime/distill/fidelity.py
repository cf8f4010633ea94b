"""How good a student is, and apart from that how like its teacher, on text that neither run learnt from.

For a position with the teacher's distribution p and the student's q:

    task          -log q(next): what the student is worth by itself, as nats per token and as bits per byte of text
    kl            sum p log(p / q)
    top1          whether both have the same likeliest token
    acceptance    sum min(p, q): the chance that speculative decoding with this draft keeps a token that it proposes
                  (Leviathan, Kalman and Matias 2023, arXiv:2211.17192, theorem 3.5), at temperature 1

Each comes with an interval by the bootstrap over documents (`quality.statistics`). Two students are compared on the
same windows, document by document, so that what makes a text hard cancels out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import numpy as np

from splittime.core.errors import EngineError
from splittime.quality import statistics
from splittime.quality.documents import Window
from splittime.quality.measures import Figures, compare
from splittime.quality.model import Dense, Model
from splittime.quality.statistics import Estimate, Floats

MEASURES = ("task", "kl", "top1", "acceptance")
NATS_PER_BIT = float(np.log(2))
BytesOf = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class Sums:
    """Over the scored tokens of each document; totals: [measures, documents], rows as in `MEASURES`."""

    tokens: Floats
    bytes: Floats
    totals: Floats

    def of(self, measure: str) -> Floats:
        return self.totals[MEASURES.index(measure)]


class Scores(msgspec.Struct, frozen=True):
    """Of one student. `bits_per_byte` is `task` in other units."""

    name: str
    documents: int
    tokens: int
    task: Estimate
    bits_per_byte: Estimate
    kl: Estimate
    top1: Estimate
    acceptance: Estimate


class Difference(msgspec.Struct, frozen=True):
    """The first's figure less the second's, on the same documents."""

    first: str
    second: str
    task: Estimate
    bits_per_byte: Estimate
    kl: Estimate
    top1: Estimate
    acceptance: Estimate


def overlap(teacher: Floats, student: Floats) -> Floats:
    """sum min(p, q) of each row of log-probabilities [n, vocab]."""
    return np.exp(np.minimum(teacher, student)).sum(axis=1)


def measure(
    windows: Sequence[Window], teacher: Model, student: Model, bytes_of: BytesOf, tell: Callable[[int, int], None]
) -> Sums:
    """Both over the same windows; a few positions' distributions are held at once. `tell(done, of)` windows."""
    count = 1 + max(window.document for window in windows)
    tokens, num_bytes, totals = np.zeros(count), np.zeros(count), np.zeros((len(MEASURES), count))
    for number, window in enumerate(windows):
        tell(number, len(windows))
        totals[:, window.document] += _window(window, teacher, student)
        scored = window.token_ids[window.first :]
        tokens[window.document] += len(scored)
        num_bytes[window.document] += bytes_of(scored)
    tell(len(windows), len(windows))
    used = tokens > 0
    return Sums(tokens[used], num_bytes[used], totals[:, used])


def _window(window: Window, teacher: Model, student: Model) -> Floats:
    """[measures], sums over the window's scored tokens."""
    ids, begin, sums = window.token_ids, window.first - 1, np.zeros(len(MEASURES))
    for ours, theirs in zip_longest(teacher.predictions(ids, begin, 0), student.predictions(ids, begin, 0)):
        if not isinstance(ours, Dense) or not isinstance(theirs, Dense):
            raise EngineError("teacher and student predicted different positions of one text")
        figures: Figures = compare(ids, [ours], [theirs])
        accepted = overlap(ours.logprobs, theirs.logprobs)
        sums += [each.sum() for each in (figures.candidate_nll, figures.kl, figures.agrees, accepted)]
    return sums


def scores(name: str, sums: Sums) -> Scores:
    return Scores(name, len(sums.tokens), int(sums.tokens.sum()), **_estimates(sums, sums.totals))


def difference(first: tuple[str, Sums], second: tuple[str, Sums]) -> Difference:
    (name, sums), (other, others) = first, second
    return Difference(name, other, **_estimates(sums, sums.totals - others.totals))


def _estimates(sums: Sums, totals: Floats) -> dict[str, Estimate]:
    found = {name: statistics.ratio_of_sums(line, sums.tokens) for name, line in zip(MEASURES, totals, strict=True)}
    return found | {"bits_per_byte": statistics.ratio_of_sums(totals[0] / NATS_PER_BIT, sums.bytes)}
