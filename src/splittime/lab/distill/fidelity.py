"""How good a student is, and apart from that how like its teacher, on text that neither run learnt from.

For a position with the teacher's distribution p and the student's q:

    task          -log q(next): what the student is worth by itself, as nats per token and as bits per byte of text
    kl            sum p log(p / q)
    top1          whether both have the same likeliest token
    acceptance    sum min(p, q): the chance that speculative decoding with this draft keeps a token that it proposes
                  (Leviathan, Kalman and Matias 2023, arXiv:2211.17192, theorem 3.5), at temperature 1

Each comes with an interval by the bootstrap over documents (`stats.paired`). Two students are compared on the
same windows, document by document, so that what makes a text hard cancels out.

What a student would gain as its teacher's draft model: predicted from how often it is right and what steps take.
A draft of greedy decoding is right where both models have the same likeliest token, so the chance is `top1` of the
held-out text, taken to be the same at each place. Steps of both models are timed here, with one request: the gain is
that of one reader of a server without other work, and of text like the held-out one. Batches gain less.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import numpy as np

from splittime.core.errors import EngineError
from splittime.lab.quality.documents import TextWindow
from splittime.lab.quality.model import Dense, Model, Piece
from splittime.lab.quality.texts import Figures, compare
from splittime.runner.draft_record import DraftingCosts
from splittime.runner.torch_runner import TorchRunner
from splittime.runner.warm_up import Probe
from splittime.stats import paired
from splittime.stats.paired import BootstrapEstimate, Floats

TEACHER, STUDENT = "teacher", "student"
MEASURES = ("task", "kl", "top1", "acceptance")
NATS_PER_BIT = float(np.log(2))
BytesOf = Callable[[Sequence[int]], int]
MOST_DRAFTS = 16
NUM_RUNS, ROWS = 15, 4
LEARNT = 50  # times that the line learns both figures: it believes a prior first


@dataclass(frozen=True)
class Sums:
    """Over the scored tokens of each document; totals: [measures, documents], rows as in `MEASURES`."""

    tokens: Floats
    bytes: Floats
    totals: Floats

    def of(self, measure: str) -> Floats:
        return self.totals[MEASURES.index(measure)]


class Scores(msgspec.Struct, frozen=True):
    """The scores of one student. `bits_per_byte` is `task` in other units."""

    name: str
    documents: int
    tokens: int
    task: BootstrapEstimate
    bits_per_byte: BootstrapEstimate
    kl: BootstrapEstimate
    top1: BootstrapEstimate
    acceptance: BootstrapEstimate


class FidelityDifference(msgspec.Struct, frozen=True):
    """The first's figure less the second's, on the same documents."""

    first: str
    second: str
    task: BootstrapEstimate
    bits_per_byte: BootstrapEstimate
    kl: BootstrapEstimate
    top1: BootstrapEstimate
    acceptance: BootstrapEstimate


def overlap(teacher: Floats, student: Floats) -> Floats:
    """sum min(p, q) of each row of log-probabilities [n, vocab]."""
    return np.exp(np.minimum(teacher, student)).sum(axis=1)


def measure(
    windows: Sequence[TextWindow],
    teacher: Model,
    students: Mapping[str, Model],
    bytes_of: BytesOf,
    tell: Callable[[int, int], None],
) -> dict[str, Sums]:
    """All over the same windows, the teacher first, as its own student, which is what a perfect one would score; a few
    positions' distributions are held at once. `tell(done, of)` windows."""
    count = 1 + max(window.document for window in windows)
    tokens, num_bytes = np.zeros(count), np.zeros(count)
    totals = np.zeros((1 + len(students), len(MEASURES), count))
    for number, window in enumerate(windows):
        tell(number, len(windows))
        totals[:, :, window.document] += _window(window, teacher, list(students.values()))
        scored = window.token_ids[window.first :]
        tokens[window.document] += len(scored)
        num_bytes[window.document] += bytes_of(scored)
    tell(len(windows), len(windows))
    used = tokens > 0
    names = (TEACHER, *students)
    return {name: Sums(tokens[used], num_bytes[used], totals[place][:, used]) for place, name in enumerate(names)}


def _window(window: TextWindow, teacher: Model, students: Sequence[Model]) -> Floats:
    """[1 + students, measures], sums over the window's scored tokens."""
    ids, begin = window.token_ids, window.first - 1
    sums = np.zeros((1 + len(students), len(MEASURES)))
    predicted = [model.predictions(ids, begin, 0) for model in (teacher, *students)]
    for ours, *theirs in zip_longest(*predicted):
        sums += [_sums(ids, ours, each) for each in (ours, *theirs)]
    return sums


def _sums(token_ids: Sequence[int], teacher: Piece | None, student: Piece | None) -> list[float]:
    if not isinstance(teacher, Dense) or not isinstance(student, Dense):
        raise EngineError("teacher and student predicted different positions of one text")
    figures: Figures = compare(token_ids, [teacher], [student])
    accepted = overlap(teacher.logprobs, student.logprobs)
    return [float(each.sum()) for each in (figures.candidate_nll, figures.kl, figures.agrees, accepted)]


def scores(name: str, sums: Sums) -> Scores:
    return Scores(name, len(sums.tokens), int(sums.tokens.sum()), **_estimates(sums, sums.totals))


def difference(first: tuple[str, Sums], second: tuple[str, Sums]) -> FidelityDifference:
    (name, sums), (other, others) = first, second
    return FidelityDifference(name, other, **_estimates(sums, sums.totals - others.totals))


def _estimates(sums: Sums, totals: Floats) -> dict[str, BootstrapEstimate]:
    found = {name: paired.ratio_of_sums(line, sums.tokens) for name, line in zip(MEASURES, totals, strict=True)}
    return found | {"bits_per_byte": paired.ratio_of_sums(totals[0] / NATS_PER_BIT, sums.bytes)}


class DraftGain(msgspec.Struct, frozen=True):
    """gain: tokens a second with drafts of this student over without, by its value and the ends of the interval of
    `top1`; 1 where drafts do not pay. teacher_step_ns, student_step_ns: of one request."""

    name: str
    gain: float
    low: float
    high: float
    teacher_step_ns: int
    student_step_ns: int


def draft_gain(teacher: TorchRunner, student: TorchRunner, name: str, chances: tuple[float, float, float]) -> DraftGain:
    """Times steps of both, and returns what they gain then. chances: that a draft is right: the value, and the ends of
    its interval."""
    costs = DraftingCosts()
    with Probe(teacher.run, teacher.resolved, 1, ROWS) as probe:
        teacher_ns, served_ns = _median_ns(probe.decode), _median_ns(probe.decode_served)
        for _ in range(LEARNT):
            costs.model.learn(1, teacher_ns)
            costs.model.learn(probe.num_rows, served_ns)
    with Probe(student.run, student.resolved, 1, 1) as probe:
        student_ns = _median_ns(probe.decode)
    costs.draft.learn(1, student_ns)
    value, low, high = (costs.gain(1, chance, MOST_DRAFTS) for chance in chances)
    return DraftGain(name, value, low, high, teacher_ns, student_ns)


def chances_of(scores: Scores) -> tuple[float, float, float]:
    """Returns how often a draft of a student with these scores is right, with the interval."""
    return scores.top1.value, scores.top1.low, scores.top1.high


def _median_ns(step: Callable[[], None]) -> int:
    taken = []
    for _ in range(NUM_RUNS):
        begin_ns = time.monotonic_ns()
        step()
        taken.append(time.monotonic_ns() - begin_ns)
    return round(statistics.median(taken))
