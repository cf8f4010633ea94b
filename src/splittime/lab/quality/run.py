"""A comparison of two models from what was asked to the report: what `splittime quality` runs.

Files are read, and settings refused, before a model is loaded: a mistake should not cost minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from splittime.assemble import model_source
from splittime.core.errors import ConfigError
from splittime.lab.quality import questions
from splittime.lab.quality.documents import python_documents, read_documents
from splittime.lab.quality.gate import SHORT, Gate, Tasks
from splittime.lab.quality.local import LocalModel, ServerSpelling, rounded_base, same_tokens
from splittime.lab.quality.margins import Margins, standard
from splittime.lab.quality.model import Model
from splittime.lab.quality.report import Report
from splittime.lab.quality.server import ServerModel
from splittime.lab.quality.texts import Tell
from splittime.runner.config import RunnerConfig
from splittime.text.tokenizer import Tokenizer

PYTHON_FILES = 200
ANSWERS = 200
MAX_NUM_SEQS = 8  # that answer questions at once


@dataclass(frozen=True)
class Competitor:
    """One of the two models: a folder, file, packaged name, id or a server's URL, and how the runner is to run it.
    settings: fields of `RunnerConfig` that a server, which runs already, cannot be given."""

    model: str
    settings: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def is_server(self) -> bool:
        return self.model.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Questions:
    """What both models are asked. Without `texts`, and without other questions, the texts are Python's own library.

    length: "short", "long" or numbers of tokens, with commas between them. most: at most so many questions of a file.
    """

    texts: Sequence[Path] = ()
    length: str = "short"
    tokens: int = 0
    choices: Sequence[Path] = ()
    answers: Sequence[Path] = ()
    most: int | None = None
    with_needle: bool = False

    def tasks(self) -> Tasks:
        """Returns what the files hold. Raises `ConfigError` for one that cannot be read."""
        needs_text = self.with_needle or not (self.choices or self.answers)
        python = python_documents(PYTHON_FILES) if needs_text and not self.texts else []
        return Tasks(
            documents=read_documents(self.texts) if self.texts else python,
            lengths=_lengths(self.length),
            text_tokens=self.tokens,
            choices={path.name: questions.read_choices(path, self.most) for path in self.choices},
            answers={path.name: questions.read_answers(path, self.most or ANSWERS) for path in self.answers},
            with_needle=self.with_needle,
        )


@dataclass(frozen=True)
class QualityComparison:
    """shared: fields of `RunnerConfig` that hold for both models. tokenizer: the model whose tokenizer two servers use.
    margins: limits by the names of `Margins`, in place of the standard ones."""

    base: Competitor
    candidate: Competitor
    questions: Questions
    shared: Mapping[str, object] = field(default_factory=dict)
    margins: Mapping[str, float] = field(default_factory=dict)
    tokenizer: str | None = None
    api_key: str | None = None


class Prepared:
    """Both models, loaded, and what they will be asked."""

    def __init__(self, asked: QualityComparison) -> None:
        """Raises `ConfigError` for whatever cannot be read, run or compared."""
        self._tasks = asked.questions.tasks()
        self._configs = [_runner_config(side, asked.shared) for side in (asked.base, asked.candidate)]
        names = (asked.base.model, asked.candidate.model)
        texts = [document.text for document in self._tasks.documents]
        self._models, self._tokenizer = _load(names, self._configs, texts, asked)
        self._margins = _margins(self._models[1], asked.margins)

    def measure(self, tell: Tell) -> Report:
        """Returns the report; `tell` hears what is done, how much of it, of how much."""
        base, candidate = self._models
        return Gate(base, candidate, self._tokenizer, self._margins, tell, self._rounded()).run(self._tasks)

    def _rounded(self) -> Callable[[], Model] | None:
        """Returns what loads the model that the gate takes for usual; None where a server is one of both."""
        (base, candidate), (config, other) = self._models, self._configs
        if config is None or other is None:
            return None
        assert isinstance(base, LocalModel)
        assert isinstance(candidate, LocalModel)
        return rounded_base(base, config, candidate, other)


def _lengths(asked: str) -> tuple[int, ...]:
    """Returns numbers of tokens; 0 is the longest."""
    words = {"short": SHORT, "long": 0}
    found = []
    for word in map(str.strip, asked.split(",")):
        if word not in words and not (word.isdigit() and int(word) >= 2):
            message = f"--length has {word!r}, must be short, long, or a number of tokens from 2"
            raise ConfigError(message, param="length", value=asked)
        found.append(words[word] if word in words else int(word))
    return tuple(found)


def _runner_config(side: Competitor, shared: Mapping[str, object]) -> RunnerConfig | None:
    """Returns None for a server, of which nothing can be set from here."""
    if side.is_server:
        _refuse_settings(side)
        return None
    path = str(model_source.locate(side.model))
    values: dict[str, Any] = {**shared, **side.settings}
    config = RunnerConfig(model_path=path, max_num_seqs=MAX_NUM_SEQS, **values)
    config.validate()
    return config


def _refuse_settings(side: Competitor) -> None:
    for name, value in side.settings.items():
        if value not in (None, "auto"):
            message = f"{name} cannot be set of the server {side.model}"
            raise ConfigError(message, param=name, value=value, hint="start the server with it")


def _load(
    names: Sequence[str], configs: Sequence[RunnerConfig | None], texts: Sequence[str], asked: QualityComparison
) -> tuple[list[Model], Tokenizer]:
    """Returns the models in order, and the tokenizer of the first that is here. Raises `ConfigError`, also where two
    that are here read one of `texts` as different ids."""
    labels = [_label(name, config) for name, config in zip(names, configs, strict=True)]
    local = {i: LocalModel.load(labels[i], config) for i, config in enumerate(configs) if config is not None}
    tokenizer = next((model.tokenizer for model in local.values()), None)
    if tokenizer is None:
        if asked.tokenizer is None:
            raise ConfigError("two servers need --tokenizer, the model whose they use", param="tokenizer")
        tokenizer = model_source.load_tokenizer(model_source.locate(asked.tokenizer))
    same_tokens([model.tokenizer for model in local.values()], texts)
    vocab_size = next((model.vocab_size for model in local.values()), tokenizer.vocab_size)
    spelling = ServerSpelling(tokenizer)
    models: list[Model] = [
        local.get(i) or ServerModel(name, spelling, vocab_size, api_key=asked.api_key) for i, name in enumerate(names)
    ]
    return models, tokenizer


def _label(name: str, config: RunnerConfig | None) -> str:
    """Returns the model's name with what was changed about it."""
    if config is None:
        return name
    changes = [f"{config.quantization} weights"] if config.quantization else []
    changes += [] if config.kv_cache_dtype == "auto" else [f"{config.kv_cache_dtype} cache"]
    return f"{Path(name).name} ({', '.join(changes)})" if changes else Path(name).name


def _margins(candidate: Model, asked: Mapping[str, float]) -> Margins:
    claims = candidate.reads.claims if candidate.reads else ()
    stored = getattr(candidate, "stored", None)
    return msgspec.structs.replace(standard(claims, stored and stored.bits), **asked)
