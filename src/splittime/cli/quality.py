"""`splittime quality BASE CANDIDATE`: is the candidate as good as the base, within margins that were stated before?

Exit codes, for a CI: 0 PASS, 1 FAIL, 2 no verdict (INCONCLUSIVE, or it could not be run as asked), 4 nobody answers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from splittime.cli.options import JsonFlag, argument, flag, switch, wide, with_options
from splittime.cli.progress import bars, count_words, loading
from splittime.core.files import check_writable, write_whole
from splittime.runner.config import QUANTIZATIONS, Kernels, KVCacheDtype
from splittime.wire.target import base_of, is_url

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
Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE or not done as asked,
4 nobody answers, 130 Ctrl-C.
"""

_SIDES, _MARGINS = "How each is run", "Margins"


_KINDS, _KV = "|".join(QUANTIZATIONS), "|".join(get_args(KVCacheDtype))
_DTYPES = "auto|float32|bfloat16"


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    base: str = argument("BASE", "A model: folder, file, packaged name, id, or URL.", ...)
    candidate: str = argument("CANDIDATE", "The cheaper form of it.", ...)
    text: list[Path] | None = flag("FILE", "Texts: .txt, .jsonl with text, or a folder. May be repeated.")
    choices: list[Path] | None = flag("FILE", "Multiple choice: CSV as MMLU's, or JSONL. May be repeated.")
    answers: list[Path] | None = flag("FILE", "JSONL with question and answer, as GSM8K's. May be repeated.")
    needle: bool = switch("--needle", "A fact hidden at depths of the longest context.")
    length: str = flag("LIST", "Contexts: short (256), long, or numbers of tokens.", "short,long")
    tokens: int = flag("N", "Tokens of text at each length, spread over documents.", 50_000, min=100)
    questions: int | None = flag("N", f"Most questions a file. Default: all choices, {ANSWERS} answers.", min=1)
    base_quantization: str | None = flag(_KINDS, "Rounded at loading.", rich_help_panel=_SIDES)
    base_kv_cache_dtype: str = flag(_KV, "Type of its KV cache.", "auto", rich_help_panel=_SIDES)
    base_dtype: str = flag(_DTYPES, "Type of what is not rounded.", "auto", rich_help_panel=_SIDES)
    candidate_quantization: str | None = flag(_KINDS, "Rounded at loading.", rich_help_panel=_SIDES)
    candidate_kv_cache_dtype: str = flag(_KV, "Type of its KV cache.", "auto", rich_help_panel=_SIDES)
    candidate_dtype: str = flag(_DTYPES, "Type of what is not rounded.", "auto", rich_help_panel=_SIDES)
    kernels: Kernels = flag("|".join(get_args(Kernels)), "Kernels of both models.", "auto", rich_help_panel=_SIDES)
    num_threads: int | None = flag("N", "CPU threads of both models.", rich_help_panel=_SIDES)
    max_model_len: int | None = flag("N", "Longest context of both models.", rich_help_panel=_SIDES)
    tokenizer: str | None = flag("MODEL", "Whose tokenizer, where both are servers.")
    api_key: str | None = flag(None, "Key for servers.", envvar="SPLITTIME_API_KEY")
    margin_perplexity: float | None = flag("X", "Candidate's over base's, at most.", rich_help_panel=_MARGINS)
    margin_kl: float | None = flag("X", "Mean KL in nats, at most.", rich_help_panel=_MARGINS)
    margin_kl_p99: float | None = flag("X", "99th percentile of KL, at most.", rich_help_panel=_MARGINS)
    margin_top1: float | None = flag("X", "Share of equal likeliest tokens, at least.", rich_help_panel=_MARGINS)
    margin_accuracy: float | None = flag("X", "Share of questions lost, at most.", rich_help_panel=_MARGINS)
    margin_needle: float | None = flag("X", "Nats a token of the answer lost, at most.", rich_help_panel=_MARGINS)
    html: Path | None = flag("FILE", "The report as a page.")
    json: JsonFlag = False


@with_options(QualityOptions, failed=NO_VERDICT)
def quality(given: QualityOptions) -> None:
    """Say whether a quantised (or otherwise changed) model is as good as its base: PASS, FAIL or INCONCLUSIVE."""
    from splittime.lab.quality.margins import EXIT_CODES
    from splittime.lab.quality.report import as_json, render_html
    from splittime.lab.quality.run import Prepared  # brings torch

    if given.html is not None:
        check_writable(given.html, "html")  # before minutes of measuring, not after
    with loading("loading the models", at_once=True):
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
            _model(getattr(given, side)),
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


def _model(named: str) -> str:
    return base_of(named) if is_url(named) else named


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
    from splittime.lab.quality.report import check_row

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
