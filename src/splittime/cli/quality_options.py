"""The flags of `splittime quality`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from splittime.cli.options import JsonFlag
from splittime.runner.config import QUANTIZATIONS, Kernels, KVCacheDtype

ANSWERS = 200

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
        int, typer.Option("--tokens", metavar="N", min=100, help="Of text, at each length, spread over documents.")
    ] = 50_000
    questions: Annotated[
        int | None,
        typer.Option("--questions", metavar="N", min=1, help=f"Of each file. Default: all choices, {ANSWERS} answers."),
    ] = None
    base_quantization: Annotated[str | None, _side("--base-quantization", "Rounded at loading.", _KINDS)] = None
    base_kv_cache_dtype: Annotated[str, _side("--base-kv-cache-dtype", "Its KV cache.", _KV)] = "auto"
    base_dtype: Annotated[str, _side("--base-dtype", "Of what is not rounded.", "auto|float32|bfloat16")] = "auto"
    candidate_quantization: Annotated[str | None, _side("--candidate-quantization", "Rounded at loading.", _KINDS)] = (
        None
    )
    candidate_kv_cache_dtype: Annotated[str, _side("--candidate-kv-cache-dtype", "Its KV cache.", _KV)] = "auto"
    candidate_dtype: Annotated[str, _side("--candidate-dtype", "Of what is not rounded.", "auto|float32|bfloat16")] = (
        "auto"
    )
    kernels: Annotated[Kernels, _side("--kernels", "Kernels of both models.", "|".join(get_args(Kernels)))] = "auto"
    num_threads: Annotated[int | None, _side("--num-threads", "CPU threads of both models.", "N")] = None
    max_model_len: Annotated[int | None, _side("--max-model-len", "Longest context of both models.", "N")] = None
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="Whose, where both are servers.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="SPLITTIME_API_KEY", help="Of servers.")] = None
    margin_perplexity: Annotated[float | None, _margin("perplexity", "Candidate's over base's, at most.")] = None
    margin_kl: Annotated[float | None, _margin("kl", "Mean KL in nats, at most.")] = None
    margin_kl_p99: Annotated[float | None, _margin("kl-p99", "99th percentile of KL, at most.")] = None
    margin_top1: Annotated[float | None, _margin("top1", "Share of equal likeliest tokens, at least.")] = None
    margin_accuracy: Annotated[float | None, _margin("accuracy", "Share of questions lost, at most.")] = None
    margin_needle: Annotated[float | None, _margin("needle", "Nats a token of the answer lost, at most.")] = None
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The report as a page.")] = None
    json: JsonFlag = False
