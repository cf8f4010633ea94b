"""A trial at one rate: who counts, and what prompts cost of the steps' time."""

import statistics
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from known_replicas import COSTS, LOAD, REPLICA

from splittime.bench.book.slo import parse_slo
from splittime.plan.capacity import RateTrial, simulated_trial
from splittime.plan.load import requests_for
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.change import Change
from splittime.simulate.replica import Replica
from splittime.simulate.run import SimulatedBooks

SLO = parse_slo("ttft_mean=1s")


def both(replica: Replica, load: Mapping[str, Any]) -> tuple[RateTrial, SimulatedBooks]:
    """Returns a trial and the ledger that it is of."""
    books = replica.run(requests_for(dict(load), replica), Change(), 0)
    return simulated_trial(replica, load, SLO, load["rate"], 0), books


def test_the_first_tenth_of_the_time_does_not_count() -> None:
    """More comes than can be served: who comes later waits longer."""
    trial, books = both(REPLICA, {**LOAD, "rate": 500.0, "duration_s": 1.0})
    first_ns, last_ns = (limit(one.start_ns for one in books.accounts) for limit in (min, max))
    from_ns = first_ns + (last_ns - first_ns) / 10
    counted, every = (
        statistics.fmean(one.token_written_ns[0] - one.start_ns for one in books.accounts if one.start_ns >= begin_ns)
        for begin_ns in (from_ns, 0)
    )
    assert trial.term("ttft_mean").value == pytest.approx(counted, rel=1e-6)
    assert counted > 1.02 * every


def test_prompts_cost_nothing_where_a_step_takes_as_long_without_them() -> None:
    costs = msgspec.structs.replace(COSTS, device=(1e7, 0.0, 0.0, 0.0, 0.0, 0.0))
    trial, books = both(msgspec.structs.replace(REPLICA, costs=costs), LOAD)
    with_prompts = [step for step in books.steps if step.prefill_tokens]
    alone = [step for step in with_prompts if not step.decode_tokens]
    assert 0 < len(alone) < len(with_prompts)
    assert trial.prompt_share == pytest.approx(len(alone) / len(books.steps), rel=1e-3)


def test_the_refused_have_no_part_in_the_lengths() -> None:
    tight = msgspec.structs.replace(REPLICA, limits=QueueLimits(1, 10**12))
    trial, books = both(tight, {**LOAD, "rate": 400.0, "duration_s": 1.0})
    assert any(account.is_refused for account in books.accounts)
    assert (trial.input_tokens, trial.output_tokens) == (96, 12)
    assert trial.num_requests == len(books.accounts)
