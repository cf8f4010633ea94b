"""Does what `splittime distill` asks for, from files to a student's folder: the parts that need engine and runner.

OUT.unfinished/     manifest, the teacher's own outputs, the last checkpoint, the result being put together
OUT/                the student as a model folder, and `distillation.json`: how it was made and what it is worth

A head (`--student mtp`) is worth how often its drafts are what the teacher says next, greedy, on text that it has not
learnt from: by depth, of those with only right ones before them. With the times of steps that tells its gain.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError, EngineError
from splittime.core.sampling import SamplingParams
from splittime.kernels.native.check import choose_isa, insist
from splittime.kernels.native.library import isa_names
from splittime.lab.distill import fidelity, student, text
from splittime.lab.distill.head import DEPTHS, WORD, Head, HeadLoss, Teacher
from splittime.lab.distill.inputs import DistillRequest, Inputs, folder_of, identity, read
from splittime.lab.distill.job import DistillRun, DistillSettings, OnCheckpoint, OnUpdate, Task
from splittime.lab.distill.llama import parameter_count
from splittime.lab.distill.trainer import State
from splittime.lab.quality.documents import MIN_SCORED, DocumentTokens, plan, prefix_of
from splittime.lab.quality.local import LocalModel
from splittime.lab.quality.margins import MIN_DOCUMENTS
from splittime.lab.quantize import tensor_file
from splittime.models.config import load_config
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.load import EMBEDDING
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig, SpeculativeConfig
from splittime.runner.draft_sources import head_drafter
from splittime.runner.machine import choose_kernels
from splittime.text.tokenizer import Tokenizer

MEASURED_HEAD_TOKENS, WINDOW = 50_000, 256
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
    gain: fidelity.DraftGain


def head_loss(inputs: Inputs, settings: DistillSettings) -> HeadLoss:
    """Raises ConfigError for a teacher whose embedding cannot be read as numbers."""
    teacher, shape = Teacher.load(inputs.folder, inputs.limit, settings.workers), inputs.plan.shape
    checkpoint = Checkpoint(inputs.folder)

    def table(name: str) -> Tensor:
        return checkpoint.take(f"{name}.weight", shape.vocab_size, shape.hidden_size).to(torch.float32, copy=True)

    embedding = table(EMBEDDING)
    head = embedding if shape.tie_word_embeddings else table("lm_head")
    return HeadLoss(teacher, embedding, head, settings.alpha, settings.temperature)


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
    begins = ((document.ids, begin) for document in documents for begin in range(0, len(document.ids), length))
    windows = [ids[begin : begin + length + 1] for ids, begin in begins]
    windows = [window for window in windows if len(window) >= min(MIN_SCORED, length + 1)]
    ends = accumulate(len(window) - 1 for window in windows)
    return [window for window, end in zip(windows, ends, strict=True) if end <= MEASURED_HEAD_TOKENS]


def head_gain(inputs: Inputs, out: Path, scores: HeadScores, num_threads: int) -> fidelity.DraftGain:
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
    return fidelity.draft_gain(runner, head_drafter(runner, asked).runner, "head", chances)


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


PROMPT_TOKENS = 64
OUTPUT_TOKENS = 448
GROUP = 64
Prompts = list[tuple[int, ...]]
Write = Callable[[Prompts, Sequence[int], int], list[tuple[int, ...]]]
"""(prompts, a seed for each, tokens at most) -> what the teacher says after each."""


def prompts(documents: Sequence[DocumentTokens], count: int, length: int, seed: int) -> Prompts:
    """Drawn from all places of the text alike; a document shorter than `length` gives what it has."""
    random = np.random.default_rng((seed, 1))
    places = np.array([max(1, len(document.ids) - length + 1) for document in documents], dtype=np.float64)
    chosen = random.choice(len(documents), size=count, p=places / places.sum())
    begins = [int(random.integers(int(places[number]))) for number in chosen]
    cut = (documents[number].ids[begin : begin + length] for number, begin in zip(chosen, begins, strict=True))
    return [tuple(ids) for ids in cut]


def sequences(folder: Path, asked: Prompts, seed: int, output_tokens: int, write: Write, tell: Callable) -> np.ndarray:
    """Returns one stream: each prompt with what the teacher said after it. A student that sees only people's text never
    sees the places that its teacher leads to (Kim and Rush 2016, arXiv:1606.07947). Each is sampled at temperature 1
    with a seed of its own; a killed run writes only the groups that are missing. `tell(done, of)` after each group."""
    parts: list[tuple[int, ...]] = []
    for begin in range(0, len(asked), GROUP):
        tell(begin, len(asked))
        path, group = folder / f"own-{begin:07d}.json", asked[begin : begin + GROUP]
        parts += _group(path, group, seed, begin, output_tokens, write)
    tell(len(asked), len(asked))
    return np.array([token for part in parts for token in part], dtype=np.uint32)


def _group(
    path: Path, asked: Prompts, seed: int, begin: int, output_tokens: int, write: Write
) -> Iterator[tuple[int, ...]]:
    if not path.is_file():
        seeds = [(seed << 32) + begin + number for number in range(len(asked))]
        tensor_file.write_json(path, write(asked, seeds, output_tokens))
    said = _read(path)
    return (tuple(prompt) + tuple(output) for prompt, output in zip(asked, said, strict=True))


def _read(path: Path) -> list[list[int]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}", param="out", value=str(path), hint="remove it") from None


REPORT = "distillation.json"
MEASURED_TOKENS = 50_000
MEASURED_LENGTH = 512
SIMULTANEOUS = 16
Tell = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""


class Result(msgspec.Struct, frozen=True):
    """What `distillation.json` holds."""

    out: str
    teacher: str
    teacher_parameters: int
    student_parameters: int
    settings: dict[str, object]
    learnt_documents: int
    learnt_tokens: int
    own_tokens: int
    seen_tokens: int
    updates: int
    seconds: float
    notes: tuple[str, ...]
    scores: tuple[fidelity.Scores, ...]
    differences: tuple[fidelity.FidelityDifference, ...]
    gains: tuple[fidelity.DraftGain, ...]


@dataclass(frozen=True)
class Hooks:
    """Who is told. every: updates between checkpoints, None goes by the clock."""

    tell: Tell
    on_update: OnUpdate
    on_checkpoint: OnCheckpoint = lambda state: None
    every: int | None = None


def distill(asked: DistillRequest, hooks: Hooks) -> Result | HeadResult:
    """The whole of it. What was begun with the same arguments goes on; with others it is refused."""
    inputs = read(asked)
    work = tensor_file.Work(asked.out)
    result: Result | HeadResult
    try:
        learnt = text.stream(inputs.learnt, inputs.tokenizer, inputs.end)
        _compute_as_begun(work, identity(asked, inputs, learnt, work.folder))
        said = _own_outputs(asked.settings, inputs, work.folder, hooks.tell)
        run = _train(asked, inputs, np.concatenate((learnt, said)), work.folder, hooks)
        out, num_tokens = work.begin_result(), (len(learnt), len(said))
        student.write_folder(out, inputs.plan, run.model.state_dict(), inputs.folder)
        if asked.student == WORD:
            asked_for, notes = (str(asked.out), asked.teacher), _notes(inputs, num_tokens, run.state)
            result = head_result(asked_for, inputs, asked.settings, out, run, num_tokens, notes)
        else:
            result = _report(asked, inputs, out, run, num_tokens, hooks.tell)
        tensor_file.write_json(out / REPORT, msgspec.to_builtins(result))
        work.finish()
        return result
    finally:
        work.close()


def _compute_as_begun(work: tensor_file.Work, inputs: Mapping[str, Any]) -> None:
    """Use the kernels that the run began with: the fastest are found by measuring, and others may round otherwise.
    Raises `ConfigError` if they are not here."""
    kernels = choose_kernels("auto")[0]
    own, here = (choose_isa()[0], isa_names()) if kernels == "native" else (kernels, [kernels])
    begun_with = work.adopt(inputs, own)
    if begun_with not in here:
        told = f"{work.folder} was begun with {begun_with}; what runs here: {', '.join(here)}"
        hint = f"go on where it was begun, name another --out, or remove {work.folder}"
        raise ConfigError(told, param="out", value=begun_with, hint=hint)
    if begun_with != own:
        insist(begun_with)


def _own_outputs(settings: DistillSettings, inputs: Inputs, folder: Path, tell: Tell) -> np.ndarray:
    if settings.own_outputs == 0:
        return np.zeros(0, dtype=np.uint32)
    prefix = prefix_of(inputs.tokenizer)
    room = min(inputs.limit, PROMPT_TOKENS + OUTPUT_TOKENS)
    length = min(PROMPT_TOKENS, room // 2) - len(prefix)
    cut = prompts(inputs.learnt, settings.own_outputs, length, settings.seed)
    asked = [(*prefix, *prompt) for prompt in cut]
    writer = _Writer(inputs, room, settings.workers)
    most = room - length - len(prefix)
    return sequences(folder, asked, settings.seed, most, writer, lambda done, of: tell("the teacher writes", done, of))


class _Writer:
    """`Write` by the server's engine, which is loaded when the first sequence is missing."""

    def __init__(self, inputs: Inputs, room: int, num_threads: int) -> None:
        self.inputs, self.room, self.num_threads = inputs, room, num_threads
        self._llm: Any = None

    def __call__(self, prompts: Prompts, seeds: Sequence[int], output_tokens: int) -> list[tuple[int, ...]]:
        from splittime.llm import LLM

        if self._llm is None:
            limits: Mapping[str, Any] = {"max_model_len": self.room, "max_num_seqs": SIMULTANEOUS}
            self._llm = LLM(self.inputs.folder, num_threads=self.num_threads, **limits)
        sampling = [SamplingParams(temperature=1.0, max_tokens=output_tokens, seed=seed) for seed in seeds]
        outputs = self._llm.generate(prompts, sampling)
        wrong = next((output.error for output in outputs if output.error is not None), None)
        if wrong is not None:
            raise EngineError(f"the teacher's own outputs: {wrong.message}", hint=wrong.hint)
        return [output.token_ids for output in outputs]


