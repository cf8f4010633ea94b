"""`splittime quality BASE CANDIDATE`: is the candidate as good as the base, within margins that were stated before?

Exit codes, for a CI: 0 PASS, 1 FAIL, 2 no verdict (INCONCLUSIVE, or it could not be run as asked).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from splittime.cli import model_source
from splittime.cli.options import say_error, talk, wide
from splittime.core.errors import ConfigError, SplittimeError
from splittime.runner.config import QUANTIZATIONS, RunnerConfig

if TYPE_CHECKING:
    from splittime.engine.tokenizer import Tokenizer
    from splittime.quality.gate import Tasks
    from splittime.quality.margins import Margins
    from splittime.quality.model import Model
    from splittime.quality.report import Report

NO_VERDICT = 2
ANSWERS = 200
PYTHON_FILES = 200
MAX_NUM_SEQS = 8  # that answer questions at once
PACKAGED = ("code", "code-draft")

EXAMPLES = """\b
Examples:
  splittime quality code code --candidate-quantization int4
  splittime quality A A --text books/ --candidate-kv-cache-dtype int8 --needle
  splittime quality A A-awq --choices mmlu.csv --answers gsm8k.jsonl --json -
  splittime quality A http://localhost:8000 --text wiki.txt --html report.html
\b
Without --text, texts are sources of this machine's Python library, which the
packaged model's training held out.
Exit codes: 0 PASS, 1 FAIL, 2 no verdict.
"""

_SIDES, _TASKS, _MARGINS = "How each is run", "What is measured", "Margins"


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A run that could not be made is no FAIL: exit code 2 with the error on standard error."""
    import functools

    @functools.wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except SplittimeError as error:
            say_error(error)
            raise typer.Exit(NO_VERDICT) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return guarded


def _side(flag: str, words: str, metavar: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=words, rich_help_panel=_SIDES)


def _margin(name: str, words: str) -> Any:
    return typer.Option(f"--margin-{name}", metavar="X", help=words, rich_help_panel=_MARGINS)


_KINDS, _KV = "|".join(QUANTIZATIONS), "auto|float32|bfloat16|int8"


@_guarded
def quality(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model: folder, file, packaged name, id, or URL.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The cheaper form of it.")],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Texts: .txt, .jsonl with text, or a folder. May be repeated."),
    ] = None,
    choices: Annotated[
        list[Path] | None,
        typer.Option("--choices", metavar="FILE", help="Multiple choice: CSV as MMLU's, or JSONL. May be repeated."),
    ] = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option("--answers", metavar="FILE", help="JSONL with question and answer, as GSM8K's. May be repeated."),
    ] = None,
    needle: Annotated[bool, typer.Option("--needle", help="A fact hidden at depths of the longest context.")] = False,
    length: Annotated[
        str, typer.Option("--length", metavar="LIST", help="Contexts: short (256), long, or numbers of tokens.")
    ] = "short,long",
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=100, help="Of text, at each length, spread over documents.")
    ] = 50_000,
    questions: Annotated[
        int | None,
        typer.Option("--questions", metavar="N", min=1, help=f"Of each file. Default: all choices, {ANSWERS} answers."),
    ] = None,
    base_quantization: Annotated[str | None, _side("--base-quantization", "Rounded at loading.", _KINDS)] = None,
    base_kv_cache_dtype: Annotated[str, _side("--base-kv-cache-dtype", "Its KV cache.", _KV)] = "auto",
    base_dtype: Annotated[str, _side("--base-dtype", "Of what is not rounded.", "auto|float32|bfloat16")] = "auto",
    candidate_quantization: Annotated[
        str | None, _side("--candidate-quantization", "Rounded at loading.", _KINDS)
    ] = None,
    candidate_kv_cache_dtype: Annotated[str, _side("--candidate-kv-cache-dtype", "Its KV cache.", _KV)] = "auto",
    candidate_dtype: Annotated[
        str, _side("--candidate-dtype", "Of what is not rounded.", "auto|float32|bfloat16")
    ] = "auto",
    kernels: Annotated[str, _side("--kernels", "Of both.", "auto|native|torch|reference")] = "auto",
    num_threads: Annotated[int | None, _side("--num-threads", "Of both.", "N")] = None,
    max_model_len: Annotated[int | None, _side("--max-model-len", "Of both; the longest context.", "N")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="Whose, where both are servers.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="SPLITTIME_API_KEY", help="Of servers.")] = None,
    margin_perplexity: Annotated[float | None, _margin("perplexity", "Candidate's over base's, at most.")] = None,
    margin_kl: Annotated[float | None, _margin("kl", "Mean KL in nats, at most.")] = None,
    margin_kl_p99: Annotated[float | None, _margin("kl-p99", "99th percentile of KL, at most.")] = None,
    margin_top1: Annotated[float | None, _margin("top1", "Share of equal likeliest tokens, at least.")] = None,
    margin_accuracy: Annotated[float | None, _margin("accuracy", "Share of questions lost, at most.")] = None,
    margin_needle: Annotated[float | None, _margin("needle", "Nats a token of the answer lost, at most.")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="The whole report; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The report as a page.")] = None,
) -> None:
    """Say whether a quantised (or otherwise changed) model is as good as its base: PASS, FAIL or INCONCLUSIVE."""
    from splittime.quality.gate import Gate
    from splittime.quality.margins import EXIT_CODES
    from splittime.quality.report import as_json

    tasks = _tasks(text, choices, answers, needle, _lengths(length), tokens, questions)
    shared = {"kernels": kernels, "num_threads": num_threads, "max_model_len": max_model_len}
    sides = (
        _runner(base, "base", base_quantization, base_kv_cache_dtype, base_dtype, shared),
        _runner(candidate, "candidate", candidate_quantization, candidate_kv_cache_dtype, candidate_dtype, shared),
    )
    chosen = {
        "perplexity": margin_perplexity,
        "kl": margin_kl,
        "kl_p99": margin_kl_p99,
        "top1": margin_top1,
        "accuracy": margin_accuracy,
        "needle": margin_needle,
    }
    with talk().status("loading the models"):
        models, encoder = _load((base, candidate), sides, tokenizer, api_key)
        asked = _margins(models[1], chosen)
    with _progress() as tell:
        report = Gate(models[0], models[1], encoder, asked, tell).run(tasks)
    if html is not None:
        from splittime.quality.html import write_html

        write_html(report, html)
    if json is not None:
        _write_json(as_json(report), json)
    if json != "-":
        show(report)
    raise typer.Exit(EXIT_CODES[report.verdict])


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


