"""A head that predicts further tokens (`models.head`), in plain PyTorch, for training; its weights have the names that
the serving side reads.

The layer sees, at each place of a text, the token there and the model's features of the token before, and is taught
what the model says of the next token. Once more for each further depth: with the features that the layer itself made
one place before, as it will have behind a draft (EAGLE, arXiv 2401.15077; trained on its own features as in EAGLE-3,
arXiv 2503.01840). Served, only the last places have such features; here all places have them.

    loss   mean over depths of  alpha KL(model || head) + (1 - alpha) cost of the text's own tokens

The teacher is any model that the server serves, in its own kernels, quantised or not. The serving runner computes whole
windows as prompts over a KV cache that is used again for the next; nothing is sampled. Kernels give a token the same
result whatever its neighbours and however many threads there are, so what the teacher says does not depend on how
windows are grouped (`tests/lab/distill/test_distill_teacher.py`).
"""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splittime.core.errors import EngineError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.lab.distill.llama import LlamaLayer, RMSNorm, Shape, initialise, rotary_tables
from splittime.lab.distill.loss import LossParts, over_rows, task_and_divergence
from splittime.models.head import NO_TOKEN
from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

DEPTHS = 3
WORD = "mtp"  # what `--student` says, and the method's name
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


class HeadLayer(LlamaLayer):
    """HiddenFeatures and tokens joined, a layer, and the norm behind it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.hidden_layernorm, self.token_layernorm = RMSNorm(shape), RMSNorm(shape)
        self.input_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(shape)

    def features(self, before: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """before: [batch, positions, hidden], features of the token before each; tokens: embedded, as many. Returns
        those that the layer makes."""
        joined = torch.cat((self.hidden_layernorm(before), self.token_layernorm(tokens)), dim=-1)
        return self.final_layernorm(self(self.input_proj(joined), cos, sin))


class Head(nn.Module):
    """A head on a model of this shape."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.mtp_layers = nn.ModuleList([HeadLayer(shape)])
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialise)
        layer = self.layer
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            nn.init.zeros_(weight)
        with torch.no_grad():  # it begins as one that hands the model's features on
            layer.input_proj.weight[:, : shape.hidden_size] = torch.eye(shape.hidden_size)
            layer.input_proj.weight[:, shape.hidden_size :] *= 0.1

    @property
    def layer(self) -> HeadLayer:
        layers = self.model.mtp_layers
        assert isinstance(layers, nn.ModuleList)
        layer = layers[0]
        assert isinstance(layer, HeadLayer)
        return layer

    def depths(self, features: Tensor, tokens: Tensor, num_depths: int) -> list[Tensor]:
        """features, tokens: [batch, positions, hidden], the model's of each token, and the tokens embedded. Returns the
        head's features by depth, each [batch, positions, hidden]: what is known at a place of the token behind it."""
        length, found = tokens.shape[1], []
        shown = torch.where(torch.arange(length)[:, None] <= NO_TOKEN, 0.0, tokens)
        for _ in range(num_depths):
            features = self.layer.features(_before(features), shown, self.cos[:length], self.sin[:length])
            found.append(features)
        return found


def _before(features: Tensor) -> Tensor:
    return F.pad(features, (0, 0, 1, 0))[:, :-1]


class HeadLoss:
    """What a head is trained to make small. embedding, head: float32 [vocab, hidden], of the model, not trained."""

    def __init__(self, teacher: Teacher, embedding: Tensor, head: Tensor, alpha: float, temperature: float) -> None:
        self.teacher, self._embedding, self._head = teacher, embedding, head
        self._alpha, self._temperature = alpha, temperature

    def before(self, windows: Tensor) -> Tensor:
        """Returns the teacher's hidden states [count, context, hidden]."""
        return self.teacher.hidden(windows[:, :-1])

    def __call__(self, model: Head, windows: Tensor, beside: Tensor | None) -> tuple[Tensor, LossParts]:
        assert beside is not None
        parts = []
        for depth, (ours, theirs, targets) in enumerate(self.lines(model, windows, beside)):
            weight = 1.0 if depth == 0 else 0.7**depth
            parts.append(weight * over_rows(model.shape.vocab_size, self._of(ours, theirs, targets), ours))
        task, kl = torch.stack(parts).sum(0) / sum(0.7**depth for depth in range(DEPTHS))
        loss = self._alpha * kl + (1 - self._alpha) * task
        return loss, LossParts(loss.item(), task.item(), kl.item())

    def lines(self, model: Head, windows: Tensor, beside: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns by depth: the head's features, the teacher's hidden states and the next tokens, of all places that
        have so many tokens before them; the first dimension is theirs."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        embedded = F.embedding(tokens, self._embedding)
        made = model.depths(self.teacher.normed(beside), embedded, DEPTHS)
        lines = []
        for depth, ours in enumerate(made, 1):
            features, theirs = ours[:, depth:].flatten(0, 1), beside[:, depth:].flatten(0, 1)
            lines.append((features, theirs, targets[:, depth:].flatten()))
        return lines

    def _of(self, ours: Tensor, theirs: Tensor, targets: Tensor) -> Callable[[slice], Tensor]:
        def mean_of(rows: slice) -> Tensor:
            said, taught = self.logits(ours[rows]), self.teacher.logits(theirs[rows])
            return task_and_divergence(said, taught, targets[rows], self._temperature)

        return mean_of

    def logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self._head)

    @torch.no_grad()
    def num_right(self, model: Head, windows: Tensor) -> list[tuple[int, int]]:
        """Returns by depth how many drafts were what the teacher would say, and of how many that had only such before
        them."""
        beside = self.before(windows)
        taught = self.teacher.logits(beside.flatten(0, 1)).argmax(-1).view(windows.shape[0], -1)
        made = model.depths(self.teacher.normed(beside), F.embedding(windows[:, :-1], self._embedding), DEPTHS)
        so_far = torch.ones_like(taught[:, 1:], dtype=torch.bool)
        found = []
        for features in made:
            right = (self.logits(features).argmax(-1) == taught)[:, 1:][:, -so_far.shape[1] :]
            found.append((int((right & so_far).sum()), int(so_far.sum())))
            so_far = (right & so_far)[:, :-1]
        return found
