"""How much virtual time the simulator gets through in a second of its own. One thread, no model, steps of a fixed time.

    python -m benchmarks.micro.simulator_speed [--requests 400] [--small] [--json]

`rows` requests run at all times: prompts of 500 tokens, answers of 200 (and 100, for the figure of a million requests).
"prefix cache" says whether it hashes. The accounts and the steps are closed and dropped.
"""

import argparse
import time
from typing import Any

from benchmarks.report import file_result
from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import StepPlan
from splittime.drive.crank import Crank, EngineParts
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.costed import costed_engine, mixed_token
from splittime.simulate.run import AT_ONCE, SimulatedServer
from splittime.simulate.shape import StepTime
from splittime.simulate.trace import TracedRequest

CELLS = ((64, 8e6, 200, True), (64, 8e6, 200, False), (16, 40e6, 200, True), (64, 8e6, 100, False))


class Fixed:
    def __init__(self, step_ns: float) -> None:
        self._time = StepTime(device_ns=int(step_ns))

    def of(self, plan: StepPlan, now_ns: int) -> StepTime:
        return self._time


def traced(number: int, output_tokens: int) -> TracedRequest:
    name = f"r{number}"
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(mixed_token(number + 1, index) for index in range(500)),
        sampling=SamplingParams(max_tokens=output_tokens, seed=0, ignore_eos=True),
        submitted_ns=number,
    )
    account = ClosedAccount(
        request_id=name,
        group_id=name,
        model="",
        endpoint="",
        started_at_unix_ns=0,
        start_ns=number,
        end_ns=number,
        intervals=(),
        finish_reason="length",
        prompt_tokens=500,
    )
    return TracedRequest(request, account, (Mark(Stage.HANDOFF, None, number),), number)


def measure(rows: int, step_ns: float, output_tokens: int, has_prefix_cache: bool, count: int) -> dict[str, Any]:
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        num_blocks=rows * 64,
        max_model_len=1024,
        enable_prefix_caching=has_prefix_cache,
    )
    requests = [traced(number, output_tokens) for number in range(max(count, 2 * rows))]
    clock, num_steps = VirtualClock(), 0

    def on_step(record: object) -> None:
        nonlocal num_steps
        num_steps += 1

    engine, runner, after_step_ns = costed_engine(Scheduler(config), Fixed(step_ns), clock)
    limits = QueueLimits(10**9, 10**12)
    server = SimulatedServer(clock, limits, AT_ONCE, after_step_ns, lambda account: None, on_step)
    begin = time.process_time()
    server.run(Crank(EngineParts(engine, runner), clock), requests)
    took_s = time.process_time() - begin
    return {
        "rows": rows,
        "step_ms": step_ns / 1e6,
        "output_tokens": output_tokens,
        "prefix_cache": has_prefix_cache,
        "us_per_step": took_s / num_steps * 1e6,
        "real_time_factor": clock.now_ns() / 1e9 / took_s,
        "minutes_of_a_million_requests": took_s / len(requests) * 1e6 / 60,
    }


def middle(cell: tuple[int, float, int, bool], count: int, repeats: int) -> dict[str, Any]:
    """Returns the median of the repeats, with the spread."""
    runs = sorted((measure(*cell, count) for _ in range(repeats)), key=lambda run: run["us_per_step"])
    return runs[len(runs) // 2] | {"fastest_us": runs[0]["us_per_step"], "slowest_us": runs[-1]["us_per_step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count, repeats = (10, 1) if arguments.small else (arguments.requests, arguments.repeats)
    cells = [middle(cell, count, repeats) for cell in CELLS[: 1 if arguments.small else None]]
    path = file_result("simulator_speed", {"cells": cells}, vars(arguments), arguments.json)
    if not arguments.json:
        for told in cells:
            print("  ".join(f"{key} {value:,.6g}" for key, value in told.items()))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
