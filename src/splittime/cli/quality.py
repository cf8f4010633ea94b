"""`splittime quality BASE CANDIDATE`: is the candidate as good as the base, within margins that were stated before?

Exit codes, for a CI: 0 PASS, 1 FAIL, 2 no verdict (INCONCLUSIVE, or it could not be run as asked).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from splittime.cli import model_source
from splittime.cli.options import wide, with_options
from splittime.cli.progress import bars, count_words, doing
from splittime.cli.quality_options import ANSWERS, STANDARD_OUTPUT, Options
from splittime.core.errors import ConfigError
from splittime.ledger.whole_file import check_writable, write_whole
from splittime.runner.config import RunnerConfig

if TYPE_CHECKING:
    from splittime.engine.tokenizer import Tokenizer
    from splittime.quality.gate import Tasks
    from splittime.quality.margins import Margins
    from splittime.quality.model import Model
    from splittime.quality.report import Report

NO_VERDICT = 2
PYTHON_FILES = 200
MAX_NUM_SEQS = 8  # that answer questions at once

EXAMPLES = """\b
Examples:
  splittime quality code code --candidate-quantization int4
  splittime quality A A --text books/ --candidate-kv-cache-dtype int8 --needle
  splittime quality A A-awq --choices mmlu.csv --answers gsm8k.jsonl --json -
  splittime quality A http://localhost:8000 --text wiki.txt --html report.html
