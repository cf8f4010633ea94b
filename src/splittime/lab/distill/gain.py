"""What a student would gain as its teacher's draft model: predicted from how often it is right and what steps take.

A draft of greedy decoding is right where both models have the same likeliest token, so the chance is `top1` of the
held-out text, taken to be the same at each place. Steps of both models are timed here, with one request: the gain is
that of one reader of a server without other work, and of text like the held-out one. Batches gain less.
"""

import statistics
import time
from collections.abc import Callable

import msgspec

from splittime.lab.distill.fidelity import Scores
from splittime.runner.draft_worth import DraftingCosts
from splittime.runner.torch_runner import TorchRunner
from splittime.runner.warm_up import Probe

MOST_DRAFTS = 16
NUM_RUNS, ROWS = 15, 4
LEARNT = 50  # times that the line learns both figures: it believes a prior first


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
