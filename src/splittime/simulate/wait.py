"""How long a newcomer would wait in this server's queue, and until its first token: a closed form over what runs now.

The steps until a newcomer is computed are those until a slot is free for it, or those that the prompts before it need
of the steps' budget, whichever is more. A slot is free when a running request has ended: in as many steps as it has
tokens left, the mean of the latest requests that were longer than it is (mean residual life), at most what it may have.
Each further round of slots adds a mean length. Rows decode meanwhile: no more at a time than there are slots, and no
more in all than those before have tokens left. What these steps take is a line of their features' sums (`OnlineCost`).

What runs is looked at once for all newcomers until a step or a request has ended: at ten times overload a thousand a
second are refused, and a look at 64 rows cost each more than all else. Assumed: who comes first goes first; prompts
find as much in the prefix cache as the latest did; nobody is preempted.

`OnlineCost`: what a step takes, learnt step by step while the server runs.

    taken_ns = c0 + c1 [has prompts] + c2 decode rows + c3 prompt tokens + c4 KV positions + c5 pairs of prompts

The line of `simulate.cost`, but of the whole step and the gap before it: weighted least squares with exponential
forgetting, apart for steps that only decode. Errors count relative to the step's length. The equations are solved now
and then (`SOLVE_EVERY`); a coefficient that would be negative is 0, the worst first. What the steps do not tell apart
stays as it was. Plain Python, as the serving process has no numpy: a step takes 7 to 12 us
(`benchmarks.scenarios.wait_forecast`).
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from operator import mul
from statistics import median
from typing import NamedTuple

from splittime.core.engine import EngineStats
from splittime.ledger.account import ClosedAccount
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


RECENT_REQUESTS = 256
MOST_TOLD = 64
MIN_REQUESTS = 8  # fewer ended ones say too little of how long they become
_WEIGHT = 0.05  # of the newest, in what is learnt of prompts and drafts


class Begun(NamedTuple):
    """A request that the engine computes. max_tokens: the most that it may have. tenant, weight: its key's."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    tenant: str = ""
    weight: float = 1.0


class Decodes(NamedTuple):
    """The rows that decode meanwhile. rows: the most at a time. most_row_steps: the most over all steps. kv_per_row:
    positions of the KV cache that each reads in a step."""

    rows: float
    most_row_steps: float
    kv_per_row: float


class Running(NamedTuple):
    """What is computed, as of the latest step. left: the tokens that each row is expected to have left, fewest first;
    1 where too few requests have ended to tell. most_tokens: the most that one of them may have. positions: of the
    KV cache, of all. unfinished: prompt tokens to be computed. slots: of each key, by its weight."""

    num: int
    left: list[float]
    sum_left: float
    most_tokens: int
    positions: int
    unfinished: float
    slots: dict[str, float]


