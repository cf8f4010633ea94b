"""The check of a server that was seen from outside: its own runs, simulated, beside what they measured.

The runs' own requests are simulated, and the times that a user feels compared with those that were measured. The larger
of that error and the regression's own, on steps that it was not made of, widens every interval: all steps may take so
much more or less (`Errors.drift`). Runs that the simulation is off by more than `MOST_OFF` are refused.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from splittime.bench.book.records import Outcome, Run
from splittime.bench.book.requests import output_tokens, service_ns, service_ttft_ns, tpot_ns
from splittime.core.errors import ConfigError
from splittime.plan.judged import run_of
from splittime.plan.seen_steps import prompt_tokens_of
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.replica import Replica
from splittime.simulate.trace import TracedRequest

MOST_OFF = 1.0  # of what was measured: twice
SHARED = 1  # the seed of what prompts have in common
LEAST = 1e-9
FELT: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": service_ttft_ns,
    "tpot": tpot_ns,
    "e2e": service_ns,
}


def checked_by_runs(replica: Replica, runs: Sequence[Run], arm: int, regression_error: float) -> Replica:
    """Returns the replica with intervals as wide as the error of a simulation of its own runs, or of the regression."""
    off = {name: _off(replica, runs, arm, felt) for name, felt in FELT.items()}
    costs = replica.costs
    error = max(regression_error, *map(_times_off, off.values()))
    if error > MOST_OFF:
        raise _unexplained(runs, off)
    drift = math.hypot(costs.errors.drift, math.log1p(error))
    errors = msgspec.structs.replace(costs.errors, mean_relative=off["e2e"], drift=drift)
    told = {"off": off, "error": error, "arrival_ns": replica.approach.to_admission_ns}
    told |= {"runs": len(runs), "void": sum(run.is_void for run in runs)}
    return msgspec.structs.replace(replica, costs=msgspec.structs.replace(costs, errors=errors, about=told))


def _times_off(share: float) -> float:
    """Returns a relative error either way: half as much is as far off as twice as much, by 1."""
    return math.expm1(abs(math.log(max(1 + share, LEAST))))


def _unexplained(runs: Sequence[Run], off: dict[str, float]) -> ConfigError:
    words = ", ".join(f"{name.upper()} {share:+.0%}" for name, share in off.items())
    hint = "Measure again below saturation, on a client that nothing else uses; give --max-num-seqs if you know it."
    if any(run.is_void for run in runs):
        hint = f"A run is VOID: `splittime bench report` says why. {hint}"
    return ConfigError(f"a simulation of the runs is far from what they measured: {words}", param="runs", hint=hint)


def _off(replica: Replica, runs: Sequence[Run], arm: int, felt: Callable[[Outcome], float | None]) -> float:
    """Returns how far the simulated medians are from the measured ones: that of the run whose is the furthest."""
    ratios = []
    for run in runs:
        simulated = run_of(replica.run(list(_requests(run, arm, replica)), Change(), seed=0)).outcomes
        sides = [_median(outcomes, felt) for outcomes in (simulated, answered(run, arm))]
        if all(sides):
            ratios.append(sides[0] / sides[1] - 1)
    return max(ratios, key=abs, default=0.0)


def _median(outcomes: Sequence[Outcome], felt: Callable[[Outcome], float | None]) -> float:
    """Returns the median of what users felt (ns); 0 where nobody did."""
    values = [value for value in map(felt, outcomes) if value is not None]
    return statistics.median(values) if values else 0.0


def answered(run: Run, arm: int) -> list[Outcome]:
    return [o for o in run.outcomes if o.arm == arm and o.sent_ns is not None and o.chunk_ns]


def _requests(run: Run, arm: int, replica: Replica) -> Iterator[TracedRequest]:
    """Yields the run's requests as they were sent. What was found in the cache is a prefix that all share."""
    asked = [
        Asked(o.sent_ns or 0, _prompt(number, o), output_tokens(o) or len(o.chunk_ns))
        for number, o in enumerate(sorted(answered(run, arm), key=lambda o: o.sent_ns or 0))
    ]
    return asked_requests(asked, replica.approach, replica.config.max_model_len)


def _prompt(number: int, outcome: Outcome) -> tuple[int, ...]:
    cached, whole = outcome.cached_tokens or 0, prompt_tokens_of(outcome)
    return (*mixed_tokens(SHARED, 0, min(cached, whole)), *mixed_tokens(number + 2, cached, max(cached, whole)))
