"""What each scheme gives and costs: speed at batch 1, 8 and 32, memory, and quality with its errors, in one table.

    python -m benchmarks.scenarios.schemes                                    the packaged model, on Python files
    python -m benchmarks.scenarios.schemes --model FOLDER --group-size 32     another, on stories that it wrote itself
    python -m benchmarks.scenarios.schemes --model FOLDER --text FILE         another, on text for it
    python -m benchmarks.scenarios.schemes --model FOLDER --speed-only        random weights: no quality

Arms: the model as it is, int8 and int4 rounded on load, checkpoints made by `splittime quantize` (w8a8, w4a16, AWQ,
GPTQ with act-order), and the model as it is with an int8 cache.

Speed is the steady decode rate of the engine's whole step at so many streams: all arms are loaded at once and take
turns, medians of `--repeats` with quartiles. Memory is that of the packed weights, and of the cache for a token.
Quality is what `splittime quality` says against the model as it is: perplexity ratio, KL, same likeliest token, each
with its interval (95 %, bootstrap over documents), and the verdict. Documents of the calibration are not among those
that are scored.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks.report import file_result
from benchmarks.scenarios.quantize_quality import own_stories
from benchmarks.scenarios.streams import Streams
from splittime.assemble.model_source import locate
from splittime.core.errors import ConfigError
from splittime.lab.quality.documents import Document, python_documents, read_documents
from splittime.lab.quality.local import LocalModel
from splittime.lab.quality.margins import standard
from splittime.lab.quality.run import Gate, Tasks
from splittime.lab.quantize.calibration import Calibration
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.text.tokenizer import Tokenizer

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 16
CALIBRATION_WINDOWS, CALIBRATION_TOKENS = 64, 256
OWN_STORIES, OWN_TOKENS = 160, 255
BASE = "as it is"
FIGURES = ("perplexity", "kl", "top1")


@dataclass(frozen=True)
class Arm:
    """runner: settings of `RunnerConfig`. made: how `quantize` makes its checkpoint first."""

    name: str
    runner: dict[str, Any] = field(default_factory=dict)
    made: QuantizeSettings | None = None


def arms(group: int, speed_only: bool) -> list[Arm]:
    calibrated = [
        Arm("w8a8, SmoothQuant", made=QuantizeSettings(scheme="w8a8")),
        Arm(f"AWQ, groups of {group}", made=QuantizeSettings(scheme="awq", group_size=group)),
        Arm(
            f"GPTQ, act-order, groups of {group}",
            made=QuantizeSettings(scheme="gptq", group_size=group, act_order=True),
        ),
    ]
    return [
        Arm(BASE),
        Arm("int8 on load", {"quantization": "int8"}),
        Arm("int4 on load", {"quantization": "int4"}),
        Arm(f"w4a16, groups of {group}", made=QuantizeSettings(scheme="w4a16", group_size=group)),
        *([] if speed_only else calibrated),
        Arm("int8 cache", {"kv_cache_dtype": "int8"}),
    ]


# ---- checkpoints


def make(arm: Arm, model: Path, folder: Path, calibration: Calibration | None) -> Path:
    """Where the arm's checkpoint is."""
    if arm.made is None:
        return model
    place = folder / arm.name.replace(" ", "_")
    quantize(model, place, arm.made, calibration if arm.made.resolved().needs_text else None)
    return place


def make_all(
    chosen: list[Arm], model: Path, folder: Path, calibration: Calibration | None
) -> tuple[dict[str, tuple[Path, dict[str, Any]]], dict[str, Any]]:
    """Each arm's checkpoint and settings; and why the model's shape does not allow the others."""
    places, refused = {}, {}
    for arm in chosen:
        try:
            places[arm.name] = make(arm, model, folder, calibration), arm.runner
        except ConfigError as error:
            refused[arm.name] = str(error)
    return places, {"refused": refused}


def calibration_of(documents: list[Document], tokenizer: Tokenizer) -> Calibration:
    ids = [tokenizer.encode(document.text)[:CALIBRATION_TOKENS] for document in documents]
    windows = [each for each in ids if len(each) == CALIBRATION_TOKENS][:CALIBRATION_WINDOWS]
    return Calibration(torch.tensor(windows))


# ---- speed


