"""How much of the KV memory that requests hold has tokens in it, and how many requests run together for it.

    python -m benchmarks.scenarios.kv_use --trace azure_2023_conv.csv.gz [--seconds 120] [--json]

The scheduler and its KV cache run in their own loop under a virtual clock, with a runner of declared delays: what is
counted are blocks and slots, on which no processor has an influence. The trace's requests come at their times. Three
ways to hold memory, in the same memory:

* blocks: as the scheduler leases them, `--block-size` tokens each, as they are needed;
* the same with prompts computed in steps of `--budget` tokens, or whole;
* one piece: the longest context for each request, reserved when it is admitted, which is to run as many requests as
  there are pieces.

Use is slots that were written over slots that were held, weighted by time, over the steps in which somebody waits to be
admitted: an engine with room to spare proves nothing.
"""

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table

from benchmarks.fake_runner import FakeRunner
from benchmarks.report import file_result
from benchmarks.scenarios.azure_replay import TraceRequest, load_trace
from benchmarks.timed_run import TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

VOCABULARY = 1000


@dataclass
class Held:
    """One request's memory: slots that are written, and blocks."""

    written: int = 0
    blocks: int = 0


@dataclass
class Watched:
    """A runner that notes, of each step, its duration, slots written, slots held, and requests that hold some.

    piece: slots that a request holds from its admission on; None for the blocks that it was given.
    """

    runner: FakeRunner
    clock: VirtualClock
    block_size: int
    piece: int | None
    seen: list[tuple[int, int, int, int]] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        begin_ns = self.clock.now_ns()
        for request_id in plan.released:
            del self.held[request_id]
        self.held |= {admitted.request_id: Held() for admitted in plan.admitted}
        for row in plan.rows:
            mine = self.held[row.request_id]
            mine.written, mine.blocks = row.start + row.num_tokens, mine.blocks + len(row.new_block_ids)
        result = self.runner.run(plan)
        slots = [self.piece or mine.blocks * self.block_size for mine in self.held.values()]
        written = sum(mine.written for mine in self.held.values())
        self.seen.append((self.clock.now_ns() - begin_ns, written, sum(slots), len(slots)))
        return result


def play(trace: list[TraceRequest], asked: argparse.Namespace, piece: int | None, budget: int) -> dict[str, float]:
    """One way to hold memory: its use and what it means for the requests."""
    clock = VirtualClock()
    delays = {"step_ns": round(asked.step_ms * 1e6), "token_ns": round(asked.token_us * 1e3)}
    watched = Watched(FakeRunner(asked.block_size, VOCABULARY, clock=clock, **delays), clock, asked.block_size, piece)
    config = SchedulerConfig(
        max_num_seqs=asked.memory_tokens // piece if piece else asked.slots,
        max_num_batched_tokens=budget,
        num_blocks=asked.memory_tokens // asked.block_size,
        block_size=asked.block_size,
        max_model_len=asked.max_model_len,
        enable_prefix_caching=False,
    )
    run = TimedRun(Crank(EngineParts(Engine(Scheduler(config)), watched), clock), clock)
    for request in requests_of(trace):
        run.submit(request)
    run.run()
    return summary(watched, run)


def requests_of(trace: list[TraceRequest]) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(1, VOCABULARY) for _ in range(one.prompt_tokens)),
            sampling=SamplingParams(max_tokens=one.output_tokens, temperature=0.0, seed=0, ignore_eos=True),
            submitted_ns=round(one.at_s * 1e9),
        )
        for number, one in enumerate(trace)
    ]


def summary(watched: Watched, run: TimedRun) -> dict[str, float]:
    """Of the steps in which somebody waits; of all if nobody ever does."""
    waiting = [step.num_waiting > 0 for step in run.steps]
    kept = [seen for seen, waits in zip(watched.seen, waiting, strict=True) if waits or not any(waiting)]
    ns, written, held, running = (numpy.array(column, dtype=float) for column in zip(*kept, strict=True))
    outcomes = run.outcomes.values()
    return {
        "use": float((written * ns).sum() / (held * ns).sum()),
        "running": float((running * ns).sum() / ns.sum()),
        "time_with_waiters": float(ns.sum() / sum(seen[0] for seen in watched.seen)),
        "ttft_p50_s": float(numpy.median([outcome.ttft_ns for outcome in outcomes]) / 1e9),
        "end_s": max(outcome.token_ready_ns[-1] for outcome in outcomes) / 1e9,
        "preemptions": float(sum(outcome.num_preemptions for outcome in outcomes)),
    }


def figures_of(trace: list[TraceRequest], asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    whole = max(asked.budget, asked.max_model_len)
    return {
        f"blocks of {asked.block_size}, prompts in parts of {asked.budget}": play(trace, asked, None, asked.budget),
        f"blocks of {asked.block_size}, prompts whole": play(trace, asked, None, whole),
        f"one piece of {asked.max_model_len} each": play(trace, asked, asked.max_model_len, asked.budget),
    }


def show(figures: dict[str, dict[str, float]]) -> None:
    table = Table(
        "memory is held in", "use", "requests together", "TTFT p50, s", "all answered after, s", "preemptions"
    )
    for name, one in figures.items():
        values = (one["running"], one["ttft_p50_s"], one["end_s"])
        table.add_row(name, f"{one['use']:.1%}", *(f"{value:.1f}" for value in values), f"{one['preemptions']:.0f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="gzipped CSV: arrival_s, input_tokens, output_tokens")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the trace, from its beginning")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--memory-tokens", type=int, default=65_536, help="that the KV memory has room for")
    parser.add_argument("--slots", type=int, default=256, help="most requests at once, where memory allows")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--step-ms", type=float, default=20.0, help="declared: of a step")
    parser.add_argument("--token-us", type=float, default=100.0, help="declared: of each token more")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    trace, scale = load_trace(asked.trace, asked.seconds, 1.0, asked.max_model_len)
    figures: dict[str, Any] = figures_of(trace, asked)
    file_result("kv_use", figures | {"requests": len(trace), "length_scale": scale}, vars(asked), asked.json)
    if not asked.json:
        show(figures)


if __name__ == "__main__":
    main()
