"""What a step takes, learnt step by step while the server runs.

    taken_ns = c0 + c1 [has prompts] + c2 decode rows + c3 prompt tokens + c4 KV positions + c5 pairs of prompts

The line of `simulate.cost`, but of the whole step and the gap before it: what a wait is made of. Weighted least
squares by its normal equations, with exponential forgetting. Steps that only decode and those with prompts are
forgotten apart, so that thousands of the one leave what is known of the other. Errors count relative to the step's
length. The equations are solved now and then (`SOLVE_EVERY`); a coefficient that would be negative is 0, the worst
first (backward elimination, in place of an exact non-negative solution). What the steps do not tell apart stays as it
was.

Plain Python: it runs in the serving process, which has no numpy. A step that decodes takes 7 microseconds of it, one
with prompts 12, solutions included, and twice that on a busy machine (`benchmarks.scenarios.wait_forecast`).
"""

import math
from collections import deque
from collections.abc import Iterable
from operator import mul
from statistics import median

from splittime.ledger.steps import StepRecord
from splittime.simulate.shape import features_of, shape_of_record

MEMORY_STEPS = 256  # the weight of a step of its kind falls to 1/e over so many more
SOLVE_EVERY, FIRST_SOLVE_EVERY, FIRST_STEPS = 128, 32, 1024  # steps; more often among the first of them
MIN_DECODE_STEPS, MIN_PROMPT_STEPS = 64, 16
PAUSE = 4.0  # errors of a step that took longer than so many times what was expected are relative to its own length
RIDGE = 1e-6  # of each diagonal entry: how firmly what the steps do not tell stays as it was
ERROR_WINDOW_NS = 120_000_000_000
ERROR_STEPS = 1024  # of these two minutes and of each kind, the latest
TRUSTED_ERROR = 0.5  # a model whose steps are off by more, in the middle, is not asked
NUM_FEATURES = 6


class StepKind:
    """What is known from the steps of one kind: sums of w x x' (`products`, the lower half) and of w x y (`moments`)
    over them, in which older ones count less, and how far off the latest were."""

    def __init__(self, min_steps: int) -> None:
        self.products = [[0.0] * (row + 1) for row in range(NUM_FEATURES)]
        self.moments = [0.0] * NUM_FEATURES
        self._weight = 1.0
        self._min_steps, self._num_steps = min_steps, 0
        self._is_known = False  # the latest solution has enough of them
        self._errors: deque[tuple[int, float]] = deque(maxlen=ERROR_STEPS)

    def take(self, features: tuple[float, ...], end_ns: int, taken_ns: int, expected_ns: float) -> None:
        self._num_steps += 1
        if self._is_known:
            self._errors.append((end_ns, abs(expected_ns / taken_ns - 1)))
            scale_ns = max(expected_ns, taken_ns / PAUSE)
        else:
            scale_ns = taken_ns
        self._add(features, taken_ns, scale_ns)

    def _add(self, features: tuple[float, ...], taken_ns: float, scale_ns: float) -> None:
        """scale_ns: by how much errors are divided."""
        self._weight *= _GROWTH
        weight = self._weight / (scale_ns * scale_ns)
        known = [(place, value) for place, value in enumerate(features) if value]
        for count, (place, value) in enumerate(known, 1):
            weighted, row = weight * value, self.products[place]
            self.moments[place] += weighted * taken_ns
            for other, other_value in known[:count]:
                row[other] += weighted * other_value

    def level(self) -> None:
        """Bring the growing weights back to 1 for the newest; they are about to be solved for."""
        self._is_known = self._num_steps >= self._min_steps
        factor, self._weight = 1 / self._weight, 1.0
        self.moments = [value * factor for value in self.moments]
        self.products = [[value * factor for value in row] for row in self.products]

    def error_ratio(self) -> float | None:
        """See `OnlineCost.errors`."""
        errors = self._errors
        while errors and errors[0][0] < errors[-1][0] - ERROR_WINDOW_NS:
            errors.popleft()
        return median(error for _, error in errors) if errors else None


