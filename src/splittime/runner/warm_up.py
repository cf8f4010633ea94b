"""Steps before the first request: those that touch every code path once, and those that are timed.

They write into the cache's first blocks, which nobody has been given yet.
"""

from collections.abc import Callable, Iterator

from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan, StepResult
from splittime.runner.config import Resolved

BATCH = 4
PROBE_TOKENS = 32
SERVED_ROWS = 16  # of a decode step as a busy server runs it


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
    first = [Row(name, 0, prompt[:half], table, 0) for name, table in zip(names, tables, strict=True)]
    rest = [Row(name, half, prompt[half:], (), 1) for name in names]
    decode = [Row(name, length, (0,), (), 1) for name in names]
    if half:
        yield StepPlan(0, tuple(first), admitted)
        yield StepPlan(0, tuple(rest))
    else:
        yield StepPlan(0, tuple(Row(row.request_id, 0, prompt, row.new_block_ids, 1) for row in first), admitted)
    if length < resolved.max_model_len:
        yield StepPlan(0, tuple(decode))
        yield StepPlan(0, (decode[0],))
    moves = ((0, 0),) if resolved.num_host_slots else ()
    yield StepPlan(0, (), released=tuple(names), offloads=moves, restores=moves)


def longest_probe(resolved: Resolved) -> int:
    """Returns how many prompt tokens one request may compute in one step."""
    return min(resolved.max_num_batched_tokens, resolved.max_model_len, resolved.num_blocks * resolved.block_size)


class Probe:
    """Requests that can be run again and again at the same place, to time a step: a prompt, and a decode step of one
    request or of as many as are served at once."""

    def __init__(
        self,
        run: Callable[[StepPlan], StepResult],
        resolved: Resolved,
        max_tokens: int = PROBE_TOKENS,
        num_rows: int = SERVED_ROWS,
    ) -> None:
        self.run = run
        self.max_tokens = min(max_tokens, longest_probe(resolved))
        blocks = -(-self.max_tokens // resolved.block_size)
        self.num_rows = max(1, min(num_rows, resolved.max_num_seqs, resolved.num_blocks // blocks))
        self._tables = [tuple(range(place * blocks, (place + 1) * blocks)) for place in range(self.num_rows)]
        self._names = [f"probe-{place}" for place in range(self.num_rows)]

    def __enter__(self) -> "Probe":
        tokens = (0,) * self.max_tokens
        greedy = SamplingParams(temperature=0.0, seed=0)
        admitted = tuple(Admitted(name, tokens, 1, greedy, ()) for name in self._names)
        self.run(StepPlan(0, (Row(self._names[0], 0, tokens, self._tables[0], 1),), admitted))
        others = [self._decoded(name, table) for name, table in zip(self._names, self._tables, strict=True)][1:]
        if others:
            self.run(StepPlan(0, tuple(others)))  # what they attend to is whatever lies in the cache: only time counts
        return self

    def __exit__(self, *_: object) -> None:
        self.run(StepPlan(0, (), released=tuple(self._names)))

    def steps(self) -> dict[str, Callable[[], None]]:
        """All of them, by what they are."""
        served = {f"of {self.num_rows}": self.decode_served} if self.num_rows > 1 else {}
        return {"ms of a decode step of 1": self.decode, **served, f"a prompt of {self.max_tokens}": self.prefill}

    def decode(self) -> None:
        self.run(StepPlan(0, (self._decoded(self._names[0]),)))

    def decode_served(self) -> None:
        self.run(StepPlan(0, tuple(self._decoded(name) for name in self._names)))

    def prefill(self) -> None:
        self.run(StepPlan(0, (Row(self._names[0], 0, (0,) * self.max_tokens, (), 1),)))

    def _decoded(self, name: str, new_block_ids: tuple[int, ...] = ()) -> Row:
        return Row(name, self.max_tokens - 1, (0,), new_block_ids, 1)
