"""What `splittime distill` is given: found, read, checked before any work, and known again by a run that goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from splittime.assemble import model_source
from splittime.core.errors import ConfigError
from splittime.lab.distill import student, text
from splittime.lab.distill.fidelity import STUDENT, TEACHER
from splittime.lab.distill.head import WORD
from splittime.lab.distill.job import DistillSettings, window_limit
from splittime.lab.distill.student import StudentPlan
from splittime.lab.distill.trainer import refuse_short
from splittime.lab.quality.documents import DocumentTokens, read_documents
from splittime.models.config import ModelConfig, load_config
from splittime.models.fields import read_json
from splittime.models.weights.cache import fingerprints
from splittime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DistillRequest:
    """The command line. beside: other students to measure on the same text."""

    teacher: str
    student: str
    texts: Sequence[Path]
    held_out: Sequence[Path]
    out: Path
    start_from: Path | None
    beside: Sequence[str]
    settings: DistillSettings


@dataclass(frozen=True)
class Inputs:
    """Everything that was read, checked."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    plan: StudentPlan
    split: text.DocumentSplit
    learnt: list[DocumentTokens]
    held_out: list[DocumentTokens]
    limit: int

    @property
    def end(self) -> tuple[int, ...]:
        return self.config.eos_token_ids[:1]


def folder_of(model: str) -> Path:
    """A model in the package by its name, a folder, or what the Hub has; never a GGUF file."""
    folder = model_source.locate(model)
    if folder.is_file():
        hint = "name a folder with config.json, safetensors and tokenizer.json"
        raise ConfigError(f"{folder} is a GGUF file, which has no tokenizer files to hand on", param="model", hint=hint)
    return folder


def read(asked: DistillRequest) -> Inputs:
    """Raises `ConfigError` for whatever cannot be used, before any work."""
    asked.settings.checked()
    folder = folder_of(asked.teacher)
    config = load_config(folder)
    shape = _plan(asked, folder)
    student.same_vocabulary(shape.shape.vocab_size, config.vocab_size)
    for name in asked.beside:
        if name in (TEACHER, STUDENT):
            said = f"--beside {name} would be called as the {name} is in the table"
            raise ConfigError(said, param="beside", value=name, hint=f"name it ./{name}")
        student.same_vocabulary(load_config(folder_of(name)).vocab_size, config.vocab_size)
    if asked.start_from is not None:
        student.same_shape(asked.start_from, shape.shape)
    tokenizer = model_source.load_tokenizer(folder)
    split = text.split(read_documents(asked.texts), read_documents(asked.held_out) if asked.held_out else ())
    learnt, held_out = text.encode(split.learnt, tokenizer), text.encode(split.held_out, tokenizer)
    limit = window_limit(shape, config.max_position_embeddings)
    refuse_short(sum(len(document.ids) for document in learnt), limit)
    return Inputs(folder, config, tokenizer, shape, split, learnt, held_out, limit)


def _plan(asked: DistillRequest, teacher: Path) -> StudentPlan:
    """Returns what is trained; of a head, the teacher's own shape."""
    if asked.student == WORD:
        for name, value in (("beside", asked.beside), ("start_from", asked.start_from)):
            if value:
                raise ConfigError(
                    f"--{name.replace('_', '-')} does not go with a head", param=name, hint="leave it out"
                )
        plan = student.read_plan(teacher, of_head=True)
        return StudentPlan(plan.shape, {**plan.values, "num_nextn_predict_layers": 1})
    named = asked.student in model_source.PACKAGED and not Path(asked.student).exists()
    return student.read_plan(folder_of(asked.student) if named else Path(asked.student))


def identity(asked: DistillRequest, inputs: Inputs, learnt: np.ndarray, memory: Path) -> dict[str, Any]:
    """Returns what the student depends on."""
    sources = [inputs.folder, *([asked.start_from] if asked.start_from else [])]
    paths = [path for source in sources for path in sorted(source.glob("*.safetensors"))]
    return {
        **asked.settings.values(),
        "teacher and start": fingerprints(paths, memory),
        "teacher's config": read_json(inputs.folder / "config.json"),
        "student": dict(inputs.plan.values),
        "text": text.digest(learnt),
    }