def speeds(places: dict[str, tuple[Path, dict[str, Any]]], repeats: int, steps: int) -> dict[str, dict[str, Any]]:
    engines = {
        name: Streams(str(place), settings, max(BATCHES), PROMPT_TOKENS) for name, (place, settings) in places.items()
    }
    found: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in engines}
    for _ in range(repeats):
        for batch in BATCHES:
            for name, streams in engines.items():
                found[name][batch].append(streams.decode(batch, steps).tokens_per_s)
    return {
        name: {
            "tokens_per_s": {str(batch): spread(rates) for batch, rates in found[name].items()},
            "weights": streams.resolved.weights,
            "weights_bytes": streams.resolved.weights_bytes,
            "embedding_bytes": streams.resolved.embedding_bytes,
            "kv_bytes_per_token": streams.resolved.kv_bytes_per_block // streams.resolved.block_size,
        }
        for name, streams in engines.items()
    }


def spread(rates: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    return {"p25": low, "median": middle, "p75": high}


# ---- quality


def load(name: str, place: Path, settings: dict[str, Any]) -> LocalModel:
    config = RunnerConfig(model_path=str(place), max_num_seqs=8, packed_cache="off", **settings)
    return LocalModel(name, load_torch_runner(config), Tokenizer.load(place))


def qualities(
    places: dict[str, tuple[Path, dict[str, Any]]], documents: list[Document], tokens: int
) -> dict[str, dict[str, Any]]:
    base, found = load(BASE, *places[BASE]), {}
    for name, (place, settings) in places.items():
        if name == BASE:
            continue
        candidate = load(name, place, settings)
        gate = Gate(base, candidate, base.tokenizer, standard(candidate.reads.claims), lambda what, done, total: None)
        report = gate.run(Tasks(documents=documents, text_tokens=tokens))
        figures = {
            check.where: {one.rule: one.estimate for one in report.checks if one.where == check.where}
            for check in report.checks
        }
        found[name] = {
            "verdict": report.verdict,
            "reasons": report.reasons,
            "figures": msgspec.to_builtins(figures),
            "bytes_read": report.candidate.read,
        }
    return found


# ---- the table


def markdown(figures: dict[str, Any]) -> str:
    lines = [
        "| " + " | ".join(row) + " |"
        for row in (
            [
                "scheme",
                "weights, MB",
                "cache, B a token",
                *(f"tokens/s at {b}" for b in BATCHES),
                "perplexity ratio",
                "KL",
                "top-1",
                "gate",
            ],
            ["---"] * (7 + len(BATCHES)),
            *(_row(name, speed, figures.get("quality", {}).get(name)) for name, speed in figures["speed"].items()),
        )
    ]
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in figures["refused"].items())])


def _row(name: str, speed: dict[str, Any], quality: dict[str, Any] | None) -> list[str]:
    rates = (speed["tokens_per_s"][str(batch)] for batch in BATCHES)
    memory = [f"{speed['weights_bytes'] / 1e6:.1f}", str(speed["kv_bytes_per_token"])]
    cells = [name, *memory, *(f"{rate['median']:.0f} ({rate['p25']:.0f}-{rate['p75']:.0f})" for rate in rates)]
    if quality is None:
        return [*cells, *["-"] * (len(FIGURES) + 1)]
    longest = [found for found in quality["figures"].values() if set(FIGURES) <= set(found)][-1]
    shown = [longest[figure] for figure in FIGURES]
    return [*cells, *(f"{e['value']:.4f} ({e['low']:.4f}-{e['high']:.4f})" for e in shown), quality["verdict"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without it the packaged model")
    parser.add_argument("--text", type=Path, help="of the kind that the model knows; a third of it calibrates")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40_000, help="of text at each length")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = locate(options.model)
    figures = measure(model, options)
    settings = {**vars(options), "model": model.name, "text": options.text.name if options.text else None}
    file_result(f"schemes_{model.name}", figures, settings, options.json)
    if not options.json:
        print(markdown(figures))


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    documents, calibration = ([], None) if options.speed_only else _texts(model, options)
    chosen = arms(options.group_size, options.speed_only)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making checkpoints") as status:
        places, figures = make_all(chosen, model, Path(folder), calibration)
        if not options.speed_only:
            status.update("quality")
            figures["quality"] = qualities(places, documents, options.tokens)
        status.update("speed")
        return {**figures, "speed": speeds(places, options.repeats, options.steps)}


def _texts(model: Path, options: argparse.Namespace) -> tuple[list[Document], Calibration]:
    """What is scored, and what calibrates."""
    tokenizer = Tokenizer.load(model)
    if options.text is None and options.model is not None:
        calibration, scored = own_stories(model, OWN_TOKENS, OWN_STORIES)
        return [
            Document(f"story {n}", tokenizer.decode(ids[1:].tolist())) for n, ids in enumerate(scored)
        ], Calibration(calibration)
    documents = python_documents(300) if options.text is None else read_documents([options.text])
    third = len(documents) // 3
    return documents[third:], calibration_of(documents[:third], tokenizer)


if __name__ == "__main__":
    main()