def _tasks(
    text: list[Path] | None,
    choices: list[Path] | None,
    answers: list[Path] | None,
    needle: bool,
    lengths: tuple[int, ...],
    tokens: int,
    questions: int | None,
) -> "Tasks":
    """Read before any model is: a file that cannot be read should not cost a load."""
    from splittime.quality import questions as asked
    from splittime.quality.documents import python_documents, read_documents
    from splittime.quality.gate import Tasks

    needs_text = needle or not (choices or answers)
    documents = read_documents(text) if text else python_documents(PYTHON_FILES) if needs_text else []
    return Tasks(
        documents=documents,
        lengths=lengths,
        text_tokens=tokens,
        choices={path.name: asked.read_choices(path, questions) for path in choices or ()},
        answers={path.name: asked.read_answers(path, questions or ANSWERS) for path in answers or ()},
        with_needle=needle,
    )


def _runner(
    model: str, side: str, quantization: str | None, kv_cache_dtype: str, dtype: str, shared: dict[str, Any]
) -> RunnerConfig | None:
    """None for a server, of which nothing can be set from here."""
    given = {"quantization": quantization, "kv-cache-dtype": kv_cache_dtype, "dtype": dtype}
    if _is_url(model):
        for name, value in given.items():
            if value not in (None, "auto"):
                flag = f"--{side}-{name}"
                hint = "start the server with it"
                raise ConfigError(f"{flag} cannot be set of the server {model}", param=flag, value=value, hint=hint)
        return None
    config = RunnerConfig(
        model_path=str(_located(model)),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        max_num_seqs=MAX_NUM_SEQS,
        **shared,
    )
    config.validate()
    return config


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _located(model: str) -> Path:
    """A folder of this name goes before a packaged model's."""
    if model in PACKAGED and not Path(model).exists():
        return model_source.locate(None).parent / model
    return model_source.locate(model)


def _load(
    names: Sequence[str], configs: Sequence[RunnerConfig | None], tokenizer: str | None, api_key: str | None
) -> "tuple[list[Model], Tokenizer]":
    """The models in order, and the tokenizer of the first that is here. Raises `ConfigError`."""
    from splittime.cli.quality_local import LocalModel, same_tokens

    labels = [_label(name, config) for name, config in zip(names, configs, strict=True)]
    local = {i: LocalModel.load(labels[i], config) for i, config in enumerate(configs) if config is not None}
    encoder = next((model.tokenizer for model in local.values()), None)
    if encoder is None:
        if tokenizer is None:
            raise ConfigError("two servers need --tokenizer, the model whose they use", param="tokenizer")
        encoder = model_source.load_tokenizer(_located(tokenizer))
    same_tokens([model.tokenizer for model in local.values()])
    sizes = [model.vocab_size for model in local.values()] or [encoder.vocab_size]
    return [local.get(i) or _server(name, encoder, sizes[0], api_key) for i, name in enumerate(names)], encoder


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


def _margins(candidate: "Model", chosen: dict[str, float | None]) -> "Margins":
    from splittime.quality.margins import standard

    claims = candidate.reads.claims if candidate.reads else ()
    return msgspec.structs.replace(standard(claims), **{name: x for name, x in chosen.items() if x is not None})


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is done, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk(), transient=True) as bars:
        known: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done)

        yield tell


def _write_json(data: bytes, target: str) -> None:
    if target == "-":
        sys.stdout.buffer.write(data)
        return
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {target}: {error}", param="json", value=target) from None


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
