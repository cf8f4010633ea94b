"""Falling asleep and waking on the card: what it gives back, where the time goes, and the rate of the weights' copies.

    python -m benchmarks.gpu.sleep                                     Llama-3.1-8B's shape, both levels
    python -m benchmarks.gpu.sleep --shape qwen3-0.6b --repeats 5 --json
    python -m benchmarks.gpu.sleep --model FOLDER                      a checkpoint: level 2 then reads its files

Random weights of the shape, which level 2 makes anew: only with --model does its time tell of reading. The share of the
bus is the weights' copy beside one large copy from and to pinned memory in the same run. The first sleep pins host
memory ("pin"), which torch keeps for the next one; it is told apart from the others, whose medians are shown. Tokens
after each waking are compared with those before: "equal" must be true.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.card import Found, parse, parser, telling
from benchmarks.gpu.offload import bus_bytes_per_s
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.engine_driver import crank_over, load_runner
from splittime.core.engine import LEVELS
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, InlineDriver
from splittime.runner.compose import sleeper_of
from splittime.scheduler.config import SchedulerConfig

GIB = 1 << 30
TINY = {"shape": "tiny", "repeats": 1, "prompt_tokens": 5, "output_tokens": 2, "max_model_len": 32}


def crank_of(model: Path, is_dummy: bool, options: argparse.Namespace) -> Crank:
    """Planned ahead, with its steps captured where there is a card."""
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs, max_model_len=options.max_model_len, enable_prefix_caching=False
    )
    settings: dict[str, Any] = {
        "kernels": "triton",
        "load_format": "dummy" if is_dummy else "auto",
        "quantization": options.quantization,
        "max_model_len": options.max_model_len,
        "async_scheduling": True,
    }
    if options.tiny:
        settings["kv_cache_memory_bytes"] = 1 << 20
    runner, asked = load_runner(str(model), scheduler, **settings)
    sleeper = sleeper_of(runner)
    if options.tiny and sleeper is not None:
        sleeper.parks = True  # without a card too, to try it
    return crank_over(runner, scheduler, asked, sleeper=sleeper)


def generated(crank: Crank, options: argparse.Namespace) -> tuple[list[int], float]:
    """Greedy tokens of one prompt, and the time to the first of them in ms."""
    sampling = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True, seed=0)
    prompt = tuple((7 * place) % 90 + 5 for place in range(options.prompt_tokens))
    begin_ns = time.monotonic_ns()
    request = Request(request_id="one", prompt_token_ids=prompt, sampling=sampling, submitted_ns=begin_ns)
    crank.submit(request, begin_ns)
    tokens: list[int] = []
    first_ns = begin_ns
    for output in InlineDriver(crank).outputs():
        for news in output.outputs:
            if news.token_ids and not tokens:
                first_ns = output.ready_ns
            tokens += news.token_ids
    return tokens, (first_ns - begin_ns) / 1e6


def one_night(crank: Crank, level: int, bus: dict[str, float], options: argparse.Namespace) -> Found:
    generated(crank, options)
    before, usual_ms = generated(crank, options)
    slept = InlineDriver(crank).sleep(level)
    woken = crank.wake()
    after, first_ms = generated(crank, options)
    found: Found = {
        "equal": before == after,
        "weights_bytes": slept.weights_bytes,
        "kv_bytes": slept.kv_bytes,
        "memory": slept.memory,
        "before_bytes": slept.memory_before_bytes,
        "asleep_bytes": slept.memory_after_bytes,
        "woken_bytes": woken.memory_after_bytes,
        "sleep_ms": (slept.end_ns - slept.begin_ns) / 1e6,
        "wake_ms": (woken.end_ns - woken.begin_ns) / 1e6,
        "sleep_parts_ms": {name: ns / 1e6 for name, ns in slept.parts_ns.items()},
        "wake_parts_ms": {name: ns / 1e6 for name, ns in woken.parts_ns.items()},
        "usual_ttft_ms": usual_ms,
        "first_ttft_ms": first_ms,
    }
    if "copy" in slept.parts_ns:
        out, back = (slept.weights_bytes / (ns / 1e9) for ns in (slept.parts_ns["copy"], woken.parts_ns["weights"]))
        found |= {"out_bytes_per_s": out, "in_bytes_per_s": back}
        found |= {"out_share_of_bus": out / bus["out"], "in_share_of_bus": back / bus["in"]}
    return found


def middle(nights: Sequence[Found]) -> Found:
    """Medians of what is a number; "equal" only if all are."""
    found: Found = {"equal": all(night["equal"] for night in nights)}
    for name, value in nights[0].items():
        if isinstance(value, dict):
            found[name] = {part: statistics.median(night[name][part] for night in nights) for part in value}
        elif name not in found:
            found[name] = value if isinstance(value, str) else statistics.median(night[name] for night in nights)
    return found


def measure(options: argparse.Namespace, found: Found) -> None:
    found["bus_bytes_per_s"] = bus = bus_bytes_per_s()
    with tempfile.TemporaryDirectory() as folder:
        is_dummy = options.model is None
        begin = time.monotonic()
        crank = crank_of(write(options.shape, Path(folder)) if is_dummy else options.model, is_dummy, options)
        found["start_ms"] = (time.monotonic() - begin) * 1e3
        for level in LEVELS:
            first = one_night(crank, level, bus, options)
            found.setdefault("levels", {})[str(level)] = {"first": first}
            others = [one_night(crank, level, bus, options) for _ in range(options.repeats)]
            found["levels"][str(level)]["others"] = middle(others)


def table_of(found: Found) -> Table:
    bus = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in found.get("bus_bytes_per_s", {}).items())
    shown = Table("level", "", "memory, GiB", "asleep", "sleep, ms", "wake, ms", "of the bus", title=f"pinned: {bus}")
    for level, nights in found.get("levels", {}).items():
        for which, one in nights.items():
            memory = [f"{one[name] / GIB:.2f}" for name in ("before_bytes", "asleep_bytes")]
            parts = [_told(one[f"{way}_ms"], one[f"{way}_parts_ms"]) for way in ("sleep", "wake")]
            shares = [f"{one[name]:.0%}" for name in ("out_share_of_bus", "in_share_of_bus") if name in one]
            same = which if one["equal"] else f"{which}, OTHER TOKENS"
            shown.add_row(level, same, *memory, *parts, " out, ".join(shares) + " in" if shares else "")
    return shown


def _told(total_ms: float, parts_ms: dict[str, float]) -> str:
    return f"{total_ms:.0f}: " + ", ".join(f"{name} {ms:.0f}" for name, ms in parts_ms.items() if ms >= 0.5)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    made.add_argument("--model", type=Path, help="a checkpoint's folder, in the place of random weights")
    made.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    made.add_argument("--max-num-seqs", type=int, default=64)
    made.add_argument("--max-model-len", type=int, default=16384)
    made.add_argument("--prompt-tokens", type=int, default=1024)
    made.add_argument("--output-tokens", type=int, default=8)
    made.add_argument("--repeats", type=int, default=3)
    options = parse(made, argv, **TINY)
    with telling(options, table_of) as found:
        measure(options, found)


if __name__ == "__main__":
    main()
