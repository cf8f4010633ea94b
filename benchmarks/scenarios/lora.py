"""What adapters cost: decode steps of one batch whose requests use none, one, or several, by turns.

    python -m benchmarks.scenarios.lora                                      the packaged model
    python -m benchmarks.scenarios.lora --model FOLDER --quantization int8   another, as `benchmarks.peers.make_models`
                                                                             makes one of a billion weights

The adapters are random, of all seven projections in every layer. Each arm decodes `--steps` steps in turn with the
others, `--repeats` times; cost is the arm's step time over that of the arm before it in the same round without
adapters, less 1: the median of the rounds, with quartiles.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import file_result
from benchmarks.scenarios.streams import Streams
from splittime.assemble.model_source import locate
from splittime.models.adapters import CONFIG_NAME, WEIGHTS_NAME, projections
from splittime.models.config import ModelConfig

PROMPT_TOKENS = 16
FREE = "no adapter"


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """A random adapter of this model, in PEFT's format."""
    folder.mkdir()
    source, tensors = torch.Generator().manual_seed(seed), {}
    for index in range(config.num_layers):
        for module, place in projections(config, index).items():
            name = f"base_model.model.model.layers.{index}.{module}.lora_"
            for half, shape in (("A", (rank, place.in_features)), ("B", (place.out_features, rank))):
                weight = torch.randn(shape, generator=source) * 0.01
                tensors[f"{name}{half}.weight"] = weight.bfloat16()
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))


def load_adapters(streams: Streams, count: int, rank: int) -> tuple[tuple[str, ...], int]:
    """Returns the ids of so many, and how many parameters each has."""
    adapters, names, parameters = streams.runner.slots.adapters, tuple(f"a#{i}" for i in range(count)), 0
    assert adapters is not None
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(names):
            write_adapter(Path(folder) / f"{seed}", streams.runner.decoder.config, rank, seed)
            parameters = adapters.load(name, str(Path(folder) / f"{seed}"))
    return names, parameters


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    settings = {"quantization": options.quantization, "enable_lora": True, "max_lora_rank": options.rank}
    streams = Streams(str(model), settings | {"load_format": options.load_format}, options.batch, PROMPT_TOKENS)
    names, parameters = load_adapters(streams, options.adapters, options.rank)
    arms = {FREE: ("",), "1 adapter": names[:1], f"{options.adapters} adapters": names}
    step_ms: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(options.repeats):
        for arm, mine in arms.items():
            streams.adapters = mine
            step_ms[arm].append(streams.decode(options.batch, options.steps).wall_s / options.steps * 1e3)
    costs = {
        arm: [one / free - 1 for one, free in zip(taken, step_ms[FREE], strict=True)] for arm, taken in step_ms.items()
    }
    return {
        "step_ms": {arm: quartiles(taken) for arm, taken in step_ms.items()},
        "cost": {arm: quartiles(taken) for arm, taken in costs.items() if arm != FREE},
        "adapter_parameters": parameters,
        "weights": streams.resolved.weights,
        "weights_bytes": streams.resolved.weights_bytes,
        "products": streams.resolved.products,
    }


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"p25": low, "median": middle, "p75": high}


def shown(figures: dict[str, Any]) -> str:
    lines = ["| batch | ms a step | cost |", "|---|---|---|"]
    for arm, taken in figures["step_ms"].items():
        cost = figures["cost"].get(arm)
        words = "" if cost is None else f"{cost['median']:.1%} ({cost['p25']:.1%} to {cost['p75']:.1%})"
        lines.append(f"| {arm} | {taken['median']:.2f} ({taken['p25']:.2f}-{taken['p75']:.2f}) | {words} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without it the packaged model")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--adapters", type=int, default=8, choices=range(1, 9))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = locate(options.model)
    figures = measure(model, options)
    file_result(f"lora_{model.name}", figures, {**vars(options), "model": model.name}, options.json)
    if not options.json:
        print(shown(figures))


if __name__ == "__main__":
    main()