def _train(asked: DistillRequest, inputs: Inputs, tokens: np.ndarray, folder: Path, hooks: Hooks) -> DistillRun:
    run = DistillRun(_task(asked, inputs, tokens, folder))
    try:
        run.train(hooks.on_update, hooks.on_checkpoint, hooks.every)
    finally:
        run.close()
    return run


def _task(asked: DistillRequest, inputs: Inputs, tokens: np.ndarray, folder: Path) -> Task:
    settings = asked.settings
    if asked.student == WORD:
        goal = head_loss(inputs, settings)
        return Task(settings, inputs.plan, tokens, folder, inputs.folder, goal.teacher, None, inputs.limit, Head, goal)
    teacher = Teacher.load(inputs.folder, inputs.limit, settings.workers) if settings.alpha > 0 else None
    start = student.read_weights(asked.start_from, inputs.plan.shape) if asked.start_from else None
    return Task(settings, inputs.plan, tokens, folder, inputs.folder, teacher, start, inputs.limit)


def _report(
    asked: DistillRequest, inputs: Inputs, out: Path, run: DistillRun, tokens: tuple[int, int], tell: Tell
) -> Result:
    folders = {fidelity.STUDENT: out, **{name: folder_of(name) for name in asked.beside}}
    contexts = [load_config(folder).max_position_embeddings for folder in folders.values()]
    length = min(MEASURED_LENGTH, inputs.limit, *contexts)
    teacher = _load(fidelity.TEACHER, inputs.folder, length)
    students = {name: _load(name, folder, length) for name, folder in folders.items()}
    windows = plan(inputs.held_out, length, 0, prefix_of(inputs.tokenizer), MEASURED_TOKENS)
    measured = fidelity.measure(
        windows, teacher, students, _byte_counter(inputs.tokenizer), lambda done, of: tell("measuring", done, of)
    )
    own_sums = (fidelity.STUDENT, measured[fidelity.STUDENT])
    scores = tuple(fidelity.scores(name, sums) for name, sums in measured.items())
    sizes = teacher.runner.resolved.num_parameters, parameter_count(run.model)
    return Result(
        out=str(asked.out),
        teacher=asked.teacher,
        teacher_parameters=sizes[0],
        student_parameters=sizes[1],
        settings=asked.settings.values(),
        learnt_documents=len(inputs.learnt),
        learnt_tokens=tokens[0],
        own_tokens=tokens[1],
        seen_tokens=run.state.tokens,
        updates=run.state.step,
        seconds=round(run.state.seconds, 1),
        notes=(*_size_notes(sizes), *_notes(inputs, tokens, run.state)),
        scores=scores,
        differences=tuple(fidelity.difference(own_sums, (name, measured[name])) for name in asked.beside),
        gains=tuple(
            fidelity.draft_gain(teacher.runner, students[one.name].runner, one.name, fidelity.chances_of(one))
            for one in scores[1:]
        ),
    )


