"""Beside transformers on the same card: `generate` with a static cache, compiled, and its continuous batching.

    python -m benchmarks.gpu.generate                                Llama-3.1-8B, 1, 64, 16 and 256 at once
    python -m benchmarks.gpu.generate --concurrent 1 64 --arms splittime generate --json

So many requests at once, each with a prompt of random tokens and an output of exact length, greedy; tokens/s are the
outputs' over the whole time, prompts and all. All sides are loaded at once and take turns; each first runs once
untimed, in which it compiles and captures. Random weights: the two sides have the same shape and number of parameters,
not the same values, so times can be compared and tokens cannot. Prompts have 512 tokens so that weights, caches and
activations of all sides fit into the card together at 256 requests. transformers' attention is torch's SDPA in both of
its arms: its flash kernels are downloaded, and nothing is downloaded here.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.gpu.card import Found, forget, parse, parser, place, telling
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.engine_driver import Arrival, crank_over, drive, load_runner
from splittime.scheduler.config import SchedulerConfig

ARMS = ("splittime", "generate", "continuous")
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
CACHE_SHARE = 0.4  # of what is free, for transformers' paged cache
TINY = {"shape": "tiny", "concurrent": [1, 2], "prompt": 6, "output": 4, "repeats": 1}
Run = Callable[[list[list[int]]], None]


class Ours:
    """The engine, its steps captured and planned ahead."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        most, length = max(options.concurrent), options.prompt + options.output
        self._scheduler = SchedulerConfig(
            max_num_seqs=most, max_num_batched_tokens=max(options.budget, most), enable_prefix_caching=False
        )
        settings: dict[str, Any] = {"kernels": "triton", "async_scheduling": True}
        if not torch.cuda.is_available():
            settings = {"kernels": "native"}
        self._runner, self._asked = load_runner(
            str(model),
            self._scheduler,
            load_format="dummy",
            packed_cache="off",
            max_model_len=length + 16,
            kv_cache_memory_bytes=_kv_bytes(SHAPES[options.shape], most * (length + 32)),
            **settings,
        )
        self._output = options.output
        self.num_parameters = self._runner.resolved.num_parameters

    def splittime(self, prompts: list[list[int]]) -> None:
        crank = crank_over(self._runner, self._scheduler, self._asked)
        run = drive(crank, [Arrival(0.0, prompt, self._output) for prompt in prompts])
        _require([len(outcome.token_ids) for outcome in run.outcomes], self._output)


class Theirs:
    """transformers' model of the same shape."""

    def __init__(self, options: argparse.Namespace) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        shape = dict(SHAPES[options.shape])
        config = transformers.AutoConfig.for_model(MODEL_TYPES[shape.pop("architectures")[0]], **shape)
        with torch.device(place()):
            self._model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self._output = options.output
        room = {"max_memory_percent": CACHE_SHARE}
        if not torch.cuda.is_available():  # where it would take a share of the machine's memory
            room = {"num_blocks": 8, "max_batch_tokens": 32, "page_size": 16}
        self._batching = transformers.ContinuousBatchingConfig(
            auto_switch_to_flash=False, allow_block_sharing=False, **room
        )
        self._settings = transformers.GenerationConfig(
            max_new_tokens=options.output,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def generate(self, prompts: list[list[int]]) -> None:
        """The static cache makes transformers compile the decode step on a card. Its memory is given back."""
        ids = torch.tensor(prompts, device=place())
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self._settings, cache_implementation="static"
        )
        _require([made.shape[1] - ids.shape[1]] * len(prompts), self._output)
        if hasattr(self._model, "_cache"):
            del self._model._cache

    def continuous(self, prompts: list[list[int]]) -> None:
        """Its manager stays, as a server's would."""
        found = self._model.generate_batch(
            prompts,
            generation_config=self._settings,
            continuous_batching_config=self._batching,
            persistent_manager=True,
        )
        _require([len(one.generated_tokens) for one in found.values()], self._output)
        if len(found) != len(prompts):
            raise RuntimeError(f"{len(found)} of {len(prompts)} requests were answered")

    def forget(self) -> None:
        """What was compiled and kept for so many requests."""
        self._model.destroy_cached_continuous_batching_manager()
        torch.compiler.reset()
        forget()


