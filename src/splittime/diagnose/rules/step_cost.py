"""What a step cost in these books: a line fitted to their own steps, and what a larger batch would gain by it.

    length of a step = fixed + decode * rows + prefill * prompt tokens + context * cached tokens read      none below 0

Least squares over the steps, a coefficient that would be negative left out, fitted again without the twentieth that fit
worst (a pause of the machine is no property of a step). It is a model: it is used to decide whether a prescription can
help, and never told as a measurement. `is_known` says whether the books vary enough for its use.

    time of the machine for one request at batch B = prefill * prompt + output * (fixed / B + decode + context * tokens)
    gain of B -> C = time at B / time at C
"""

from collections.abc import Sequence

import msgspec
import numpy

from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord

MIN_STEPS_TO_FIT = 30  # ten for each coefficient that matters
KEEP = 0.95


class StepCost(msgspec.Struct, frozen=True):
    """All in ns: for a step, a decode row, a prompt token, a cached token read."""

    fixed_ns: float
    decode_ns: float
    prefill_ns: float
    context_ns: float

    def step_ns(self, decode_rows: float, prefill_tokens: float, kv_tokens: float) -> float:
        variable = self.decode_ns * decode_rows + self.prefill_ns * prefill_tokens + self.context_ns * kv_tokens
        return self.fixed_ns + variable


def worked_ns(step: StepRecord) -> int:
    """Returns its length without what its thread waited for a processor: that is no property of the step."""
    return step.length_ns - min(step.cpu_wait_ns or 0, step.end_ns - step.begin_ns)


def fit(steps: Sequence[StepRecord]) -> StepCost | None:
    """None if there are too few steps, or all of them are alike."""
    if len(steps) < MIN_STEPS_TO_FIT:
        return None
    columns = [(1.0, s.decode_tokens, s.prefill_tokens, s.kv_tokens_read) for s in steps]
    known, lengths = numpy.array(columns, dtype=float), numpy.array([worked_ns(s) for s in steps], dtype=float)
    if not (known[:, 1:].std(axis=0) > 0).any():
        return None
    fixed, decode, prefill, context = robust_fit(known, lengths)
    return StepCost(float(fixed), float(decode), float(prefill), float(context))


def robust_fit(known: numpy.ndarray, lengths: numpy.ndarray) -> numpy.ndarray:
    """Returns coefficients of the columns, none negative, without the rows that fit worst, unless a column would be
    lost with them: of few prompts among many steps it is they that fit worst."""
    first = _non_negative(known, lengths)
    misses = numpy.abs(known @ first - lengths)
    kept = misses <= numpy.quantile(misses, KEEP)
    is_lost = (known[kept].any(axis=0) != known.any(axis=0)).any()
    return first if is_lost else _non_negative(known[kept], lengths[kept])


def _non_negative(known: numpy.ndarray, lengths: numpy.ndarray) -> numpy.ndarray:
    """Least squares; while a coefficient is negative, the most negative one is held at 0."""
    scale = numpy.maximum(numpy.abs(known).max(axis=0), 1e-9)
    used = list(range(known.shape[1]))
    while used:
        solution = numpy.linalg.lstsq(known[:, used] / scale[used], lengths, rcond=None)[0]
        if solution.min() >= 0:
            break
        used.pop(int(solution.argmin()))
    found = numpy.zeros(known.shape[1])
    if used:
        found[used] = solution / scale[used]
    return found


def batch_gain(cost: StepCost, accounts: Sequence[ClosedAccount], batch: float, larger: float) -> float:
    """How many times as many requests the machine would serve with the larger batch: 1 means that nothing is gained."""
    return _request_ns(cost, accounts, batch) / max(1.0, _request_ns(cost, accounts, larger))


def requests_per_s(cost: StepCost, accounts: Sequence[ClosedAccount], batch: float) -> float:
    """How many requests a second the machine serves at this batch."""
    return 1e9 / max(1.0, _request_ns(cost, accounts, batch))


def _request_ns(cost: StepCost, accounts: Sequence[ClosedAccount], batch: float) -> float:
    prompt = sum(a.prompt_tokens - a.cached_tokens for a in accounts) / len(accounts)
    output = sum(a.output_tokens for a in accounts) / len(accounts)
    context = sum(a.prompt_tokens + a.output_tokens / 2 for a in accounts) / len(accounts)
    return cost.prefill_ns * prompt + output * (cost.fixed_ns / batch + cost.decode_ns + cost.context_ns * context)