def _byte_counter(tokenizer: Tokenizer) -> fidelity.BytesOf:
    if not tokenizer.has_token_bytes:
        return lambda ids: len(tokenizer.decode(ids).encode())
    return lambda ids: sum(len(tokenizer.token_bytes(token)) for token in ids)


def _load(name: str, folder: Path, length: int) -> LocalModel:
    config = RunnerConfig(model_path=str(folder), max_model_len=length, max_num_seqs=2)
    return LocalModel.load(name, config)


def _size_notes(sizes: tuple[int, int]) -> tuple[str, ...]:
    """sizes: parameters of the teacher, and of the student."""
    if sizes[1] < sizes[0]:
        return ()
    return (f"the student has {sizes[1]:,} parameters, the teacher {sizes[0]:,}: it is no smaller",)


def _notes(inputs: Inputs, tokens: tuple[int, ...], state: State) -> tuple[str, ...]:
    found = []
    if inputs.split.dropped:
        found.append(f"{inputs.split.dropped} documents of the text are held out, and were not learnt from")
    if len(inputs.held_out) < MIN_DOCUMENTS:
        found.append(
            f"intervals of {len(inputs.held_out)} held-out documents say little of how documents differ; give "
            f"{MIN_DOCUMENTS} at least, with --held-out"
        )
    if state.tokens > sum(tokens):
        found.append(f"the text was seen {state.tokens / sum(tokens):.1f} times; more text would be learnt from better")
    return tuple(found)