def _kv_bytes(shape: dict[str, Any], tokens: int) -> int:
    """In bfloat16."""
    return tokens * 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def _require(lengths: list[int], wanted: int) -> None:
    if set(lengths) != {wanted}:
        raise RuntimeError(f"outputs have {sorted(set(lengths))} tokens, {wanted} were asked for")


def prompts_of(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count)]


def wall_s(run: Run, prompts: list[list[int]]) -> float:
    _wait()
    begin_ns = time.perf_counter_ns()
    run(prompts)
    _wait()
    return (time.perf_counter_ns() - begin_ns) / 1e9


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(runs: dict[str, Run], count: int, options: argparse.Namespace, found: Found) -> None:
    """Each arm's seconds and tokens/s; an arm that fails is told, and the others go on."""
    vocabulary = SHAPES[options.shape]["vocab_size"]
    times: dict[str, list[float]] = {}
    for repeat in range(-1, options.repeats):
        prompts = prompts_of(count, options.prompt, vocabulary, repeat)
        for name, run in runs.items():
            if "error" in found.get(name, {}):
                continue
            try:
                seconds = wall_s(run, prompts)
            except Exception as error:  # of any kind: a peer's failure must not end the comparison
                print(f"{count} at once, {name}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            if repeat < 0:
                found[name] = {"first_s": seconds}
                continue
            times.setdefault(name, []).append(seconds)
            found[name] |= _figures(times[name], count * options.output)


def _figures(times: list[float], tokens: int) -> Found:
    return {"s": statistics.median(times), "tokens_per_s": tokens / statistics.median(times),
            "low": tokens / max(times), "high": tokens / min(times)}  # fmt: skip


def measure(model: Path, options: argparse.Namespace, found: Found) -> None:
    sides: list[Any] = []
    if "splittime" in options.arms:
        sides.append(Ours(model, options))
    theirs = Theirs(options) if set(options.arms) - {"splittime"} else None
    sides += [theirs] if theirs is not None else []
    found["num_parameters"] = {type(side).__name__: side.num_parameters for side in sides}
    runs = {name: getattr(side, name) for name in options.arms for side in sides if hasattr(side, name)}
    results = found["concurrent"] = {}
    for count in options.concurrent:
        compare(runs, count, options, results.setdefault(str(count), {}))
        if theirs is not None:
            theirs.forget()


def table_of(found: Found) -> Table:
    table = Table("at once", "arm", "tokens/s", "low to high", "ours over it", "first, s")
    for count, arms in found.get("concurrent", {}).items():
        ours = arms.get("splittime", {}).get("tokens_per_s")
        for name, one in arms.items():
            if "tokens_per_s" not in one:
                table.add_row(count, name, "-", "", "", str(one.get("error", "")))
                continue
            ratio = f"{ours / one['tokens_per_s']:.2f}" if ours else ""
            span = f"{one['low']:.0f} to {one['high']:.0f}"
            table.add_row(count, name, f"{one['tokens_per_s']:.0f}", span, ratio, f"{one['first_s']:.1f}")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--concurrent", type=int, nargs="+", default=[1, 64, 16, 256])
    made.add_argument("--prompt", type=int, default=512)
    made.add_argument("--output", type=int, default=128)
    made.add_argument("--budget", type=int, default=8192, help="tokens of a step, of ours")
    made.add_argument("--repeats", type=int, default=3)
    options = parse(made, argv, **TINY, budget=64)
    with telling(options, table_of) as found, tempfile.TemporaryDirectory() as folder:
        measure(write(options.shape, Path(folder)), options, found)


if __name__ == "__main__":
    main()
