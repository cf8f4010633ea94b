"""What the scheduler costs: `plan` + `commit` with 256 requests decoding, and with 10,000 waiting.

    python -m benchmarks.micro.plan_commit            a table
    python -m benchmarks.micro.plan_commit --json     the same as one JSON line

No model: results are constant tokens, made outside the clock. Goals: 1 ms at 256 running, 2 ms with 10,000 waiting.
"""

import argparse
import statistics
import time

from benchmarks.report import file_result
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import RowResult, StepPlan, StepResult
from splittime.drive.host_time import freeze_heap
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

CASES = ((256, 0, "fcfs"), (256, 10_000, "fcfs"), (256, 10_000, "priority"), (64, 10_000, "shortest_prefill"))
SMALL = ((4, 0, "fcfs"), (4, 20, "priority"))


def make_scheduler(num_running: int, num_waiting: int, policy: str) -> Scheduler:
    """`num_running` requests decoding, `num_waiting` behind them."""
    config = SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=4096, num_blocks=num_running * 64 + 16, policy=policy
    )
    scheduler = Scheduler(config)
    for i in range(num_running + num_waiting):
        prompt = tuple(range(i % 7 + 1, i % 7 + 33))
        sampling = SamplingParams(max_tokens=900, seed=0)
        request = Request(request_id=f"request-{i}", prompt_token_ids=prompt, sampling=sampling, submitted_ns=i)
        scheduler.submit(request, i)
    while any(state.num_output == 0 for state in scheduler.running) or len(scheduler.running) < num_running:
        step(scheduler)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(
        plan.step_id, tuple(RowResult(row.request_id, (5,) if row.num_samples else ()) for row in plan.rows)
    )


def step(scheduler: Scheduler) -> tuple[int, int]:
    """One step; returns what plan and commit took, in ns."""
    begin_ns = time.monotonic_ns()
    plan = scheduler.plan(begin_ns)
    planned_ns = time.monotonic_ns()
    assert plan is not None
    result = result_of(plan)
    ready_ns = time.monotonic_ns()
    scheduler.commit(plan, result, ready_ns)
    return planned_ns - begin_ns, time.monotonic_ns() - ready_ns


def measure(num_running: int, num_waiting: int, policy: str, num_steps: int = 400) -> dict[str, float | int | str]:
    scheduler = make_scheduler(num_running, num_waiting, policy)
    freeze_heap()
    samples = [step(scheduler) for _ in range(num_steps)]
    total_us = sorted((plan + commit) / 1e3 for plan, commit in samples)
    return {
        "running": num_running,
        "waiting": num_waiting,
        "policy": policy,
        "plan_us": statistics.median(plan / 1e3 for plan, _ in samples),
        "commit_us": statistics.median(commit / 1e3 for _, commit in samples),
        "total_p50_us": statistics.median(total_us),
        "total_p99_us": total_us[int(0.99 * len(total_us))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [
        measure(*case, num_steps=20 if arguments.small else 400) for case in (SMALL if arguments.small else CASES)
    ]
    file_result("plan_commit", {"cases": results}, vars(arguments), arguments.json)
    if arguments.json:
        return
    for result in results:
        print(
            "  ".join(
                f"{key}={value:.0f}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()
            )
        )


if __name__ == "__main__":
    main()
