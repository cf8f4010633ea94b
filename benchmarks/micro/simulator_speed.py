"""How much virtual time the simulator gets through in a second of its own. One thread, no model, steps of a fixed time.

    python -m benchmarks.micro.simulator_speed [--requests 400] [--long 20000] [--small] [--json]

Prompts of 500 tokens. `rows` requests run: at all times if all come at once, nine tenths of it in the mean if they
come one by one, evenly. "prefix cache" says whether it hashes. The accounts and the steps are handed over and dropped;
of the long run the figures are kept. Its memory is the process's peak, before anything else has run.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.report import file_result
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.figures import RunningFigures
from splittime.simulate.run import simulate_each
from splittime.simulate.shape import StepShape, StepTime
from splittime.simulate.trace import TracedRequest

PROMPT_TOKENS = 500
LOAD = 0.9  # of what the slots can take, where requests come one by one


class Cell(NamedTuple):
    rows: int
    step_ms: float
    output_tokens: int
    has_prefix_cache: bool
    comes_at_once: bool = True

    @property
    def gap_ns(self) -> int:
        """Between two arrivals."""
        if self.comes_at_once:
            return 1
        return round((self.output_tokens + 1) * self.step_ms * 1e6 / self.rows / LOAD)


CELLS = (
    Cell(64, 8, 200, True),
    Cell(64, 8, 200, False),
    Cell(16, 40, 200, True),
    Cell(64, 8, 100, False),
    Cell(64, 8, 200, True, comes_at_once=False),
    Cell(16, 40, 200, True, comes_at_once=False),
)
LONG = Cell(64, 8, 100, True, comes_at_once=False)


class Fixed:
    def __init__(self, step_ms: float) -> None:
        self._time = StepTime(device_ns=int(step_ms * 1e6))

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        return self._time


def requests_of(cell: Cell, count: int) -> Iterator[TracedRequest]:
    for number in range(count):
        name, at_ns = f"r{number}", number * cell.gap_ns
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(mixed_tokens(number + 1, 0, PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=cell.output_tokens, seed=0, ignore_eos=True),
            submitted_ns=at_ns,
        )
        account = ClosedAccount(
            request_id=name,
            group_id=name,
            model="",
            endpoint="",
            started_at_unix_ns=0,
            start_ns=at_ns,
            end_ns=at_ns,
            intervals=(),
            finish_reason="length",
            prompt_tokens=PROMPT_TOKENS,
        )
        yield TracedRequest(request, account, (Mark(Stage.HANDOFF, None, at_ns),), at_ns)


class LastStep:
    """Counts what it is told, and keeps the last step."""

    def __init__(self) -> None:
        self.count, self.last_ns = 0, 0

    def __call__(self, step: StepRecord) -> None:
        self.count += 1
        self.last_ns = step.end_ns


def run(cell: Cell, requests: Any, on_account: Any, on_step: Any) -> None:
    config = SchedulerConfig(
        max_num_seqs=cell.rows,
        max_num_batched_tokens=2048,
        num_blocks=cell.rows * 64,
        max_model_len=1024,
        enable_prefix_caching=cell.has_prefix_cache,
    )
    simulate_each(requests, config, Fixed(cell.step_ms), QueueLimits(10**9, 10**12), on_account, on_step)


def measure(cell: Cell, count: int) -> dict[str, Any]:
    count = max(count, 2 * cell.rows)
    requests, steps = list(requests_of(cell, count)), LastStep()
    begin = time.process_time()
    run(cell, requests, lambda account: None, steps)
    took_s = time.process_time() - begin
    return cell._asdict() | {
        "us_per_step": took_s / steps.count * 1e6,
        "real_time_factor": steps.last_ns / 1e9 / took_s,
        "minutes_of_a_million_requests": took_s / count * 1e6 / 60,
    }


def middle(cell: Cell, count: int, repeats: int) -> dict[str, Any]:
    """Returns the median of the repeats, with the spread."""
    runs = sorted((measure(cell, count) for _ in range(repeats)), key=lambda run: run["us_per_step"])
    return runs[len(runs) // 2] | {"fastest_us": runs[0]["us_per_step"], "slowest_us": runs[-1]["us_per_step"]}


def long_run(count: int) -> dict[str, Any]:
    """Returns what a run of so many requests takes, the making of the requests and the figures included."""
    before_kb, figures = peak_kb(), RunningFigures()
    begin = time.process_time()
    run(LONG, requests_of(LONG, count), figures.add_account, figures.add_step)
    found = figures.figures()
    took_s = time.process_time() - begin
    return LONG._asdict() | {
        "requests": count,
        "took_s": took_s,
        "minutes_of_a_million_requests": took_s / count * 1e6 / 60,
        "peak_mb": peak_kb() / 1024,
        "peak_mb_before": before_kb / 1024,
        "mean_running": found["mean_running"],
        "ttft_ms_p99": found["ttft_ms_p99"],
    }


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--long", type=int, default=20_000, help="requests of the long run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count, repeats = (10, 1) if arguments.small else (arguments.requests, arguments.repeats)
    whole = long_run(100 if arguments.small else arguments.long)
    cells = [middle(cell, count, repeats) for cell in CELLS[: 1 if arguments.small else None]]
    path = file_result("simulator_speed", {"cells": cells, "long_run": whole}, vars(arguments), arguments.json)
    if not arguments.json:
        for told in (*cells, whole):
            print("  ".join(f"{key} {value:,.6g}" for key, value in told.items()))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
