"""What each mechanism is worth on this machine: the same requests with it and without it, on one engine, interleaved.

    python -m benchmarks.scenarios.mechanisms --model MODEL_FOLDER [--repeats 5] [--json]
    python -m benchmarks.scenarios.mechanisms --model MODEL_FOLDER --what batching --slots 32 --variation 1.2

* batching: static against continuous at mixed output lengths: tokens/s, p99 of E2E. --variation: how mixed they are.
* chunking: off against on while long prompts arrive among decoding requests: max stall of those requests.
* prefix cache: off against on with 0 %, 50 % and 90 % of each prompt shared: TTFT, tokens/s.
* reservation: the longest context reserved for each request in one piece, against blocks as they are needed, in the
  same memory: the share of the memory that holds tokens, tokens/s. Reserving is what so many slots of that length are.

Ratios of medians over the repeats, arms alternating within each repeat; the spread is (max - min) / median. Each figure
has its cause beside it, from the accounts (what requests waited for) and the step records (how many, how full).
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

import splittime
from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import Arrival, Crank, Run, crank_over, drive, load_runner
from benchmarks.scenarios.workloads import (
    CPU,
    TINY,
    Sizes,
    long_prompts_among_decodes,
    mixed_outputs,
    shared_prefixes,
    unknown_lengths,
)
from splittime.ledger.stages import Cause, Stage
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig

Metrics = dict[str, float]
Arms = dict[str, dict[str, Any]]
PLAIN = {"batching": "continuous", "enable_chunked_prefill": True, "enable_prefix_caching": False}
WHAT = ("batching", "chunking", "prefix_cache", "reservation")
SHARES = (0.0, 0.5, 0.9)


# ---- what is measured of a run


def throughput(run: Run) -> Metrics:
    e2e = [outcome.e2e_ns / 1e6 for outcome in run.outcomes]
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "e2e_p99_ms": float(numpy.percentile(e2e, 99, method="higher")),
        "queued_s": run.mean_s(Stage.QUEUE),
        "rows_a_step": statistics.mean(len(step.rows) for step in run.steps),
        "steps": float(len(run.steps)),
    }


def stalls(run: Run) -> Metrics:
    """Chats are those with the longest outputs."""
    most = max(len(outcome.token_ready_ns) for outcome in run.outcomes)
    chats = [outcome for outcome in run.outcomes if len(outcome.token_ready_ns) == most]
    prompts = [outcome for outcome in run.outcomes if len(outcome.token_ready_ns) < most]
    longest = max(run.steps, key=lambda step: step.prefill_tokens)
    return {
        "max_stall_ms": max(float(numpy.diff(outcome.token_ready_ns).max(initial=0)) / 1e6 for outcome in chats),
        "long_prompt_ttft_ms": statistics.median(outcome.ttft_ns / 1e6 for outcome in prompts),
        "computed_tokens_per_s": sum(step.prefill_tokens + step.decode_tokens for step in run.steps) / run.wall_s,
        "most_prompt_tokens_a_step": float(longest.prefill_tokens),
        "that_step_ms": (longest.end_ns - longest.begin_ns) / 1e6,
        "steps": float(len(run.steps)),
    }


def prefix_gain(run: Run) -> Metrics:
    later = run.outcomes[1:]
    prompt_tokens = sum(len(outcome.request.prompt_token_ids) for outcome in later)
    return {
        "ttft_p50_ms": statistics.median(outcome.ttft_ns / 1e6 for outcome in later),
        "ttft_max_ms": max(outcome.ttft_ns / 1e6 for outcome in later),
        "hit_share": sum(outcome.num_cached_tokens for outcome in later) / prompt_tokens,
        "prefill_tokens": float(sum(step.prefill_tokens for step in run.steps)),
        "prefill_s": run.mean_s(Stage.PREFILL),
        "queued_s": run.mean_s(Stage.QUEUE),
    }


def memory_use(run: Run, capacity_tokens: int) -> Metrics:
    """held_share: tokens in the cache over all that fit into it, by time, while somebody waits to be admitted."""
    full = [step for step in run.steps if step.num_waiting and len(step.rows) == step.num_running] or run.steps
    held = sum(step.kv_tokens_read * (step.end_ns - step.begin_ns) for step in full)
    return {
        "held_share": held / sum(step.end_ns - step.begin_ns for step in full) / capacity_tokens,
        "tokens_per_s": run.output_tokens_per_s,
        "running_mean": statistics.mean(step.num_running for step in full),
        "waited_for_a_slot_s": run.mean_s(Stage.QUEUE, Cause.BATCH_SLOTS),
        "waited_for_blocks_s": run.mean_s(Stage.QUEUE, Cause.KV_BLOCKS),
        "recompute_s": run.mean_s(Stage.RECOMPUTE),
        "preemptions": float(sum(len(step.victims) for step in run.steps)),
        "steps": float(len(run.steps)),
    }


# ---- comparisons


def comparisons(
    runner: TorchRunner, asked: RunnerConfig, sizes: Sizes, what: Sequence[str], repeats: int
) -> Iterator[tuple[str, Any]]:
    """Of a runner with room for `sizes`, made as `asked`: each comparison's name and figures, as they come."""
    crank = crank_over(runner, scheduler_of(sizes), asked)
    plain = PLAIN | {"max_num_seqs": sizes.slots, "max_num_batched_tokens": sizes.budget}
    if "batching" in what:
        arms = {"static": plain | {"batching": "static"}, "continuous": plain}
        found = compare(crank, arms, lambda rng: mixed_outputs(rng, sizes), throughput, repeats)
        lengths = [
            arrival.output_tokens for seed in range(repeats) for arrival in mixed_outputs(random.Random(seed), sizes)
        ]
        yield "batching", found | {"variation_of_outputs": statistics.pstdev(lengths) / statistics.mean(lengths)}
    if "chunking" in what:
        cut = {f"on, {n} a step": plain | {"max_num_batched_tokens": max(n, sizes.slots)} for n in sizes.budgets}
        arms = {"off": plain | {"enable_chunked_prefill": False}, **cut}
        yield "chunking", compare(crank, arms, lambda rng: long_prompts_among_decodes(rng, sizes), stalls, repeats)
    for share in SHARES if "prefix_cache" in what else ():
        arms = {"off": plain, "on": plain | {"enable_prefix_caching": True}}
        requests = lambda rng, share=share: shared_prefixes(rng, sizes, share)  # noqa: E731
        yield f"prefix_cache_{share:.0%}", compare(crank, arms, requests, prefix_gain, repeats)
    if "reservation" in what:
        num_blocks = sizes.kv_tokens // runner.resolved.block_size
        small = crank_over(runner, scheduler_of(sizes), asked, num_blocks)
        yield "reservation", reservation(small, sizes, plain, repeats)


