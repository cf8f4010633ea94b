"""Does the card compute what the CPU does? Greedy tokens in float32, and KL a token in bfloat16, of small models.

    python -m benchmarks.gpu.parity                              the packaged model
    python -m benchmarks.gpu.parity --models FOLDER --json       and each checkpoint in a folder of them

tokens   requests of several lengths at once, in float32, on the CPU's kernels and on the card's: planned ahead over
         captured steps, and one by one. All must be the same. Where one is not, the CPU's own difference between the
         two tokens says whether they were as good as equal (`margin`, nats).
KL       what bfloat16 on the card predicts against float32 on the CPU, over text that the model wrote itself (sampled,
         so that likely and unlikely tokens come): in chunks, and for the last tokens of each text one a step.

With --tiny the other side is Triton's interpreter.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

import splittime
from benchmarks.gpu.card import Found, forget, parse, parser, telling
from benchmarks.scenarios.engine_driver import Arrival, crank_over, drive
from splittime.assemble.model_source import load_tokenizer
from splittime.kernels.native.library import LibraryMissing, library
from splittime.lab.quality.local import LocalModel
from splittime.lab.quality.texts import compare, joined
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig

PACKAGED = Path(splittime.__file__).parent / "packaged" / "code"
MAX_KL = 1e-3
CHUNK_TOKENS = 48  # of a step, so that prompts are cut and mixed with decodes
ARMS = ("ahead, captured", "one by one")


@dataclass(frozen=True)
class Load:
    """prompts: their lengths. outputs: tokens of each. texts, text_tokens: that KL is taken over; decoded: of each
    text, one a step."""

    prompts: tuple[int, ...] = (1, 5, 17, 40, 63, 90, 120, 128)
    outputs: int = 64
    texts: int = 16
    text_tokens: int = 200
    decoded: int = 32

    @property
    def max_model_len(self) -> int:
        return max(max(self.prompts) + self.outputs, self.text_tokens) + 8


FULL = Load()
TINY = Load(prompts=(3, 9), outputs=2, texts=1, text_tokens=10, decoded=2)


@dataclass
class Side:
    """A runner, and engines over it."""

    runner: TorchRunner
    asked: RunnerConfig

    @staticmethod
    def of(model: Path, load: Load, kernels: str, dtype: str) -> "Side":
        asked = RunnerConfig(
            model_path=str(model),
            kernels=kernels,
            dtype=dtype,
            packed_cache="off",
            max_num_seqs=16,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_model_len=load.max_model_len,
            kv_cache_memory_bytes=256 << 20,
            async_scheduling=kernels == "triton",
        )
        return Side(load_torch_runner(asked), asked)

    def run(self, arrivals: list[Arrival]) -> list[list[int]]:
        scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=CHUNK_TOKENS, enable_prefix_caching=False)
        return [one.token_ids for one in drive(crank_over(self.runner, scheduler, self.asked), arrivals).outcomes]

    def predicting(self) -> LocalModel:
        return LocalModel(self.runner.resolved.dtype, self.runner, load_tokenizer(Path(self.asked.model_path)))


def texts(cpu: Side, load: Load) -> list[list[int]]:
    """That the model wrote itself, each from another token."""
    wanted = load.text_tokens - 1
    arrivals = [Arrival(0.0, [3 + 5 * seed], wanted, temperature=1.0, seed=seed) for seed in range(load.texts)]
    return [arrival.prompt + tokens for arrival, tokens in zip(arrivals, cpu.run(arrivals), strict=True)]


def tokens(cpu: Side, card: Side, written: list[list[int]], load: Load) -> Found:
    """Greedy, after beginnings of what was written."""
    prompts = [(written[number % len(written)] * 2)[:length] for number, length in enumerate(load.prompts)]
    arrivals = [Arrival(0.0, prompt, load.outputs) for prompt in prompts]
    want = cpu.run(arrivals)
    found: Found = {"requests": len(prompts), "tokens": sum(map(len, want)), "arms": {}}
    runner: Any = card.runner
    for arm in ARMS:
        if arm == "one by one":
            card.asked, runner.execution.graphs = settings_eager(card.asked), None
        got = card.run(arrivals)
        differing = [_difference(cpu, *each) for each in zip(prompts, want, got, strict=True) if each[1] != each[2]]
        found["arms"][arm] = {"equal": not differing, "differences": differing}
    return found


def settings_eager(asked: RunnerConfig) -> RunnerConfig:
    return RunnerConfig(
        **{name: getattr(asked, name) for name in asked.__struct_fields__} | {"async_scheduling": False}
    )


def _difference(cpu: Side, prompt: list[int], want: list[int], got: list[int]) -> Found:
    """The first, and what the CPU thinks of both tokens there."""
    place = next((i for i, (one, other) in enumerate(zip(want, got, strict=False)) if one != other), len(got))
    if place >= min(len(want), len(got)):
        return {"prompt_tokens": len(prompt), "place": place, "lengths": [len(want), len(got)]}
    ids = [*prompt, *want[:place], want[place]]
    *_, last = cpu.predicting().predictions(ids, len(ids) - 2, 0)
    margin = last.logprobs[-1][want[place]] - last.logprobs[-1][got[place]]
    return {"prompt_tokens": len(prompt), "place": place, "margin": float(margin)}


def divergence(cpu: Side, card: Side, written: list[list[int]], load: Load) -> Found:
    """Mean and largest KL of a token: of all, of those in chunks, and of those decoded."""
    base, candidate = cpu.predicting(), card.predicting()
    parts = [
        compare(ids, base.predictions(ids, 0, load.decoded), candidate.predictions(ids, 0, load.decoded))
        for ids in written
    ]
    whole = joined(parts)
    late = np.concatenate([one.positions >= len(ids) - load.decoded for one, ids in zip(parts, written, strict=True)])
    found: Found = {"agrees": float(whole.agrees.mean()), "dtype": card.runner.resolved.dtype}
    for name, where in (("all", late | ~late), ("chunks", ~late), ("decoded", late)):
        kl = whole.kl[where]
        found[name] = {"tokens": len(kl), "kl": float(kl.mean()), "largest": float(kl.max())}
    return found


def of_model(model: Path, load: Load) -> Found:
    cpu = Side.of(model, load, cpu_kernels(), "float32")
    written = texts(cpu, load)
    card = Side.of(model, load, "triton", "float32")
    prepare(card)
    found = {"float32": tokens(cpu, card, written, load)}
    del card
    forget()
    half = Side.of(model, load, "triton", "bfloat16")
    prepare(half)
    return found | {"bfloat16": divergence(cpu, half, written, load)}


def cpu_kernels() -> str:
    """The native library's where it was built."""
    try:
        library()
    except LibraryMissing:
        return "torch"
    return "native"


