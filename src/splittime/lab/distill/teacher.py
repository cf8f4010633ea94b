"""The teacher: any model that the server serves, in its own kernels, quantised or not.

The serving runner computes whole windows as prompts over a KV cache that is used again for the next; nothing is
sampled. Kernels give a token the same result whatever its neighbours and however many threads there are, so what the
teacher says does not depend on how windows are grouped (`tests/lab/distill/test_distill_teacher.py`).
"""

import threading
from pathlib import Path

import torch
from torch import Tensor

from splittime.core.errors import EngineError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)
GROUP_TOKENS = 4096  # in the KV cache at once


class Teacher:
    """`distill.loss.Teaching`."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self._one_at_a_time = threading.Lock()  # workers ask at once; the kernels' threads do one job at a time
        self._states: list[Tensor] = []

    @staticmethod
    def load(model: Path, context: int, num_threads: int) -> "Teacher":
        """For windows of at most `context` tokens. Raises `ConfigError` for what cannot be honoured."""
        at_once = max(1, GROUP_TOKENS // context)
        config = RunnerConfig(
            model_path=str(model), max_model_len=context, max_num_seqs=at_once, num_threads=num_threads
        )
        return Teacher(load_torch_runner(config))

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [count, length] -> [count, length, hidden], of which `logits` makes logits."""
        resolved = self.runner.resolved
        blocks = -(-tokens.shape[1] // resolved.block_size)
        groups = tokens.split(max(1, resolved.num_blocks // blocks))
        return torch.cat([self._group(group, blocks) for group in groups])

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab]; from any thread."""
        with self._one_at_a_time:
            return self.runner.decoder.logits(hidden.contiguous())

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> what the model's head is given, float32 of the same shape; from any thread."""
        with self._one_at_a_time:
            rows = hidden.flatten(0, -2).contiguous()
            return self.runner.decoder.normed(rows).float().view(hidden.shape)

    def _group(self, tokens: Tensor, blocks: int) -> Tensor:
        """As many windows as fit the cache."""
        names = [f"window-{number}" for number in range(len(tokens))]
        rows, newcomers = [], []
        for number, (name, line) in enumerate(zip(names, tokens.tolist(), strict=True)):
            own = tuple(range(number * blocks, (number + 1) * blocks))
            newcomers.append(Admitted(name, tuple(line), 0, GREEDY, ()))
            rows.append(Row(name, 0, tuple(line), own, 0))
        self.runner.on_hidden = self._keep
        try:
            result = self.runner.run(StepPlan(0, tuple(rows), tuple(newcomers)))
        finally:
            self.runner.on_hidden = None
            self.runner.run(StepPlan(0, (), released=tuple(names)))
        error = next((row.error for row in result.rows if row.error is not None), None)
        if error is not None:
            raise EngineError(f"the teacher cannot be learnt from: {error}", value=str(error))
        return self._states.pop()

    def _keep(self, batch: Batch, hidden: Tensor) -> None:
        """In the order of the windows. A copy: the runner's tensors are not to be trained on."""
        order = sorted(range(len(batch.rows)), key=lambda index: int(batch.rows[index].request_id.split("-")[1]))
        length = len(batch.rows[0].token_ids)
        self._states = [hidden.view(len(order), length, -1)[torch.tensor(order)]]