def reservation(crank: Crank, sizes: Sizes, plain: dict[str, Any], repeats: int) -> dict[str, Any]:
    """In pieces: as many requests as there are reservations. In blocks: as many as find room."""
    config = crank.engine.scheduler.config
    capacity = config.num_blocks * config.block_size
    most = scheduler_of(sizes).max_num_seqs
    reserved = sizes.reservation_tokens
    arms = {
        "in one piece": plain | {"max_num_seqs": max(1, min(most, capacity // reserved))},
        "in blocks": plain | {"max_num_seqs": most},
    }
    found = compare(
        crank, arms, lambda rng: unknown_lengths(rng, sizes), lambda run: memory_use(run, capacity), repeats
    )
    return found | {"capacity_tokens": capacity, "reserved_tokens": reserved}


def compare(
    crank: Crank,
    arms: Arms,
    make: Callable[[random.Random], list[Arrival]],
    measure: Callable[[Run], Metrics],
    repeats: int,
) -> dict[str, Any]:
    """Medians and spreads by arm, and last arm over first."""
    samples: dict[str, list[Metrics]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name, knobs in arms.items():
            crank.configure(knobs)
            samples[name].append(measure(drive(crank, make(random.Random(repeat)))))
    summary = {
        name: {metric: _summary([m[metric] for m in runs]) for metric in runs[0]} for name, runs in samples.items()
    }
    first, *_, last = summary.values()
    ratios = {k: last[k]["median"] / first[k]["median"] if first[k]["median"] else None for k in first}
    return {**summary, "ratio": ratios}


def _summary(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {"median": median, "spread": (max(values) - min(values)) / median if median else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(splittime.__file__).parent / "packaged" / "code"))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--slots", type=int, help="requests at once; six times as many come")
    parser.add_argument("--variation", type=float, help="of output lengths: standard deviation over mean; log-normal")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = asked_sizes(TINY if arguments.small else CPU, arguments)
    settings = {"max_model_len": sizes.max_model_len, "quantization": arguments.quantization}
    runner, asked = load_runner(arguments.model, scheduler_of(sizes), **settings)
    figures = dict(comparisons(runner, asked, sizes, arguments.what, arguments.repeats))
    path = file_result(f"mechanisms{name_of(arguments)}", figures, vars(arguments), arguments.json)
    if not arguments.json:
        show(figures)
        print(f"written to {path}")


def asked_sizes(sizes: Sizes, arguments: argparse.Namespace) -> Sizes:
    sizes = replace(sizes, variation=arguments.variation)
    if arguments.slots is None:
        return sizes
    _, longest, mean, prompt = sizes.mixed
    budget = max(sizes.budget, arguments.slots)
    return replace(sizes, slots=arguments.slots, budget=budget, mixed=(6 * arguments.slots, longest, mean, prompt))


def name_of(arguments: argparse.Namespace) -> str:
    """What a result's name has of what was asked for."""
    asked = {"slots": arguments.slots, "variation": arguments.variation, "weights": arguments.quantization}
    return "".join(f"_{name}_{value}" for name, value in asked.items() if value is not None)


def scheduler_of(sizes: Sizes) -> SchedulerConfig:
    """The most that any comparison asks for; the rest is configured."""
    return SchedulerConfig(max_num_seqs=max(sizes.slots, min(sizes.budget, sizes.reserved[0])),
                           max_num_batched_tokens=sizes.budget)  # fmt: skip


def arms_of(result: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Of what `compare` found: without the ratio and what else is beside the arms."""
    return {name: found for name, found in result.items() if isinstance(found, dict) and name != "ratio"}


def show(figures: dict[str, Any]) -> None:
    for name, result in figures.items():
        for metric, ratio in result["ratio"].items():
            told = "  ".join(
                f"{arm} {found[metric]['median']:9.1f} (±{found[metric]['spread']:.0%})"
                for arm, found in arms_of(result).items()
            )
            print(f"{name:18} {metric:20} {told}  ratio {'-' if ratio is None else f'{ratio:.2f}'}")


if __name__ == "__main__":
    main()
