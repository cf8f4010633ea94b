"""What each scheme gives and costs: speed at batch 1, 8 and 32, memory, and quality with its errors, in one table.

    python -m benchmarks.scenarios.schemes                                              the packaged model
    python -m benchmarks.scenarios.schemes --model FOLDER --text FILE --group-size 32   another, with text for it
    python -m benchmarks.scenarios.schemes --model FOLDER --speed-only                  random weights: no quality

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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import build_engine
from splittime.cli.model_source import locate
from splittime.cli.quality_local import LocalModel
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.engine.engine import Engine
from splittime.engine.tokenizer import Tokenizer
from splittime.quality.documents import Document, python_documents, read_documents
from splittime.quality.gate import Gate, Tasks
from splittime.quality.margins import standard
from splittime.quantize.calibration import Calibration
from splittime.quantize.job import quantize
from splittime.quantize.settings import Settings
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 16
CALIBRATION_WINDOWS, CALIBRATION_TOKENS = 64, 256
KV_BYTES = 256 << 20
BASE = "as it is"
FIGURES = ("perplexity", "kl", "top1")


@dataclass(frozen=True)
class Arm:
    """runner: settings of `RunnerConfig`. made: how `quantize` makes its checkpoint first."""

    name: str
    runner: dict[str, Any] = field(default_factory=dict)
    made: Settings | None = None


def arms(group: int, speed_only: bool) -> list[Arm]:
    calibrated = [
        Arm("w8a8, SmoothQuant", made=Settings(scheme="w8a8")),
        Arm(f"AWQ, groups of {group}", made=Settings(scheme="awq", group_size=group)),
        Arm(f"GPTQ, act-order, groups of {group}", made=Settings(scheme="gptq", group_size=group, act_order=True)),
    ]
    return [
        Arm(BASE),
        Arm("int8 on load", {"quantization": "int8"}),
        Arm("int4 on load", {"quantization": "int4"}),
        Arm(f"w4a16, groups of {group}", made=Settings(scheme="w4a16", group_size=group)),
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


def calibration_of(documents: list[Document], tokenizer: Tokenizer) -> Calibration:
    ids = [tokenizer.encode(document.text)[:CALIBRATION_TOKENS] for document in documents]
    windows = [each for each in ids if len(each) == CALIBRATION_TOKENS][:CALIBRATION_WINDOWS]
    return Calibration(torch.tensor(windows))


# ---- speed


class Streams:
    """Decoding of so many streams, over an engine."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        scheduler = SchedulerConfig(enable_prefix_caching=False, max_num_seqs=max(BATCHES), max_num_batched_tokens=512)
        self.engine: Engine = build_engine(str(model), scheduler, kv_cache_memory_bytes=KV_BYTES, **settings)
        self.resolved = self.engine._runner.resolved
        self._count = 0

    def tokens_per_s(self, streams: int, steps: int) -> float:
        """Of `steps` steps in which all of them decode."""
        names = [self._submit(steps) for _ in range(streams)]
        begun: set[str] = set()
        while len(begun) < streams:
            output = self.engine.step()
            begun |= {news.request_id for news in output.outputs if news.token_ids} if output else set()
        begin_ns = time.monotonic_ns()
        for _ in range(steps):
            self.engine.step()
        taken_ns = time.monotonic_ns() - begin_ns
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()
        return streams * steps / (taken_ns / 1e9)

    def _submit(self, new_tokens: int) -> str:
        self._count += 1
        sampling = SamplingParams(max_tokens=new_tokens + max(BATCHES), temperature=0.0, ignore_eos=True, seed=0)
        prompt = tuple((7 * self._count + i) % 90 + 5 for i in range(PROMPT_TOKENS))
        now_ns = time.monotonic_ns()
        name = f"stream-{self._count}"
        request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=now_ns)
        self.engine.submit(request, now_ns)
        return name


def speeds(places: dict[str, tuple[Path, dict[str, Any]]], repeats: int, steps: int) -> dict[str, dict[str, Any]]:
    engines = {name: Streams(place, settings) for name, (place, settings) in places.items()}
    found: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in engines}
    for _ in range(repeats):
        for batch in BATCHES:
            for name, streams in engines.items():
                found[name][batch].append(streams.tokens_per_s(batch, steps))
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
    return LocalModel(name, TorchRunner.load(config), Tokenizer.load(place))


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
                *(f"tokens/s at {b}" for b in BATCHES),
                "perplexity ratio",
                "KL",
                "top-1",
                "gate",
            ],
            ["---"] * (6 + len(BATCHES)),
            *(_row(name, speed, figures.get("quality", {}).get(name)) for name, speed in figures["speed"].items()),
        )
    ]
    return "\n".join(lines)


def _row(name: str, speed: dict[str, Any], quality: dict[str, Any] | None) -> list[str]:
    rates = (speed["tokens_per_s"][str(batch)] for batch in BATCHES)
    cells = [f"{rate['median']:.0f} ({rate['p25']:.0f}-{rate['p75']:.0f})" for rate in rates]
    cells = [name, f"{speed['weights_bytes'] / 1e6:.1f}", *cells]
    if quality is None:
        return [*cells, *["-"] * 4]
    longest = list(quality["figures"].values())[-1]
    shown = [longest[figure] for figure in FIGURES]
    return [*cells, *(f"{e['value']:.4f} ({e['low']:.4f}-{e['high']:.4f})" for e in shown), quality["verdict"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without it the packaged one")
    parser.add_argument("--text", type=Path, help="of the kind that the model knows; a third of it calibrates")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=12_500, help="of text at each length")
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
    documents = [] if options.speed_only else _documents(options.text)
    third = len(documents) // 3
    calibration = None if options.speed_only else calibration_of(documents[:third], Tokenizer.load(model))
    chosen = arms(options.group_size, options.speed_only)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("making checkpoints") as status:
        places = {arm.name: (make(arm, model, Path(folder), calibration), arm.runner) for arm in chosen}
        figures: dict[str, Any] = {}
        if not options.speed_only:
            status.update("quality")
            figures["quality"] = qualities(places, documents[third:], options.tokens)
        status.update("speed")
        return {"speed": speeds(places, options.repeats, options.steps), **figures}


def _documents(text: Path | None) -> list[Document]:
    return python_documents(300) if text is None else read_documents([text])


if __name__ == "__main__":
    main()
