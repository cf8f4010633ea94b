"""The check of a server that was seen from outside: its own runs, simulated, beside what they measured.

The runs' own requests are simulated, and the times that a user feels compared with those that were measured. The error
is how much slower or faster all steps would have to be for the two to agree: in an overload a server that is a tenth
slower makes people wait several times as long. The larger of that error and the regression's own, on steps that it was
not made of, widens every interval (`Errors.drift`). Runs that no pace within a factor of two explains are refused.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from splittime.bench.book.records import Outcome, Run
from splittime.bench.book.requests import output_tokens, service_ns, service_ttft_ns, tpot_ns
from splittime.core.errors import ConfigError
from splittime.plan.rate_trial import run_of
from splittime.plan.seen_steps import prompt_tokens_of
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.costed import mixed_tokens
from splittime.simulate.replica import Replica
from splittime.simulate.trace import TracedRequest

PACES = (1.03, 1.06, 1.12, 1.25, 1.5, 2.0)  # times as slow, or as fast
SHARED = 1  # the seed of what prompts have in common
FELT: dict[str, Callable[[Outcome], float | None]] = {"ttft": service_ttft_ns, "tpot": tpot_ns, "e2e": service_ns}


def checked_by_runs(replica: Replica, runs: Sequence[Run], arm: int, regression_error: float) -> Replica:
    """Returns the replica with intervals as wide as the error of a simulation of its own runs, or of the regression."""
    checks = [OwnRunCheck(replica, run, arm) for run in runs]
    off = {name: max((check.off(name) for check in checks), key=abs) for name in FELT}
    error = max(regression_error, *(check.pace_error() for check in checks))
    if error == math.inf:
        raise _unexplained(runs, off)
    costs = replica.costs
    drift = math.hypot(costs.errors.drift, math.log1p(error))
    errors = msgspec.structs.replace(costs.errors, mean_relative=off["e2e"], drift=drift)
    told = {"off": off, "error": error, "arrival_ns": replica.approach.to_admission_ns}
    told |= {"runs": len(runs), "void": sum(run.is_void for run in runs)}
    return msgspec.structs.replace(replica, costs=msgspec.structs.replace(costs, errors=errors, about=told))


def _unexplained(runs: Sequence[Run], off: dict[str, float]) -> ConfigError:
    words = ", ".join(f"{name.upper()} {share:+.0%}" for name, share in off.items())
    hint = "Measure again below saturation, on a client that nothing else uses; give --max-num-seqs if you know it."
    if any(run.is_void for run in runs):
        hint = f"A run is VOID: `splittime bench report` says why. {hint}"
    return ConfigError(f"a simulation of the runs is far from what they measured: {words}", param="runs", hint=hint)


class OwnRunCheck:
    """One run beside its simulation, by the medians of what users feel."""

    def __init__(self, replica: Replica, run: Run, arm: int) -> None:
        self._replica = replica
        self._requests = list(_requests(run, arm, replica))
        self._measured = _medians(answered(run, arm))
        self._usual = self._simulated(1.0)

    def off(self, name: str) -> float:
        """Returns how far the simulated median is from the measured one; 0 where one of them does not exist."""
        simulated, measured = self._usual[name], self._measured[name]
        return simulated / measured - 1 if simulated and measured else 0.0

    def pace_error(self) -> float:
        """Returns how much slower or faster all steps would have to be for the medians to agree; infinity if `PACES`
        are not enough."""
        return max(self._pace_error(is_slower) for is_slower in (True, False))

    def _pace_error(self, is_slower: bool) -> float:
        """Returns it for the medians that a slower server, or a faster one, explains."""
        left = {name for name in FELT if self.off(name) and (self.off(name) < 0) == is_slower}
        error = 0.0
        for pace in PACES:
            if not left:
                return error
            error = pace - 1
            simulated = self._simulated(pace if is_slower else 1 / pace)
            left = {name for name in left if (simulated[name] < self._measured[name]) == is_slower}
        return math.inf if left else error

    def _simulated(self, factor: float) -> dict[str, float]:
        """Returns the medians where all steps take so many times as long."""
        replica = msgspec.structs.replace(self._replica, pace=self._replica.pace.times(factor))
        return _medians(run_of(replica.run(self._requests, Change(), seed=0)).outcomes)


def _medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns the medians of what users felt (ns); 0 where nobody did."""
    felt = {name: [value for value in map(time_of, outcomes) if value is not None] for name, time_of in FELT.items()}
    return {name: statistics.median(values) if values else 0.0 for name, values in felt.items()}


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
