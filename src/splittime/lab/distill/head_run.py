"""What `splittime distill TEACHER --student mtp` does beyond text and updates: a head's training, and what it is worth.

It is worth how often its drafts are what the teacher says next, greedy, on text that it has not learnt from: by depth,
of those that had only right ones before them. With the times of steps that tells what it would gain.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from splittime.lab.distill.fidelity import DraftGain, draft_gain
from splittime.lab.distill.head import DEPTHS, Head, HeadLoss, Teacher
from splittime.lab.distill.inputs import Inputs
from splittime.lab.distill.job import DistillRun, DistillSettings, Task
from splittime.lab.quality.documents import MIN_SCORED, DocumentTokens
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.load import EMBEDDING
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.draft_sources import head_drafter
from splittime.runner.speculative import SpeculativeConfig

MEASURED_TOKENS, WINDOW = 50_000, 256
RESAMPLES = 1000


class HeadScores(msgspec.Struct, frozen=True):
    """by_depth: of drafts that had only right ones before them, the share that is right. chance: of all drafts
    together; low, high: its 95 % interval, over windows."""

    windows: int
    tokens: int
    by_depth: tuple[float, ...]
    chance: float
    low: float
    high: float


class HeadResult(msgspec.Struct, frozen=True):
    """What `distillation.json` holds of a head."""

    out: str
    teacher: str
    head_parameters: int
    settings: dict[str, object]
    learnt_tokens: int
    own_tokens: int
    seen_tokens: int
    updates: int
    seconds: float
    notes: tuple[str, ...]
    scores: HeadScores
    gain: DraftGain


def head_loss(inputs: Inputs, settings: DistillSettings) -> HeadLoss:
    """Raises ConfigError for a teacher whose embedding cannot be read as numbers."""
    teacher, shape = Teacher.load(inputs.folder, inputs.limit, settings.workers), inputs.plan.shape
    checkpoint = Checkpoint(inputs.folder)

    def table(name: str) -> Tensor:
        return checkpoint.take(f"{name}.weight", shape.vocab_size, shape.hidden_size).to(torch.float32, copy=True)

    embedding = table(EMBEDDING)
    head = embedding if shape.tie_word_embeddings else table("lm_head")
    return HeadLoss(teacher, embedding, head, settings.alpha, settings.temperature)


def head_task(inputs: Inputs, settings: DistillSettings, tokens: np.ndarray, folder: Path, goal: HeadLoss) -> Task:
    return Task(settings, inputs.plan, tokens, folder, inputs.folder, goal.teacher, None, inputs.limit, Head, goal)


def head_scores(model: Head, goal: HeadLoss, held_out: Sequence[DocumentTokens], limit: int) -> HeadScores:
    """held_out: of at least `MIN_SCORED` tokens each."""
    windows = head_windows(held_out, min(WINDOW, limit))
    counts = np.array([goal.num_right(model, torch.tensor([list(window)])) for window in windows], dtype=np.float64)
    sums = counts.sum(0)
    draws = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    drawn = counts[draws].sum((1, 2))
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    chance = sums[:, 0].sum() / sums[:, 1].sum()
    by_depth = tuple(float(right / max(1.0, of)) for right, of in sums)
    assert len(by_depth) == DEPTHS
    num_tokens = sum(len(window) - 1 for window in windows)
    return HeadScores(len(windows), num_tokens, by_depth, float(chance), float(low), float(high))


def head_windows(documents: Sequence[DocumentTokens], length: int) -> list[Sequence[int]]:
    """Returns windows of these documents, in order, until `MEASURED_TOKENS` are predicted: of `length` tokens and the
    one behind them, and what is left at a document's end, if it has `MIN_SCORED` tokens."""
    windows = [
        document.ids[begin : begin + length + 1]
        for document in documents
        for begin in range(0, len(document.ids), length)
    ]
    windows = [window for window in windows if len(window) >= min(MIN_SCORED, length + 1)]
    ends = accumulate(len(window) - 1 for window in windows)
    return [window for window, end in zip(windows, ends, strict=True) if end <= MEASURED_TOKENS]


def head_gain(inputs: Inputs, out: Path, scores: HeadScores, num_threads: int) -> DraftGain:
    """Returns what the head in this folder would gain, by steps timed now."""
    asked = SpeculativeConfig(method="mtp", model=str(out))
    config = RunnerConfig(
        model_path=str(inputs.folder),
        max_model_len=min(WINDOW, inputs.limit),
        max_num_seqs=4,
        num_threads=num_threads,
        speculative_config=msgspec.json.encode(asked).decode(),
        draft_model_path=str(out),
    )
    runner = load_torch_runner(config)
    chances = (scores.chance, scores.low, scores.high)
    return draft_gain(runner, head_drafter(runner, asked).runner, "head", chances)


def head_result(
    asked: tuple[str, str],
    inputs: Inputs,
    settings: DistillSettings,
    out: Path,
    run: DistillRun,
    num: tuple[int, int],
    notes: tuple[str, ...],
) -> HeadResult:
    """asked: the out folder and the teacher, as they were named. num: tokens learnt from and written by the teacher."""
    goal, model = run.task.goal, run.model
    assert isinstance(goal, HeadLoss)
    assert isinstance(model, Head)
    scores = head_scores(model, goal, inputs.held_out, inputs.limit)
    return HeadResult(
        out=asked[0],
        teacher=asked[1],
        head_parameters=sum(weight.numel() for weight in model.parameters()),
        settings=settings.values(),
        learnt_tokens=num[0],
        own_tokens=num[1],
        seen_tokens=run.state.tokens,
        updates=run.state.step,
        seconds=round(run.state.seconds, 1),
        notes=notes,
        scores=scores,
        gain=head_gain(inputs, out, scores, settings.workers),
    )
