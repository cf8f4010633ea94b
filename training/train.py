"""Train the packaged code model, or its draft, from random weights on this machine's Python standard library.

Owns the run: which tokens come when, the budget, the checkpoints and the log. Promises:

* the budget is wall-clock minutes, tokens, or both; the cosine schedule ends exactly where the budget ends, however
  fast or busy the machine is (the price: two runs under a wall-clock budget do not give equal weights; a token budget
  alone fixes everything);
* a killed run, started again with the same command, continues from its last checkpoint and its remaining budget;
* the checkpoint with the lowest validation loss is the one exported, and an export is never seen half-written.

The updates themselves are `splittime.lab.distill.trainer`'s, which distillation shares.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from splittime.lab.distill.llama import Llama, parameter_count
from splittime.lab.distill.loss import TextLoss
from splittime.lab.distill.trainer import LONGEST, Optimizer, Trainer, Windows, context_at, make_workers
from splittime.lab.distill.trainer import State as Progressed
from training.corpus import Document, load_corpus
from training.export import PACKAGED, REPOSITORY, export_folder, replace_file, replace_text
from training.model import SHAPES
from training.tokenizer import END_OF_TEXT_ID, load_tokenizer, train_tokenizer

VALIDATION_WINDOWS = 24


@dataclass(frozen=True)
class Options:
    """One run, as the command line gives it."""

    model: str
    minutes: float | None
    tokens: int | None
    work: Path
    export: Path | None
    start_from: Path | None
    optimizer: str
    matrix_rate: float
    other_rate: float
    step_tokens: int
    workers: int
    seed: int
    eval_minutes: float

    def settings(self) -> dict[str, object]:
        """What the results report of a run: everything but its folders."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str | int | float)}


@dataclass
class State(Progressed):
    """How far the run is; saved with every checkpoint."""

    best_loss: float = math.inf


