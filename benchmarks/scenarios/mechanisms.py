"""What each mechanism is worth on this machine: the same requests with it and without it, on one engine, interleaved.

    python -m benchmarks.scenarios.mechanisms --model MODEL_FOLDER [--repeats 5] [--json]

* batching: static against continuous at mixed output lengths: tokens/s, p99 of E2E.
* chunking: off against on while long prompts arrive among decoding requests: max stall of those requests.
* prefix cache: off against on with 0 %, 50 % and 90 % of each prompt shared: TTFT, tokens/s.

Ratios of medians over the repeats, arms alternating within each repeat; the spread is (max - min) / median.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import splittime
from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import Arrival, Engine, Run, build_engine, drive
from splittime.scheduler.config import SchedulerConfig

VOCABULARY = range(10, 4000)
Metrics = dict[str, float]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(length)]


def mixed_outputs(rng: random.Random) -> list[Arrival]:
    """96 requests at once; output lengths 8 to 256, geometric-like: the many short ones wait for the few long ones."""
    lengths = [min(256, 8 + int(rng.expovariate(1 / 50))) for _ in range(96)]
    return [Arrival(0.0, random_prompt(rng, 32), length) for length in lengths]


def long_prompts_among_decodes(rng: random.Random) -> list[Arrival]:
    """8 chats decode 300 tokens; every 0.5 s a prompt of 1,500 tokens with 4 tokens of output arrives."""
    chats = [Arrival(0.0, random_prompt(rng, 16), 300) for _ in range(8)]
    return chats + [Arrival(0.3 + 0.5 * i, random_prompt(rng, 1500), 4) for i in range(5)]


def shared_prefixes(rng: random.Random, share: float, length: int = 800) -> list[Arrival]:
    """A first request that leaves its prefix behind, then 24 that share `share` of it, 0.1 s apart."""
    prefix = random_prompt(rng, int(length * share))
    prompts = [prefix + random_prompt(rng, length - len(prefix)) for _ in range(25)]
    return [Arrival(0.0 if i == 0 else 1.0 + 0.1 * i, prompt, 8) for i, prompt in enumerate(prompts)]


def throughput(run: Run) -> Metrics:
    e2e = [outcome.e2e_ms for outcome in run.outcomes]
    return {"tokens_per_s": run.output_tokens_per_s, "e2e_p99_ms": float(numpy.percentile(e2e, 99, method="higher"))}


def stalls(run: Run) -> Metrics:
    chats = [outcome for outcome in run.outcomes if len(outcome.token_ready_ns) > 100]
    prompts = [outcome for outcome in run.outcomes if len(outcome.token_ready_ns) <= 100]
    return {
        "max_stall_ms": max(outcome.max_gap_ms for outcome in chats),
        "long_prompt_ttft_ms": statistics.median(outcome.ttft_ms for outcome in prompts),
    }


def prefix_gain(run: Run) -> Metrics:
    later = run.outcomes[1:]
    return {
        "ttft_p50_ms": statistics.median(outcome.ttft_ms for outcome in later),
        "ttft_max_ms": max(outcome.ttft_ms for outcome in later),
        "hit_share": sum(outcome.num_cached_tokens for outcome in later) / (len(later) * 800),
        "prefill_tokens": float(sum(step.prefill_tokens for step in run.steps)),
    }


def compare(
    engine: Engine,
    arms: dict[str, dict[str, Any]],
    make: Callable[[random.Random], list[Arrival]],
    measure: Callable[[Run], Metrics],
    repeats: int,
) -> dict[str, Any]:
    """Medians and spreads by arm, and second arm over first."""
    samples: dict[str, list[Metrics]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name, knobs in arms.items():
            engine.configure(knobs)
            samples[name].append(measure(drive(engine, make(random.Random(repeat)))))
    summary = {
        name: {metric: _summary([m[metric] for m in runs]) for metric in runs[0]} for name, runs in samples.items()
    }
    first, second = summary.values()
    ratios = {k: second[k]["median"] / first[k]["median"] if first[k]["median"] else None for k in first}
    return {**summary, "ratio": ratios}


def _summary(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {"median": median, "spread": (max(values) - min(values)) / median if median else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(splittime.__file__).parent / "packaged" / "code"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128)
    engine = build_engine(arguments.model, scheduler, max_model_len=2048)
    plain = {"batching": "continuous", "enable_chunked_prefill": True, "enable_prefix_caching": False}
    figures = {
        "batching": compare(
            engine,
            {"static": plain | {"batching": "static"}, "continuous": plain},
            mixed_outputs,
            throughput,
            arguments.repeats,
        ),
        "chunking": compare(
            engine,
            {"off": plain | {"enable_chunked_prefill": False}, "on": plain},
            long_prompts_among_decodes,
            stalls,
            arguments.repeats,
        ),
    }
    for share in (0.0, 0.5, 0.9):
        figures[f"prefix_cache_{share:.0%}"] = compare(
            engine,
            {"off": plain, "on": plain | {"enable_prefix_caching": True}},
            lambda rng, share=share: shared_prefixes(rng, share),  # type: ignore[misc]
            prefix_gain,
            arguments.repeats,
        )
    path = file_result("mechanisms", figures, vars(arguments), arguments.json)
    if not arguments.json:
        show(figures)
        print(f"written to {path}")


def show(figures: dict[str, Any]) -> None:
    for name, result in figures.items():
        (first, a), (second, b), (_, ratios) = result.items()
        for metric in a:
            ratio = ratios[metric]
            print(
                f"{name:18} {metric:20} {first} {a[metric]['median']:9.1f} (±{a[metric]['spread']:.0%})  "
                f"{second} {b[metric]['median']:9.1f} (±{b[metric]['spread']:.0%})  "
                f"ratio {'-' if ratio is None else f'{ratio:.2f}'}"
            )


if __name__ == "__main__":
    main()