def prepare(card: Side) -> None:
    """Captures, which without a card is asked for here."""
    if torch.cuda.is_available():
        card.runner.warm_up()
    else:
        runner: Any = card.runner
        runner.capture((1, 2))


def passed(found: Found) -> bool:
    """All of one model."""
    is_equal = all(arm["equal"] for arm in found["float32"]["arms"].values())
    return is_equal and found["bfloat16"]["all"]["kl"] < MAX_KL


def table_of(found: Found) -> Table:
    table = Table("model", "float32, greedy tokens", "bfloat16, KL a token", "in chunks", "decoded", "same likeliest")
    for name, one in found.get("models", {}).items():
        told = ", ".join(
            f"{arm}: {'equal' if by['equal'] else by['differences']}" for arm, by in one["float32"]["arms"].items()
        )
        half = one["bfloat16"]
        kls = (f"{half[part]['kl']:.2e} of {half[part]['tokens']}" for part in ("all", "chunks", "decoded"))
        table.add_row(name, f"{one['float32']['tokens']}; {told}", *kls, f"{half['agrees']:.1%}")
    return table


def checkpoints(options: argparse.Namespace) -> list[Path]:
    found = [PACKAGED]
    if options.models is not None:
        found += sorted(path.parent for path in options.models.glob("*/model.safetensors"))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=Path, help="a folder of checkpoints, each with its tokenizer.json")
    options = parse(made, argv)
    with telling(options, table_of) as found:
        models = found["models"] = {}
        for path in checkpoints(options):
            models[path.name] = of_model(path, TINY if options.tiny else FULL)
    if not all(map(passed, models.values())):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