\b
Without --text, texts are sources of this machine's Python library, which the
packaged model's training held out. Verdicts need 10 documents: a file is one,
unless <|endoftext|> or WikiText's titles part it; so is a line of .jsonl.
\b
KL: how far the two distributions of the next token are apart, in nats; 0: the
same. Perplexity ratio: the candidate's over the base's. Decoded: one token a
step over the KV cache, as answers are. Margins are narrower for 8 bits.
PASS: the whole interval is within the margin; FAIL: all of it is beyond;
NOT JUDGED: a server tells too little for it.
Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE or not done as asked, 130 Ctrl-C.
"""


@with_options(Options, failed=NO_VERDICT)
def quality(given: Options) -> None:
    """Say whether a quantised (or otherwise changed) model is as good as its base: PASS, FAIL or INCONCLUSIVE."""
    from splittime.quality.gate import Gate
    from splittime.quality.margins import EXIT_CODES

    _check_files(given)
    tasks, sides = _tasks(given), (_runner(given, "base"), _runner(given, "candidate"))
    with doing("loading the models"):
        models, encoder = _load(given, sides, [document.text for document in tasks.documents])
        asked = _margins(models[1], given)
    with _progress() as tell:
        report = Gate(models[0], models[1], encoder, asked, tell, _rounded(models, sides)).run(tasks)
    _write(report, given)
    if given.json != STANDARD_OUTPUT:
        show(report)
    raise typer.Exit(EXIT_CODES[report.verdict])


def _check_files(given: Options) -> None:
    """Before minutes of measuring, not after."""
    for path, param in ((given.json_file, "json"), (given.html, "html")):
        if path is not None:
            check_writable(path, param)


def _write(report: "Report", given: Options) -> None:
    from splittime.quality.html import render_html
    from splittime.quality.report import as_json

    if given.json == STANDARD_OUTPUT:
        sys.stdout.buffer.write(as_json(report))
    if given.json_file is not None:
        write_whole(given.json_file, as_json(report), param="json", keeps=True)
    if given.html is not None:
        write_whole(given.html, render_html(report).encode(), param="html", keeps=True)


def _lengths(told: str) -> tuple[int, ...]:
    """0 is the longest."""
    from splittime.quality.gate import SHORT

    words = {"short": SHORT, "long": 0}
    found = []
    for word in told.split(","):
        word = word.strip()
        if word not in words and not (word.isdigit() and int(word) >= 2):
            message = f"--length has {word!r}, must be short, long, or a number of tokens from 2"
            raise ConfigError(message, param="length", value=told)
        found.append(words[word] if word in words else int(word))
    return tuple(found)


def _tasks(given: Options) -> "Tasks":
    """Read before any model is: a file that cannot be read should not cost a load."""
    from splittime.quality import questions as asked
    from splittime.quality.documents import python_documents, read_documents
    from splittime.quality.gate import Tasks

    needs_text = given.needle or not (given.choices or given.answers)
    documents = read_documents(given.text) if given.text else python_documents(PYTHON_FILES) if needs_text else []
    most = given.questions
    return Tasks(
        documents=documents,
        lengths=_lengths(given.length),
        text_tokens=given.tokens,
        choices={path.name: asked.read_choices(path, most) for path in given.choices or ()},
        answers={path.name: asked.read_answers(path, most or ANSWERS) for path in given.answers or ()},
        with_needle=given.needle,
    )


def _runner(given: Options, side: str) -> RunnerConfig | None:
    """Of the base or the candidate. None for a server, of which nothing can be set from here."""
    model = getattr(given, side)
    settings = {name: getattr(given, f"{side}_{name}") for name in ("quantization", "kv_cache_dtype", "dtype")}
    if _is_url(model):
        for name, value in settings.items():
            if value not in (None, "auto"):
                flag = f"--{side}-{name.replace('_', '-')}"
                hint = "start the server with it"
                raise ConfigError(f"{flag} cannot be set of the server {model}", param=flag, value=value, hint=hint)
        return None
    config = RunnerConfig(
        model_path=str(model_source.locate(model)),
        max_num_seqs=MAX_NUM_SEQS,
        kernels=given.kernels,
        num_threads=given.num_threads,
        max_model_len=given.max_model_len,
        **settings,
    )
    config.validate()
    return config


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _load(
    given: Options, configs: Sequence[RunnerConfig | None], texts: Sequence[str]
) -> "tuple[list[Model], Tokenizer]":
    """The models in order, and the tokenizer of the first that is here. Raises `ConfigError`, also where two that are
    here read one of `texts` as different ids."""
    from splittime.cli.quality_local import LocalModel, same_tokens

    names = (given.base, given.candidate)
    labels = [_label(name, config) for name, config in zip(names, configs, strict=True)]
    local = {i: LocalModel.load(labels[i], config) for i, config in enumerate(configs) if config is not None}
    encoder = next((model.tokenizer for model in local.values()), None)
    if encoder is None:
        if given.tokenizer is None:
            raise ConfigError("two servers need --tokenizer, the model whose they use", param="tokenizer")
        encoder = model_source.load_tokenizer(model_source.locate(given.tokenizer))
    same_tokens([model.tokenizer for model in local.values()], texts)
    sizes = [model.vocab_size for model in local.values()] or [encoder.vocab_size]
    return [local.get(i) or _server(name, encoder, sizes[0], given.api_key) for i, name in enumerate(names)], encoder


def _label(name: str, config: RunnerConfig | None) -> str:
    if config is None:
        return name
    kept = [config.quantization and f"{config.quantization} weights"]
    kept.append(None if config.kv_cache_dtype == "auto" else f"{config.kv_cache_dtype} cache")
    told = ", ".join(each for each in kept if each)
    return f"{Path(name).name} ({told})" if told else Path(name).name


def _server(url: str, encoder: "Tokenizer", vocab_size: int, api_key: str | None) -> "Model":
    from splittime.cli.quality_local import Spelling
    from splittime.quality.server import ServerModel

    return ServerModel(url, Spelling(encoder), vocab_size, api_key=api_key)


def _margins(candidate: "Model", given: Options) -> "Margins":
    from splittime.quality.margins import standard

    claims = candidate.reads.claims if candidate.reads else ()
    stored = getattr(candidate, "stored", None)
    usual = standard(claims, stored and stored.bits)
    asked = {name: getattr(given, f"margin_{name}") for name in usual.__struct_fields__}
    return msgspec.structs.replace(usual, **{name: limit for name, limit in asked.items() if limit is not None})


def _rounded(models: "Sequence[Model]", sides: Sequence[RunnerConfig | None]) -> "Callable[[], Model] | None":
    """What the gate takes for usual; None where a server is one of both."""
    from splittime.cli.quality_local import LocalModel, rounded_base

    (base, candidate), (config, other) = models, sides
    if config is None or other is None:
        return None
    assert isinstance(base, LocalModel)
    assert isinstance(candidate, LocalModel)
    return rounded_base(base, config, candidate, other)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is done, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bars(*columns, words=count_words) as progress:
        known: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = progress.add_task(what, total=total)
            progress.update(known[what], completed=done)

        yield tell


_STYLES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "NOT JUDGED": "dim"}


def show(report: "Report") -> None:
    """The table and the verdict, on standard output."""
    from splittime.quality.html import check_row

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, side in (("where", "left"), ("figure", "left"), ("value", "right"), ("95 % interval", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("margin")
    table.add_column("verdict")
    for row in map(check_row, report.checks):
        verdict = Text(row.check.verdict, style=_STYLES[row.check.verdict])
        table.add_row(row.check.where, row.check.figure, row.value, row.interval, row.limit, verdict)
    console = wide()
    console.print(table)
    for paired in report.questions:
        console.print(
            f"{paired.file}: {paired.base_right} of {paired.questions} right by the base, {paired.candidate_right} by "
            f"the candidate; only one right: {paired.only_base} and {paired.only_candidate} (p {paired.p_value:.3f})",
            markup=False,
            soft_wrap=True,
        )
    console.print(Text(f"\n{report.verdict}", style=f"bold {_STYLES[report.verdict]}"))
    for reason in (*report.reasons, *(f"note: {note}" for note in report.notes)):
        console.print(f"- {reason}", markup=False, soft_wrap=True)
