"""Steps before the first request: those that touch every code path once, and those that are timed.

They write into the cache's first blocks, which nobody has been given yet.
"""

from collections.abc import Callable, Iterator

from splittime.core.plan import Admitted, Row, StepPlan, StepResult
from splittime.core.sampling import SamplingParams
from splittime.runner.config import Resolved

BATCH = 4
PROBE_TOKENS = 32


def warm_up_plans(resolved: Resolved) -> Iterator[StepPlan]:
    """Plans to run in order; the last one leaves no request behind."""
    block_size = resolved.block_size
    length = max(1, min(2 * block_size, resolved.max_model_len - 2))
    blocks = -(-(length + 1) // block_size)
    count = max(1, min(BATCH, resolved.num_blocks // blocks, resolved.max_num_seqs))
    names = [f"warm-up-{number}" for number in range(count)]
    prompt = tuple(token % resolved.vocab_size for token in range(length))
    kinds = (SamplingParams(temperature=0.0, seed=0), SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9))
    admitted = tuple(Admitted(name, prompt, 0, kinds[place % 3], ()) for place, name in enumerate(names))
    half = length // 2
    tables = [tuple(range(place * blocks, (place + 1) * blocks)) for place in range(count)]
    first = [Row(name, 0, prompt[:half], table, False) for name, table in zip(names, tables, strict=True)]
    rest = [Row(name, half, prompt[half:], (), True) for name in names]
    decode = [Row(name, length, (0,), (), True) for name in names]
    if half:
        yield StepPlan(0, tuple(first), admitted)
        yield StepPlan(0, tuple(rest))
    else:
        yield StepPlan(0, tuple(Row(*_whole(row, prompt)) for row in first), admitted)
    if length < resolved.max_model_len:
        yield StepPlan(0, tuple(decode))
        yield StepPlan(0, (decode[0],))
    moves = ((0, 0),) if resolved.num_host_slots else ()
    yield StepPlan(0, (), released=tuple(names), offloads=moves, restores=moves)


def _whole(row: Row, prompt: tuple[int, ...]) -> tuple[str, int, tuple[int, ...], tuple[int, ...], bool]:
    return row.request_id, 0, prompt, row.new_block_ids, True


class Probe:
    """One request that can be run again and again at the same place, to time a step of so many tokens."""

    def __init__(self, run: Callable[[StepPlan], StepResult], resolved: Resolved) -> None:
        self.run = run
        self.max_tokens = min(PROBE_TOKENS, resolved.max_model_len, resolved.num_blocks * resolved.block_size)
        self._block_ids = tuple(range(-(-self.max_tokens // resolved.block_size)))

    def __enter__(self) -> "Probe":
        tokens = (0,) * self.max_tokens
        admitted = (Admitted("probe", tokens, 1, SamplingParams(temperature=0.0, seed=0), ()),)
        self.run(StepPlan(0, (Row("probe", 0, tokens, self._block_ids, True),), admitted))
        return self

    def __exit__(self, *_: object) -> None:
        self.run(StepPlan(0, (), released=("probe",)))

    def decode(self) -> None:
        self.run(StepPlan(0, (Row("probe", self.max_tokens - 1, (0,), (), True),)))

    def prefill(self) -> None:
        self.run(StepPlan(0, (Row("probe", 0, (0,) * self.max_tokens, (), True),)))