class OutputLengths:
    """How many tokens the latest requests had."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=RECENT_REQUESTS)
        self._sorted: list[int] | None = None
        self._sums: list[int] = []

    def add(self, length: int) -> None:
        self._latest.append(length)
        self._sorted = None

    def left(self, so_far: int, most: int) -> float | None:
        """Returns how many more tokens are expected of a request that has `so_far` and may have `most`; None if too few
        requests have ended to tell."""
        if len(self._latest) < MIN_REQUESTS:
            return None
        if self._sorted is None:
            self._sorted = sorted(self._latest)
            self._sums = list(accumulate(self._sorted, initial=0))
        lengths, sums = self._sorted, self._sums
        begin, end = bisect_right(lengths, so_far), bisect_right(lengths, most)
        longer = len(lengths) - begin
        if not longer:
            return max(1.0, min(most - so_far, sums[-1] / len(lengths)))
        mean = (sums[max(begin, end)] - sums[begin] + most * (len(lengths) - max(begin, end))) / longer
        return max(1.0, min(mean, most) - so_far)


class WaitModel:
    """running: the requests that are computed now. stats: the engine's latest gauges, its knobs among them."""

    def __init__(self, running: Callable[[], Iterable[Begun]], stats: Callable[[], EngineStats]) -> None:
        self.cost = OnlineCost()
        self._running, self._stats = running, stats
        self._lengths = OutputLengths()
        self._computed_share = 1.0  # of prompts, what the prefix cache does not have
        self._tokens_a_step = 1.0  # of a row that decodes; more with drafts
        self._last: StepRecord | None = None
        self._seen: Running | None = None  # until a step or a request ends
        self._told = lru_cache(MOST_TOLD)(self._found_s)  # as long

    def take(self, record: ClosedAccount | StepRecord) -> None:
        """Learns from a record of the ledger, as its subscriber."""
        if not (isinstance(record, ClosedAccount) and record.is_refused):
            self._seen = None
            self._told.cache_clear()
        if isinstance(record, ClosedAccount):
            self._take_account(record)
            return
        self._last = record
        self.cost.learn(record)
        if record.verified or self._tokens_a_step > 1.001:
            drafts = sum(drafts for _, drafts, _ in record.verified)
            accepted = sum(accepted for _, _, accepted in record.verified)
            now = 1 + accepted / max(1, record.decode_tokens - drafts)
            self._tokens_a_step += _WEIGHT * (now - self._tokens_a_step)

    def _take_account(self, account: ClosedAccount) -> None:
        if account.output_tokens:
            self._lengths.add(account.output_tokens)
            share = 1 - account.cached_tokens / max(1, account.prompt_tokens)
            self._computed_share += _WEIGHT * (share - self._computed_share)

    def wait_s(
        self, requests: int, tokens: int, own_tokens: int, key: str | None = None, weight: float = 1.0
    ) -> tuple[float, float] | None:
        """Returns the seconds until the first step and until the first token of a newcomer of `own_tokens`, behind
        `requests` of `tokens` prompt tokens in all. None if too little was seen, or the model is too far off. key: that
        asks, of this weight; it gets slots from one that has more of them."""
        stats = self._stats()
        queue = _Queue.of(stats.knobs)
        if queue is None or stats.is_paused or self._last is None or not self.cost.is_trusted:
            return None
        return self._told((stats.now_ns, stats.num_running), queue, requests, tokens, own_tokens, key, weight)

    def _found_s(
        self, _: object, queue: "_Queue", requests: int, tokens: int, own_tokens: int, key: str | None, weight: float
    ) -> tuple[float, float] | None:
        stats, last = self._stats(), self._last
        assert last is not None
        running = self._seen = (self._seen if stats.num_running else None) or self._look(last)
        places = min(queue.slots, running.num + _room(stats, running.num))
        is_given = key is not None and _is_given_slots(running.slots, key, (requests + 1) / weight)
        slot_steps = 0.0 if is_given else self._steps_to_a_slot(running, requests, places)
        if slot_steps is None:
            return None
        decodes = Decodes(
            min(places, running.num + requests / 2),
            self._row_steps(running, requests),
            running.positions / max(1, running.num),
        )
        ahead = tokens * self._computed_share + running.unfinished
        mean = tokens * self._computed_share / max(1, requests)
        waits = queue.features(decodes, ahead, mean, slot_steps, requests if slot_steps else 0)
        own = max(1.0, own_tokens * self._computed_share)
        begins = queue.features(decodes, own, own, 0.0, 0)
        # half a step that runs: the newcomer may come at any time of it
        wait_ns = self.cost.total_ns(waits) + ((last.end_ns - last.begin_ns) / 2 if running.num else 0.0)
        return wait_ns * 1e-9, (wait_ns + self.cost.total_ns(begins)) * 1e-9

    def _look(self, last: StepRecord) -> Running:
        rows = list(self._running())
        left = sorted(self._lengths.left(row.output_tokens, row.max_tokens) or 1.0 for row in rows)
        slots = defaultdict[str, float](float)
        for row in rows:
            slots[row.tenant] += 1 / row.weight
        return Running(
            num=len(rows),
            left=left,
            sum_left=sum(left),
            most_tokens=max((row.max_tokens for row in rows), default=1 << 40),
            positions=sum(row.prompt_tokens + row.output_tokens for row in rows),
            unfinished=self._unfinished(rows, last),
            slots=slots,
        )

    def _row_steps(self, running: Running, requests: int) -> float:
        """Returns how many tokens those before the newcomer have left, all together, in steps of a row."""
        whole = self._lengths.left(0, 1 << 40)
        return math.inf if whole is None else (running.sum_left + requests * whole) / self._tokens_a_step

    def _steps_to_a_slot(self, running: Running, requests: int, places: int) -> float | None:
        """Returns the steps until all before the newcomer, and then it, have a slot; None if nobody knows."""
        free = places - running.num
        short = requests + 1 - free  # so many must end before
        if short <= 0:
            return 0.0
        whole = self._lengths.left(0, running.most_tokens)
        if whole is None:
            return None
        ends = sorted([*running.left, *[whole] * free]) if free > 0 else running.left
        rounds, place = divmod(short - 1, len(ends))
        return (rounds * whole + ends[place]) / self._tokens_a_step

    def _unfinished(self, rows: list[Begun], last: StepRecord) -> float:
        """Returns the prompt tokens of running requests that are still to be computed."""
        prompts = [row for row in rows if not row.output_tokens]
        if not prompts:
            return 0.0
        ends = {request_id: start + count for request_id, start, count in last.rows}
        unseen = self._computed_share
        return sum(
            max(0.0, row.prompt_tokens - ends[row.request_id]) if row.request_id in ends else row.prompt_tokens * unseen
            for row in prompts
        )