class OnlineCost:
    """errors: by kind of steps, the median of |predicted / taken - 1|, each step predicted before it was learnt from,
    over the last two minutes (of the latest `ERROR_STEPS` steps, if there were more); None before there are enough. As
    of the latest solution, as are the coefficients (in ns)."""

    def __init__(self) -> None:
        self.coefficients = [0.0] * NUM_FEATURES
        self.errors: dict[str, float | None] = {"decode": None, "prompts": None}
        self._kinds = {"decode": StepKind(MIN_DECODE_STEPS), "prompts": StepKind(MIN_PROMPT_STEPS)}
        self._num_steps = 0

    def learn(self, record: StepRecord) -> None:
        features = features_of(shape_of_record(record))
        taken_ns = max(record.end_ns - record.begin_ns + record.host_gap_ns, 1)
        kind = self._kinds["prompts" if features[1] else "decode"]
        kind.take(features, record.end_ns, taken_ns, self.total_ns(features))
        self._num_steps += 1
        if self._num_steps % (FIRST_SOLVE_EVERY if self._num_steps < FIRST_STEPS else SOLVE_EVERY) == 0:
            self._solve()

    def total_ns(self, features: tuple[float, ...]) -> float:
        """Returns what a step of these features is expected to take, the gap before it included; or what many steps
        take, if these are the sums of theirs."""
        return sum(map(mul, self.coefficients, features))

    @property
    def is_trusted(self) -> bool:
        """Steps that only decode may be rare: then they are little of any wait."""
        errors = [error for error in self.errors.values() if error is not None]
        return self.errors["prompts"] is not None and max(errors) <= TRUSTED_ERROR

    def _solve(self) -> None:
        kinds = self._kinds.values()
        for kind in kinds:
            kind.level()
        products = [_sums(rows) for rows in zip(*(kind.products for kind in kinds), strict=True)]
        moments = _sums(kind.moments for kind in kinds)
        self.coefficients = non_negative_solution(products, moments, self.coefficients)
        self.errors = {name: kind.error_ratio() for name, kind in self._kinds.items()}


def non_negative_solution(products: list[list[float]], moments: list[float], before: list[float]) -> list[float]:
    """Returns c >= 0 with products c = moments, near enough: see the module's docstring. products: the lower half of
    a symmetric matrix. before: what stays where nothing is known."""
    scale = [math.sqrt(products[place][place]) for place in range(len(moments))]
    free = [place for place, size in enumerate(scale) if size > 0]
    solution = [0.0 if size > 0 else kept for size, kept in zip(scale, before, strict=True)]
    while free:
        matrix = [[products[max(i, j)][min(i, j)] / (scale[i] * scale[j]) for j in free] for i in free]
        for place, row in enumerate(matrix):
            row[place] += RIDGE
            row.append(moments[free[place]] / scale[free[place]] + RIDGE * before[free[place]] * scale[free[place]])
        found = _eliminated(matrix)
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0:
            for place, value in zip(free, found, strict=True):
                solution[place] = value / scale[place]
            break
        del free[worst]
    return solution


def _sums(rows: Iterable[list[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def _eliminated(matrix: list[list[float]]) -> list[float]:
    """Returns the solution of a positive definite system, by Gaussian elimination. matrix: with the right side as its
    last column; it is used up."""
    size = len(matrix)
    for pivot in range(size):
        pivot_row = matrix[pivot]
        for row in matrix[pivot + 1 :]:
            factor = row[pivot] / pivot_row[pivot]
            for place in range(pivot, size + 1):
                row[place] -= factor * pivot_row[place]
    solution = [0.0] * size
    for place in reversed(range(size)):
        rest = sum(matrix[place][other] * solution[other] for other in range(place + 1, size))
        solution[place] = (matrix[place][size] - rest) / matrix[place][place]
    return solution


_GROWTH = math.exp(1 / MEMORY_STEPS)
