"""A comparison of two models from what was asked to the report: what `splittime quality` runs.

Files are read, and settings refused, before a model is loaded: a mistake should not cost minutes.

The gate: what is asked (`Tasks`), both models measured by it, one verdict with its reasons.

unread claims             -> FAIL, whatever else was found: the figures would be about something else
any check beyond margin   -> FAIL
all checks within         -> PASS
else                      -> INCONCLUSIVE

Was what the model claims to keep in fewer bits read in those bits? By the counters of its kernels.

A gate that never ran the quantised path says nothing of it: prompts shorter than a chunk read nothing back from the
cache, a loader that falls back to the unpacked weights reads none of the packed ones. Either is a FAIL with its reason.

What a scheme usually costs, beside which a candidate's cost is judged: more than `UNUSUAL` times as much is noted.

A broken scale among many may cost less than the margin, and still several times what the scheme costs when it works. By
how much a scheme that works costs, models differ twofold and more: so the best yardstick is the base itself, rounded to
nearest at loading, over part of the same texts (`Gate`). Where that cannot be had, `known` has the most that was seen.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime import __version__
from splittime.assemble import model_source
from splittime.core.errors import ConfigError
from splittime.lab.quality import documents as papers
from splittime.lab.quality import needle as needles
from splittime.lab.quality import questions
from splittime.lab.quality import questions as asked
from splittime.lab.quality.documents import python_documents, read_documents
from splittime.lab.quality.local import LocalModel, ServerSpelling, rounded_base, same_tokens
from splittime.lab.quality.margins import MIN_DOCUMENTS, Check, Margins, overall, standard
from splittime.lab.quality.model import Model, Reads
from splittime.lab.quality.needle import Needle
from splittime.lab.quality.questions import AnswerQuestion, ChoiceQuestion, Paired
from splittime.lab.quality.report import Report, ReportSide, TextFigures, text_figures
from splittime.lab.quality.server import ServerModel
from splittime.lab.quality.texts import Tell, checks, mean_of, read_windows
from splittime.runner.config import RunnerConfig
from splittime.stats.paired import BootstrapEstimate
from splittime.text.tokenizer import Tokenizer

SHORT = 256
MOST_TIMES = 100
USUAL_TOKENS = 5000  # over which what is usual is measured: a factor of two needs no more
LONG_DOCUMENTS = 2 * MIN_DOCUMENTS  # that must fill the longest context: half of them may be of one kind
LEAST_SHARE = 0.9  # of what cannot but have been read; kernels may count without padding
USUAL_KL = {"weights.int8": 0.0019, "weights.int4": 0.061, "kv.int8": 0.0020}
"""Mean KL, nats, of each claim carried out right: the largest of rounding to nearest that BENCHMARKS.md has of the
packaged model, two babyllamas and (8 bits only) stories260K. Larger models have less."""
UNUSUAL = 2.0


@dataclass(frozen=True)
class Tasks:
    """lengths: of context, in tokens; 0 is the longest that both models and enough documents have.

    choices, answers: by the name of their file. text_tokens: budget for each length.
    """

    documents: Sequence[papers.Document] = ()
    lengths: Sequence[int] = (SHORT, 0)
    text_tokens: int = 50_000
    choices: dict[str, list[ChoiceQuestion]] = field(default_factory=dict)
    answers: dict[str, list[AnswerQuestion]] = field(default_factory=dict)
    with_needle: bool = False


class _Found(NamedTuple):
    """What the tasks put in, one after the other."""

    checks: list[Check]
    texts: list[TextFigures]
    questions: list[Paired]
    needle: list[Needle]
    notes: list[str]


class Gate:
    """Two models, one tokenizer. Raises `ConfigError` where they cannot be compared."""

    def __init__(
        self,
        base: Model,
        candidate: Model,
        encoder: papers.Encoder,
        margins: Margins,
        tell: Tell,
        rounded: Callable[[], Model] | None = None,
    ) -> None:
        """rounded: loads the base with what the candidate claims, rounded to nearest: what that costs is usual."""
        margins.validate()
        if base.vocab_size != candidate.vocab_size:
            sizes = f"{base.name} has a vocabulary of {base.vocab_size}, {candidate.name} of {candidate.vocab_size}"
            raise ConfigError(f"{sizes}: their predictions cannot be compared", param="candidate")
        self.base, self.candidate, self.encoder, self.margins, self.tell = base, candidate, encoder, margins, tell
        self.limit = min(base.max_tokens, candidate.max_tokens)
        self.rounded, self.claims = rounded, candidate.reads.claims if candidate.reads else ()
        self._usual = known(self.claims)

    def run(self, tasks: Tasks) -> Report:
        begin_ns = time.monotonic_ns()
        self._found = _Found([], [], [], [], [])
        read = papers.tokenized(tasks.documents, self.encoder)
        texts = papers.distinct(read)
        if len(texts) < len(read):
            self._note(f"{len(read) - len(texts)} of {len(read)} documents are nearly copies of others, left out")
        prefix = papers.prefix_of(self.encoder)
        lengths = self._lengths(tasks, texts) if texts else []
        self._read_texts(texts, lengths, prefix, tasks.text_tokens)
        for file, choices in tasks.choices.items():
            self._ask_choices(file, choices)
        for file, answers in tasks.answers.items():
            self._ask_answers(file, answers)
        if tasks.with_needle:
            self._hide_needle(texts, prefix)
        return self._report((time.monotonic_ns() - begin_ns) / 1e9)

    def _lengths(self, tasks: Tasks, texts: Sequence[papers.DocumentTokens]) -> list[int]:
        """Each once, in ascending order, as far as models and texts have them."""
        asked_for = sorted({min(length, self.limit) for length in tasks.lengths if length})
        for length in tasks.lengths:
            if length > self.limit:
                self._note(f"a context of {length} tokens was asked for, the models have {self.limit}")
        if 0 in tasks.lengths:
            shortest = max(asked_for, default=SHORT // 2)
            longest = papers.longest_length(texts, self.limit, shortest, LONG_DOCUMENTS)
            if longest is None and self.limit >= 2 * shortest:
                self._note(
                    f"the longest context was not measured: fewer than {LONG_DOCUMENTS} documents "
                    f"have {2 * shortest} tokens; give longer texts"
                )
            asked_for += [] if longest is None else [longest]
        return asked_for

    def _read_texts(
        self, texts: Sequence[papers.DocumentTokens], lengths: Sequence[int], prefix: tuple[int, ...], most: int
    ) -> None:
        for shorter, length in zip((0, *lengths), lengths, strict=False):
            windows = papers.plan(texts, length, shorter, prefix, most)
            if not windows:
                self._note(f"no document fills a context of {length} tokens")
                continue
            if not self._found.texts:
                self._measure_usual(texts, windows)
            where, is_last = f"{shorter}-{length} tokens", length == lengths[-1]
            for sample in read_windows(self.base, self.candidate, texts, windows, where, self.tell, is_last):
                self._found.checks.extend(checks(sample, self.margins))
                self._found.texts.append(text_figures(sample))

    def _measure_usual(self, texts: Sequence[papers.DocumentTokens], windows: Sequence[papers.TextWindow]) -> None:
        """Over the first windows, which are of as many documents. A base too large to be there twice is no error."""
        if self.rounded is None:
            return
        most = max(1, USUAL_TOKENS // len(windows[0].token_ids))
        try:
            model = self.rounded()
        except ConfigError as error:
            self._note(f"what {' and '.join(self.claims)} cost the base when rounded to nearest is not known: {error}")
            return
        where = "the base rounded to nearest"
        (sample,) = read_windows(self.base, model, texts, windows[:most], where, self.tell, decode=False)
        self._usual = measured(self.claims, mean_of(sample, sample.figures.kl).value)

    def _ask_choices(self, file: str, choices: list[ChoiceQuestion]) -> None:
        base, candidate = (
            asked.pick_all(model, self.encoder, choices, self.tell) for model in (self.base, self.candidate)
        )
        self._add(*asked.compare_choices(file, choices, base, candidate, self.margins))

    def _ask_answers(self, file: str, answers: list[AnswerQuestion]) -> None:
        base, candidate = (asked.answer_all(model, answers, self.tell) for model in (self.base, self.candidate))
        self._add(*asked.compare_answers(file, answers, base, candidate, self.margins))

    def _add(self, paired: Paired, check: Check) -> None:
        self._found.questions.append(paired)
        self._found.checks.append(check)
        if paired.left_out:
            self._note(f"{paired.file}: {paired.left_out} questions are longer than {self.limit} tokens, left out")

    def _hide_needle(self, texts: Sequence[papers.DocumentTokens], prefix: tuple[int, ...]) -> None:
        tokens = sum(len(text.ids) for text in texts)
        length = min(self.limit, tokens)
        if length < SHORT:
            self._note(f"no needle: the texts have {tokens} tokens and the models {self.limit}, it needs {SHORT}")
            return
        trials = needles.trials(texts, self.encoder, prefix, length)
        base, candidate = (needles.ask(model, trials, self.tell) for model in (self.base, self.candidate))
        found, check = needles.compare_needle(length, base, candidate, self.margins)
        self._found.needle.append(found)
        self._found.checks.append(check)

    def _unusual(self) -> list[str]:
        checks = (check for check in self._found.checks if check.rule == "kl" and not check.note)
        return [f"{check.where}: {told}" for check in checks if (told := unusual(self._usual, check.estimate))]

    def _note(self, sentence: str) -> None:
        self._found.notes.append(sentence)

    def _report(self, seconds: float) -> Report:
        found = self._found
        both = (self.base, self.candidate)
        unproven = [reason for model in both for reason in unread(model.name, model.reads)]
        elsewhere = [
            f"{model.name} is a server: what its kernels read is not known" for model in both if not model.reads
        ]
        return Report(
            verdict="FAIL" if unproven else overall([check.verdict for check in found.checks]),
            reasons=unproven + [reason(check) for check in found.checks if check.verdict in ("FAIL", "INCONCLUSIVE")],
            base=_side(self.base),
            candidate=_side(self.candidate),
            checks=found.checks,
            texts=found.texts,
            questions=found.questions,
            needle=found.needle[0] if found.needle else None,
            margins=self.margins,
            notes=found.notes + elsewhere + self._unusual(),
            seconds=seconds,
            version=__version__,
        )


def reason(check: Check) -> str:
    """Why a check did not pass, and what would settle one that is not decided."""
    end = f"{check.estimate.low:.4g} to {check.estimate.high:.4g}, limit {check.limit:g}"
    said = "beyond its margin" if check.verdict == "FAIL" else "not decided"
    return f"{check.where}: {check.figure} is {said}: {check.estimate.value:.4g} ({check.note or end}{_more(check)})"


def _more(check: Check) -> str:
    """Returns how much more text would decide it: an interval narrows with the root of it."""
    value, half = check.estimate.value, (check.estimate.high - check.estimate.low) / 2
    away = abs(value - check.limit)
    if check.verdict != "INCONCLUSIVE" or check.note or not half > away:
        return ""
    if away * MOST_TIMES**0.5 < half:
        return "; it lies so near its margin that more text would hardly settle it"
    return f"; about {(half / away) ** 2:.1f} times as many documents like these would settle it"


def _side(model: Model) -> ReportSide:
    reads = model.reads
    return ReportSide(
        name=model.name,
        facts=dict(model.facts),
        claims=None if reads is None else reads.claims,
        read=None if reads is None else reads.read,
    )


def unread(name: str, reads: Reads | None) -> list[str]:
    """A sentence for each claim that the counters do not bear out."""
    if reads is None:
        return []
    weights = [claim for claim in reads.claims if claim.startswith("weights.")]
    silent = [claim for claim in reads.claims if reads.read.get(claim, 0) <= 0]
    reasons = [f"{name} claims {claim}, and its kernels read no byte of it" for claim in silent]
    if weights and not set(weights) & set(silent):
        reasons += _too_few(name, weights, reads, reads.weights_least)
    caches = [claim for claim in reads.claims if claim.startswith("kv.")]
    if caches and reads.kv_least == 0:
        reasons.append(f"{name} claims {caches[0]}, and no text was long enough to be read back from the cache")
    elif caches and not set(caches) & set(silent):
        reasons += _too_few(name, caches, reads, reads.kv_least)
    return reasons


def _too_few(name: str, claims: list[str], reads: Reads, least: int) -> list[str]:
    read = sum(reads.read.get(claim, 0) for claim in claims)
    if read >= LEAST_SHARE * least:
        return []
    said = " and ".join(claims)
    return [f"{name} claims {said}: {read:,} bytes were read, where the steps that were run need {least:,}"]


@dataclass(frozen=True)
class Usual:
    """kl: the mean, in nats. whose: the rest of the sentence "times the 0.002 that"."""

    kl: float
    whose: str


def known(claims: Sequence[str]) -> Usual | None:
    """For a candidate with these claims, as in `model.Reads`; None where one was never measured, or there is none."""
    kl = sum(USUAL_KL.get(claim, math.inf) for claim in claims)
    if not claims or math.isinf(kl):
        return None
    return Usual(kl, f"{' and '.join(claims)} cost at most on the models that it was measured on")


def measured(claims: Sequence[str], kl: float) -> Usual:
    return Usual(kl, f"{' and '.join(claims)} cost the base when it is rounded to nearest")


def unusual(usual: Usual | None, kl: BootstrapEstimate) -> str:
    """A sentence where the whole interval is beyond `UNUSUAL` times what is usual, else ""."""
    if usual is None or kl.low <= UNUSUAL * usual.kl:
        return ""
    return (
        f"mean KL is {kl.value:.2g} nats, {kl.value / usual.kl:.1f} times the {usual.kl:.2g} that {usual.whose}: "
        "look for a broken scale"
    )


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
        for name, value in side.settings.items():
            if value not in (None, "auto"):
                message = f"{name} cannot be set of the server {side.model}"
                raise ConfigError(message, param=name, value=value, hint="start the server with it")
        return None
    path = str(model_source.locate(side.model))
    values: dict[str, Any] = {**shared, **side.settings}
    config = RunnerConfig(model_path=path, max_num_seqs=MAX_NUM_SEQS, **values)
    config.validate()
    return config


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