class _Queue(NamedTuple):
    """The knobs that say who goes in. chunk: the most prompt tokens of a step, if they are bounded."""

    slots: int
    budget: int
    chunk: int | None

    @classmethod
    def of(cls, knobs: dict[str, object]) -> "_Queue | None":
        """None where they are not known, or of a kind that this is no model of."""
        slots, budget, chunk = map(knobs.get, KNOBS)
        if not isinstance(slots, int) or not isinstance(budget, int) or knobs.get("batching") == "static":
            return None
        return cls(slots, budget, chunk if isinstance(chunk, int) and knobs.get("enable_chunked_prefill") else None)

    def features(
        self, decodes: Decodes, tokens: float, prompt: float, least_steps: float, least_prompt_steps: int
    ) -> tuple[float, ...]:
        """Returns the sums over the steps that compute so many prompt tokens, in prompts of so many, beside rows that
        decode. least_steps: as many at least; least_prompt_steps: among them with prompts."""
        room = max(1.0, self.budget - decodes.rows)
        a_step = room if self.chunk is None else min(room, self.chunk)
        prompt_steps = math.ceil(tokens / a_step)
        steps = max(least_steps, prompt_steps)
        with_prompts = min(steps, max(prompt_steps, least_prompt_steps))
        row_steps = min(steps * decodes.rows, decodes.most_row_steps)
        kv = row_steps * decodes.kv_per_row + tokens * (prompt / a_step + 1) / 2
        return (steps, with_prompts, row_steps, tokens, kv, tokens * (prompt + 1) / 2)


def _is_given_slots(slots: dict[str, float], key: str, more: float) -> bool:
    """Whether another key would have more slots than this one, by weight, after it got so much
    (`scheduler.prompt_pass`)."""
    most = max((level for name, level in slots.items() if name != key), default=0.0)
    return slots.get(key, 0.0) + more < most


KNOBS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens")


def _room(stats: EngineStats, num_running: int) -> int:
    """Returns how many more requests the KV cache holds, if they need as much as those that run."""
    if not num_running or not stats.blocks_used:
        return max(1, stats.blocks_total)
    return (stats.blocks_total - stats.blocks_used) * num_running // stats.blocks_used
