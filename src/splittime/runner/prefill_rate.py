"""What a token of a prompt takes, measured at start: of it follows how much of a prompt one step computes.

The shortest of some runs counts, when a second one confirms it. Of the native kernels it is the processors' time,
shared among the threads, where that is less than the time that went by: what a neighbour takes from the cores is not in
it.
"""

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from splittime.runner.warm_up import Probe

MIN_RUNS, MAX_RUNS = 3, 12
BUDGET_S = 0.5  # beyond the least number of runs
CONFIRMED = 0.03  # the next shortest is within this share


class Rate(msgspec.Struct, frozen=True):
    """evidence: in words."""

    ns_per_token: Annotated[float, msgspec.Meta(gt=0)]
    evidence: str


def measure(probe: Probe, threads: int | None) -> Rate:
    """threads: that do all the work of this process; None where others do some, and only the clock can tell."""
    probe.prefill()
    taken_ns: list[float] = []
    begin_ns = time.monotonic_ns()
    while len(taken_ns) < MIN_RUNS or not _is_confirmed(taken_ns):
        is_out_of_time = time.monotonic_ns() - begin_ns > BUDGET_S * 1e9
        if len(taken_ns) >= MIN_RUNS and (is_out_of_time or len(taken_ns) == MAX_RUNS):
            break
        taken_ns.append(_time_ns(probe.prefill, threads))
    shortest, following = sorted(taken_ns)[:2]
    evidence = (
        f"a prompt of {probe.max_tokens} tokens took {shortest / 1e6:.2f} ms, the shortest of {len(taken_ns)} runs"
    )
    evidence += f", the next {following / shortest - 1:.0%} more"
    return Rate(shortest / probe.max_tokens, evidence)


def _is_confirmed(taken_ns: list[float]) -> bool:
    shortest, following = sorted(taken_ns)[:2]
    return following <= (1 + CONFIRMED) * shortest


def _time_ns(step: Callable[[], object], threads: int | None) -> float:
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    step()
    wall_ns, cpu_ns = time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns
    return max(1, wall_ns if threads is None else min(wall_ns, cpu_ns / threads))
