"""`splittime quality BASE CANDIDATE`: is the candidate as good as the base, within margins that were stated before?

Exit codes, for a CI: 0 PASS, 1 FAIL, 2 no verdict (INCONCLUSIVE, or it could not be run as asked).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from splittime.cli.options import JsonFlag, wide, with_options
from splittime.cli.progress import bars, count_words, doing
from splittime.core.whole_file import check_writable, write_whole
from splittime.runner.config import QUANTIZATIONS, Kernels, KVCacheDtype

if TYPE_CHECKING:
    from splittime.lab.quality.report import Report
    from splittime.lab.quality.run import QualityComparison

NO_VERDICT = 2
ANSWERS = 200

EXAMPLES = """\b
Examples:
  splittime quality code code --candidate-quantization int4
  splittime quality A A --text books/ --candidate-kv-cache-dtype int8 --needle
  splittime quality A A-awq --choices mmlu.csv --answers gsm8k.jsonl --json
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

_SIDES, _MARGINS = "How each is run", "Margins"


def _side(flag: str, words: str, metavar: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=words, rich_help_panel=_SIDES)


def _margin(name: str, words: str) -> Any:
    return typer.Option(f"--margin-{name}", metavar="X", help=words, rich_help_panel=_MARGINS)


_KINDS, _KV = "|".join(QUANTIZATIONS), "|".join(get_args(KVCacheDtype))


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model: folder, file, packaged name, id, or URL.")]
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The cheaper form of it.")]
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Texts: .txt, .jsonl with text, or a folder. May be repeated."),
    ] = None
    choices: Annotated[
        list[Path] | None,
        typer.Option("--choices", metavar="FILE", help="Multiple choice: CSV as MMLU's, or JSONL. May be repeated."),
    ] = None
    answers: Annotated[
        list[Path] | None,
        typer.Option("--answers", metavar="FILE", help="JSONL with question and answer, as GSM8K's. May be repeated."),
    ] = None
    needle: Annotated[bool, typer.Option("--needle", help="A fact hidden at depths of the longest context.")] = False
    length: Annotated[
        str, typer.Option("--length", metavar="LIST", help="Contexts: short (256), long, or numbers of tokens.")
    ] = "short,long"
    tokens: Annotated[
        int,
        typer.Option("--tokens", metavar="N", min=100, help="Tokens of text at each length, spread over documents."),
    ] = 50_000
    questions: Annotated[
        int | None,
        typer.Option(
            "--questions", metavar="N", min=1, help=f"Most questions a file. Default: all choices, {ANSWERS} answers."
        ),
    ] = None
    base_quantization: Annotated[str | None, _side("--base-quantization", "Rounded at loading.", _KINDS)] = None
    base_kv_cache_dtype: Annotated[str, _side("--base-kv-cache-dtype", "Type of its KV cache.", _KV)] = "auto"
    base_dtype: Annotated[str, _side("--base-dtype", "Type of what is not rounded.", "auto|float32|bfloat16")] = "auto"
    candidate_quantization: Annotated[str | None, _side("--candidate-quantization", "Rounded at loading.", _KINDS)] = (
        None
    )
    candidate_kv_cache_dtype: Annotated[str, _side("--candidate-kv-cache-dtype", "Type of its KV cache.", _KV)] = "auto"
    candidate_dtype: Annotated[
        str, _side("--candidate-dtype", "Type of what is not rounded.", "auto|float32|bfloat16")
    ] = "auto"
    kernels: Annotated[Kernels, _side("--kernels", "Kernels of both models.", "|".join(get_args(Kernels)))] = "auto"
    num_threads: Annotated[int | None, _side("--num-threads", "CPU threads of both models.", "N")] = None
    max_model_len: Annotated[int | None, _side("--max-model-len", "Longest context of both models.", "N")] = None
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="Whose tokenizer, where both are servers.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="SPLITTIME_API_KEY", help="Key for servers.")] = (
        None
    )
    margin_perplexity: Annotated[float | None, _margin("perplexity", "Candidate's over base's, at most.")] = None
    margin_kl: Annotated[float | None, _margin("kl", "Mean KL in nats, at most.")] = None
    margin_kl_p99: Annotated[float | None, _margin("kl-p99", "99th percentile of KL, at most.")] = None
    margin_top1: Annotated[float | None, _margin("top1", "Share of equal likeliest tokens, at least.")] = None
    margin_accuracy: Annotated[float | None, _margin("accuracy", "Share of questions lost, at most.")] = None
    margin_needle: Annotated[float | None, _margin("needle", "Nats a token of the answer lost, at most.")] = None
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The report as a page.")] = None
    json: JsonFlag = False


@with_options(QualityOptions, failed=NO_VERDICT)
def quality(given: QualityOptions) -> None:
    """Say whether a quantised (or otherwise changed) model is as good as its base: PASS, FAIL or INCONCLUSIVE."""
    from splittime.lab.quality.html import render_html
    from splittime.lab.quality.margins import EXIT_CODES
    from splittime.lab.quality.report import as_json
    from splittime.lab.quality.run import Prepared  # brings torch

    if given.html is not None:
        check_writable(given.html, "html")  # before minutes of measuring, not after
    with doing("loading the models"):
        prepared = Prepared(_comparison(given))
    with _progress() as tell:
        report = prepared.measure(tell)
    if given.html is not None:
        write_whole(given.html, render_html(report).encode(), param="html", keeps=True)
    if given.json:
        sys.stdout.buffer.write(as_json(report))
    else:
        show(report)
    raise typer.Exit(EXIT_CODES[report.verdict])


def _comparison(given: QualityOptions) -> "QualityComparison":
    from splittime.lab.quality.margins import Margins
    from splittime.lab.quality.run import Competitor, QualityComparison, Questions

    margins = {name: getattr(given, f"margin_{name}") for name in Margins.__struct_fields__}
    base, candidate = (
        Competitor(
            getattr(given, side),
            {name: getattr(given, f"{side}_{name}") for name in ("quantization", "kv_cache_dtype", "dtype")},
        )
        for side in ("base", "candidate")
    )
    return QualityComparison(
        base,
        candidate,
        Questions(
            texts=given.text or (),
            length=given.length,
            tokens=given.tokens,
            choices=given.choices or (),
            answers=given.answers or (),
            most=given.questions,
            with_needle=given.needle,
        ),
        shared={name: getattr(given, name) for name in ("kernels", "num_threads", "max_model_len")},
        margins={name: limit for name, limit in margins.items() if limit is not None},
        tokenizer=given.tokenizer,
        api_key=given.api_key,
    )


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
    from splittime.lab.quality.html import check_row

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
