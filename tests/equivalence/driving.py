"""A miniature scheduler for tests: it feeds a runner with plans, with blocks in any order and chunks of any size."""

import random
from collections.abc import Iterable

from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, RowResult, StepPlan
from splittime.runner.torch_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Sequence:
    """One request under way. `results` are its rows' results in order."""

    def __init__(self, name: str, prompt: Iterable[int], sampling: SamplingParams = GREEDY, adapter: str = "") -> None:
        self.name = name
        self.adapter = adapter
        self.tokens = [int(token) for token in prompt]
        self.prompt_len = len(self.tokens)
        self.sampling = sampling
        self.blocks: list[int] = []
        self.num_computed = 0
        self.is_admitted = False
        self.results: list[RowResult] = []

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    def __init__(self, runner: TorchRunner, shuffle_seed: int | None = None) -> None:
        self.runner = runner
        self.free = list(range(runner.resolved.num_blocks))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self.free)
        self.step_id = 0
        self.released: list[str] = []

    def step(self, work: dict[Sequence, int]) -> None:
        """Compute the next so many tokens of each sequence, in one plan."""
        admitted, rows = [], []
        for sequence, count in work.items():
            if not sequence.is_admitted:
                sequence.is_admitted = True
                num_outputs = len(sequence.tokens) - sequence.prompt_len
                known = tuple(sequence.tokens)
                asked = sequence.sampling, (1, 2), "", sequence.adapter
                admitted.append(Admitted(sequence.name, known, num_outputs, *asked))
            rows.append(self._row(sequence, count))
        plan = StepPlan(self.step_id, tuple(rows), tuple(admitted), tuple(self.released))
        self.released = []
        self.step_id += 1
        for sequence, result in zip(work, self.runner.run(plan).rows, strict=True):
            assert result.request_id == sequence.name
            sequence.results.append(result)
            sequence.tokens += result.token_ids

    def _row(self, sequence: Sequence, count: int) -> Row:
        start, end = sequence.num_computed, sequence.num_computed + count
        needed = -(-end // self.runner.resolved.block_size) - len(sequence.blocks)
        new = tuple(self.free.pop() for _ in range(needed))
        sequence.blocks += new
        sequence.num_computed = end
        samples = end == len(sequence.tokens) and not sequence.sampling.pooling
        return Row(sequence.name, start, tuple(sequence.tokens[start:end]), new, int(samples))

    def verify(self, sequence: Sequence, drafts: Iterable[int]) -> RowResult:
        """One row of the pending tokens and these drafts; blocks of what was not accepted come back."""
        guessed, known = tuple(drafts), len(sequence.tokens)
        row = self._row(sequence, known + len(guessed) - sequence.num_computed)
        count = len(guessed)
        row = Row(row.request_id, row.start, row.token_ids, row.new_block_ids, 1 + count, guessed)
        (result,) = self.runner.run(StepPlan(self.step_id, (row,))).rows
        self.step_id += 1
        sequence.tokens += result.token_ids
        sequence.num_computed = len(sequence.tokens) - 1
        kept = -(-sequence.num_computed // self.runner.resolved.block_size)
        self.free, sequence.blocks = sequence.blocks[kept:] + self.free, sequence.blocks[:kept]
        return result

    def preempt(self, sequence: Sequence) -> None:
        """Forget the sequence and give its blocks back, as a scheduler does; the next step admits it again."""
        self.released.append(sequence.name)
        self.free = sequence.blocks + self.free
        sequence.blocks, sequence.num_computed, sequence.is_admitted = [], 0, False

    def prefill(self, sequence: Sequence, chunks: Iterable[int] = ()) -> None:
        """All known tokens: in chunks of these sizes, then the rest at once."""
        for chunk in chunks:
            left = len(sequence.tokens) - sequence.num_computed
            if chunk < left:
                self.step({sequence: chunk})
        self.step({sequence: len(sequence.tokens) - sequence.num_computed})

    def generate(self, sequence: Sequence, num_tokens: int, chunks: Iterable[int] = ()) -> list[int]:
        """Prefill, then decode until `num_tokens` are out."""
        self.prefill(sequence, chunks)
        while len(sequence.outputs) < num_tokens:
            self.step({sequence: 1})
        return sequence.outputs