def encode(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """One stream of token ids: every document followed by the end-of-text token."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array([*e.ids, END_OF_TEXT_ID], dtype=np.uint16) for e in encoded])


def prepare(work: Path) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """The tokenizer and the token streams of `train` and `validation`, made once and kept in the work folder."""
    paths = [work / name for name in ("tokenizer.json", "train.npy", "validation.npy")]
    if not all(path.exists() for path in paths):
        work.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus()
        tokenizer = train_tokenizer(document.text for document in corpus.train)
        np.save(paths[1], encode(tokenizer, corpus.train))
        np.save(paths[2], encode(tokenizer, corpus.validation))
        (work / "corpus.json").write_text(json.dumps(corpus.summary() | {"skipped": corpus.skipped}))
        tokenizer.save(str(paths[0]))
    return load_tokenizer(work), np.load(paths[1]), np.load(paths[2])


@torch.no_grad()
def validation_loss(model: Llama, tokens: np.ndarray, workers: Executor) -> float:
    """Mean loss in nats per token over windows of the longest context spread evenly over the validation stream."""
    starts = np.linspace(0, len(tokens) - LONGEST - 2, VALIDATION_WINDOWS).astype(int)
    rows = np.stack([tokens[s : s + LONGEST + 1] for s in starts]).astype(np.int64)
    losses = workers.map(lambda part: model.loss(part[:, :-1], part[:, 1:]).item(), torch.from_numpy(rows).split(1))
    return float(np.mean(list(losses)))


class Run:
    """A training run: the model, its optimiser, and where it stands."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options, self.state, self.shape = options, State(), SHAPES[options.model]
        self.folder = options.work / options.model
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer, train, self.validation = prepare(options.work)
        self.windows = Windows(train, options.seed)
        self.model = Llama(self.shape)
        self.optimizer = Optimizer(self.model, options.optimizer, options.matrix_rate, options.other_rate)
        self.workers = make_workers(options.workers)
        self.trainer = Trainer(
            self.model, self.optimizer, self.windows, TextLoss(), self.workers, options.workers, options.step_tokens
        )
        replace_text(self.folder / "options.json", json.dumps(options.settings(), indent=2))
        self.resume()

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        path = self.folder / "last.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = State(**saved["state"])
        elif self.options.start_from:
            self.model.load_state_dict(torch.load(self.options.start_from, weights_only=True))

    def save(self) -> None:
        """Write the checkpoint that `resume` reads."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "state": vars(self.state)}
        replace_file(self.folder / "last.pt", lambda path: torch.save(state, path))

    def step(self) -> dict[str, float]:
        """One update; returns what the log says of it."""
        progress = self.state.progress(self.options)
        context = LONGEST if self.options.start_from else context_at(progress)
        update = self.trainer.step(self.state, progress, context)
        return {
            "loss": update.parts.loss,
            "gradient_norm": update.norm,
            "scale": update.scale,
            "context": update.context,
            "progress": update.progress,
        }

    def evaluate(self) -> float:
        """Validation loss; the best weights so far are kept, and exported where the run exports."""
        began = time.monotonic()
        loss = validation_loss(self.model, self.validation, self.workers)
        if loss < self.state.best_loss:
            self.state.best_loss = loss
            weights = self.model.state_dict()
            replace_file(self.folder / "best.pt", lambda path: torch.save(weights, path))
            if self.options.export:
                export_folder(self.options.export, self.shape, weights, self.tokenizer)
        self.state.seconds += time.monotonic() - began
        self.save()
        return loss

    def log(self, **values: float) -> None:
        """Append one JSON line to the log."""
        record = {**vars(self.state), **values}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: round(value, 5) for name, value in record.items()}) + "\n")

    def train(self, progress: Progress) -> None:
        """Run until the budget is spent; evaluate every few minutes and at the end."""
        bar = progress.add_task(self.options.model, total=1.0)
        next_evaluation = self.state.seconds + self.options.eval_minutes * 60
        while self.state.progress(self.options) < 1.0:
            measured = self.step()
            speed = self.state.tokens / self.state.seconds
            text = f"{self.options.model} loss {measured['loss']:.3f} best {self.state.best_loss:.3f} {speed:.0f} tok/s"
            progress.update(bar, completed=measured["progress"], description=text)
            if self.state.step % 10 == 0:
                self.log(**measured)
            if self.state.seconds >= next_evaluation:
                self.log(validation_loss=self.evaluate())
                next_evaluation = self.state.seconds + self.options.eval_minutes * 60
        self.log(validation_loss=self.evaluate(), finished=1)


def parse(arguments: list[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description="Train a packaged model on this machine's Python standard library.",
        epilog="examples:\n"
        "  python -m training.train --model code --minutes 40 --export        retrain the packaged model\n"
        "  python -m training.train --model code-draft --minutes 8 --step-tokens 2048 --export   its draft\n"
        "  python -m training.train --model code --tokens 2000000 --optimizer adamw --work out/adamw   a comparison\n"
        "A run that was stopped continues when the same command is given again; remove its folder to start over.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    chosen = parser.parse_args(arguments)
    if not chosen.minutes and not chosen.tokens:
        parser.error("give a budget: --minutes, --tokens or both")
    chosen.export = PACKAGED / chosen.model if chosen.export else None
    return Options(**vars(chosen))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command line."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="code", help="which shape to train")
    parser.add_argument("--minutes", type=float, help="budget of wall-clock time, evaluations included")
    parser.add_argument("--tokens", type=int, help="budget of training tokens")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "out" / "training", help="checkpoints and log")
    parser.add_argument("--export", action="store_true", help="replace the packaged folder at each new best checkpoint")
    parser.add_argument(
        "--start-from", type=Path, metavar="BEST.PT", help="begin with these weights, at the longest context"
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="what updates the matrices")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=0.008, help="peak learning rate of AdamW")
    parser.add_argument("--step-tokens", type=int, default=4096, help="tokens per update, at least a window per worker")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads, one core each")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the windows")
    parser.add_argument("--eval-minutes", type=float, default=3.0, help="minutes between validations")


def main() -> None:
    """Entry point."""
    run = Run(parse())
    size, tokens = parameter_count(run.model), len(run.windows.tokens)
    print(f"{run.options.model}: {size:,} parameters, {tokens:,} training tokens")
    description, done = TextColumn("{task.description}"), TextColumn("{task.percentage:.1f} %")
    with Progress(description, BarColumn(), done, TimeElapsedColumn()) as progress:
        run.train(progress)


if __name__ == "__main__":
    main()
