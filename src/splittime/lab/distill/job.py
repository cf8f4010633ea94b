"""A distillation: updates until the budget is spent, checkpoints between them.

* The budget is minutes, tokens, or both; the learning rate's cosine ends where the budget ends. With tokens alone,
  the same command gives the same weights, killed and repeated or not (`tests/lab/distill/test_distill_resume.py`).
* A checkpoint is written now and then, and only if every weight in it is finite. A loss or a gradient that is not
  ends the run with an error; what the last checkpoint held is then in `OUT.unfinished/last-good`, as a model folder.
* No weights are picked by their held-out figures: those of the last update are the student's.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splittime.core.errors import ConfigError, EngineError
from splittime.lab.distill import student
from splittime.lab.distill.llama import Llama, Shape
from splittime.lab.distill.loss import Distillation, Objective, Teaching, TextLoss
from splittime.lab.distill.student import StudentPlan
from splittime.lab.distill.trainer import LONGEST, Optimizer, State, Trainer, Update, Windows, context_at, make_workers
from splittime.lab.quantize import tensor_file

CHECKPOINT, LAST_GOOD = "last.pt", "last-good"
CHECKPOINT_SECONDS = 60.0
FIRST_SECONDS = 10.0  # into the work: who stops it in its first minute loses less than that
OnUpdate = Callable[[State, Update], None]
OnCheckpoint = Callable[[State], None]


@dataclass(frozen=True)
class DistillSettings:
    """minutes, tokens: the budget, one of them or both. own_outputs: sequences that the teacher writes.

    temperature: of both distributions in the divergence. alpha: weight of the divergence; what is left of 1 is the
    weight of the text's own tokens. matrix_rate, other_rate: peak learning rates of Muon and AdamW.
    """

    minutes: float | None = None
    tokens: int | None = None
    own_outputs: int = 0
    temperature: float = 1.0
    alpha: float = 0.9
    step_tokens: int = 4096
    workers: int = 2
    seed: int = 0
    matrix_rate: float = 0.02
    other_rate: float = 0.008

    def checked(self) -> "DistillSettings":
        """Raises `ConfigError` naming the first that cannot be honoured."""
        if self.minutes is None and self.tokens is None:
            hint = "--minutes 10, --tokens 1000000, or both: what is spent first ends the run"
            raise ConfigError("a distillation needs a budget", param="minutes", hint=hint)
        for name in ("minutes", "tokens", "temperature", "step_tokens", "workers", "matrix_rate", "other_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise _out_of_range(name, value, "above 0")
        if not 0 <= self.alpha <= 1:
            raise _out_of_range("alpha", self.alpha, "from 0 (the text alone) to 1 (the teacher alone)")
        if self.own_outputs < 0 or self.seed < 0:
            name = "seed" if self.own_outputs >= 0 else "own_outputs"
            raise _out_of_range(name, getattr(self, name), "at least 0")
        return self

    def values(self) -> dict[str, object]:
        return asdict(self)


def _out_of_range(name: str, value: float, limit: str) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"{flag} is {value:g}, must be {limit}", param=name, value=value, limit=limit)


@dataclass(frozen=True)
class Task:
    """What is trained, on what, by whom. folder: for checkpoints. teacher_folder: its tokenizer files are the
    student's. teacher: None where alpha is 0. limit: the longest window. model: made of the plan's shape. goal: None is
    what the settings say of a student."""

    settings: DistillSettings
    plan: StudentPlan
    tokens: np.ndarray
    folder: Path
    teacher_folder: Path
    teacher: Teaching | None
    start: dict[str, Tensor] | None
    limit: int
    model: Callable[[Shape], nn.Module] = Llama
    goal: Objective | None = None


def window_limit(plan: StudentPlan, teacher_tokens: int) -> int:
    """The longest window that both models have positions for; their last position is asked for nothing."""
    return min(LONGEST, plan.shape.max_position_embeddings, teacher_tokens)


def objective(settings: DistillSettings, teacher: Teaching | None) -> Objective:
    """Without a weight for the teacher, the teacher is not asked."""
    if settings.alpha == 0 or teacher is None:
        return TextLoss()
    return Distillation(teacher, settings.alpha, settings.temperature)


class DistillRun:
    """Where a task stands; it goes on from its last checkpoint."""

    def __init__(self, task: Task) -> None:
        settings = task.settings
        self.task, self.state = task, State()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(settings.seed)
            self.model = task.model(task.plan.shape)
        optimizer = Optimizer(self.model, "muon", settings.matrix_rate, settings.other_rate)
        windows = Windows(task.tokens, settings.seed)
        self.workers = make_workers(settings.workers)
        goal = task.goal or objective(settings, task.teacher)
        self.trainer = Trainer(
            self.model, optimizer, windows, goal, self.workers, settings.workers, settings.step_tokens
        )
        if task.start is not None:
            self.model.load_state_dict(task.start)
        self.resume()

    def resume(self) -> None:
        """From the last checkpoint, if there is one. Raises `ConfigError` if it cannot be read."""
        path = self.task.folder / CHECKPOINT
        if not path.exists():
            return
        try:
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.trainer.optimizer.load_state_dict(saved["optimizer"])
            self.state = State(**saved["state"])
        except Exception as error:  # whatever a damaged file makes torch raise
            hint = f"remove {path} to begin anew"
            raise ConfigError(f"{path} is damaged: {error}", param="out", value=str(path), hint=hint) from None

    def train(
        self, on_update: OnUpdate, on_checkpoint: OnCheckpoint = lambda state: None, every: int | None = None
    ) -> dict[str, Tensor]:
        """-> the weights. every: updates between checkpoints; None goes by the clock."""
        due_at = time.monotonic() + FIRST_SECONDS
        while (progress := self.state.progress(self.task.settings)) < 1.0:
            update = self.trainer.step(self.state, progress, context_at(progress, self.task.limit))
            self._check(update)
            on_update(self.state, update)
            is_due = self.state.step % every == 0 if every else time.monotonic() >= due_at
            if is_due:
                self._save()
                on_checkpoint(self.state)
                due_at = time.monotonic() + CHECKPOINT_SECONDS
        self._save()
        return self.model.state_dict()

    def close(self) -> None:
        self.workers.shutdown()

    def _save(self) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise self._broken("weights")
        content: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
            "state": vars(self.state),
        }
        with tensor_file.replacing(self.task.folder / CHECKPOINT) as file:
            torch.save(content, file)

    def _check(self, update: Update) -> None:
        for name, value in (("loss", update.parts.loss), ("gradient", update.norm)):
            if not np.isfinite(value):
                raise self._broken(name)

    def _broken(self, what: str) -> EngineError:
        """The error to raise; what the last checkpoint holds becomes a model folder."""
        step, folder, rates = self.state.step, self.task.folder / LAST_GOOD, self.task.settings
        said = f"the {what} of update {step} is not finite"
        again = f"lower rates than --matrix-rate {rates.matrix_rate:g} --other-rate {rates.other_rate:g}"
        if not (self.task.folder / CHECKPOINT).exists():
            return EngineError(f"{said}; there was no checkpoint yet", value=step, hint=f"use {again}")
        self.resume()
        student.write_folder(folder, self.task.plan, self.model.state_dict(), self.task.teacher_folder)
        kept = f"the weights of update {self.state.step} are in {folder}"
        start = f"go on from them with --start-from {folder}" if self.task.goal is None else "begin anew"  # no head can
        hint = f"{start}, another --out, and {again}"
        return EngineError(f"{said}; {kept}", value=step, hint=hint)
