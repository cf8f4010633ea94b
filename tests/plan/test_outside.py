"""A server that only its clients know: what is made of their times, against what its steps truly take."""

import math
import random
from itertools import accumulate

import msgspec
import pytest
from known_replicas import CONFIG, REPLICA

from splittime.bench.book.records import Outcome, Run
from splittime.core.errors import ConfigError
from splittime.plan.capacity import run_of
from splittime.plan.load import requests_for
from splittime.plan.seen_steps import checked_by_runs, read_steps
from splittime.plan.sources import replica_of_runs
from splittime.simulate.change import Change
from splittime.simulate.cost import LIMITED, REACH
from splittime.simulate.replica import Replica
from splittime.simulate.run import Delivery
from splittime.simulate.shape import StepShape, shape_of_record

TRUE = msgspec.structs.replace(
    REPLICA,
    config=msgspec.structs.replace(CONFIG, max_num_seqs=32, max_num_batched_tokens=256),
    delivery=Delivery(send_lag_ns=20_000, end_ns=10_000, to_wake_ns=5_000),
)
LENGTHS = {"input_tokens": "uniform:16:800", "output_tokens": "uniform:10:80"}


def outside(replica: Replica, rate: float, seed: int = 1) -> Run:
    """What clients of this server see of it."""
    load = {"rate": rate, "duration_s": 8.0, "seed": seed, **LENGTHS}
    books = replica.run(requests_for(load, replica), Change(), seed=0)
    seen = run_of(books)
    arm = msgspec.structs.replace(seen.arms[0], accounts=(), steps=(), url="http://foreign")
    return msgspec.structs.replace(seen, arms=(arm,), label="foreign")


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [outside(TRUE, rate) for rate in (8.0, 40.0)]


@pytest.fixture(scope="module")
def found(runs: list[Run]) -> Replica:
    return replica_of_runs(runs, max_model_len=1024)


@pytest.mark.parametrize(
    "shape",
    [
        *(StepShape(rows, rows, rows, 300 * rows, 0) for rows in (1, 4, 16, 24)),
        *(StepShape(1, tokens, 0, tokens, tokens * (tokens + 1) // 2) for tokens in (50, 200)),
        StepShape(9, 8 + 200, 8, 8 * 300 + 200, 200 * 201 // 2),
    ],
)
def test_its_steps_take_what_they_truly_take(found: Replica, shape: StepShape) -> None:
    true_ns = TRUE.costs.step_time(shape).step_ns
    assert found.costs.step_time(shape).step_ns == pytest.approx(true_ns, rel=0.1)


def test_a_network_and_a_machine_that_vary_cost_it_some_of_that_and_it_says_so() -> None:
    rng = random.Random(5)
    found = replica_of_runs([jittered(outside(TRUE, rate), rng) for rate in (8.0, 40.0)])
    for rows in (1, 4, 12):
        shape = StepShape(rows, rows, rows, 300 * rows, 0)
        assert found.costs.step_time(shape).step_ns == pytest.approx(TRUE.costs.step_time(shape).step_ns, rel=0.1)
    assert found.costs.errors.drift >= math.log1p(found.costs.about["error"]) > 0.001


def test_tokens_that_come_several_in_a_chunk_are_steps_of_their_own() -> None:
    found = replica_of_runs([in_twos(outside(TRUE, rate)) for rate in (8.0, 40.0)])
    for rows in (2, 6, 12):
        shape = StepShape(rows, rows, rows, 300 * rows, 0)
        assert found.costs.step_time(shape).step_ns == pytest.approx(TRUE.costs.step_time(shape).step_ns, rel=0.2)


def in_twos(run: Run) -> Run:
    """A chunk has two tokens, from the second on, and comes with the latter."""
    moved = []
    for outcome in run.outcomes:
        first, *others = outcome.chunk_ns
        ends = [*others[1::2], *([others[-1]] if len(others) % 2 else [])]
        counts = [2] * (len(others) // 2) + [1] * (len(others) % 2)
        moved.append(msgspec.structs.replace(outcome, chunk_ns=(first, *ends), chunk_tokens=(1, *counts)))
    return msgspec.structs.replace(run, outcomes=tuple(moved))


def jittered(run: Run, rng: random.Random) -> Run:
    """Each token comes up to a tenth of a millisecond later, those of an answer in their order."""
    moved = []
    for outcome in run.outcomes:
        late = (at_ns + int(rng.expovariate(1 / 50_000)) for at_ns in outcome.chunk_ns)
        moved.append(msgspec.structs.replace(outcome, chunk_ns=tuple(accumulate(late, max))))
    return msgspec.structs.replace(run, outcomes=tuple(moved))


def test_the_budget_is_found_and_the_check_is_close(found: Replica) -> None:
    assert found.config.max_num_batched_tokens == 256
    assert 10 <= found.config.max_num_seqs <= 32
    assert found.costs.about["error"] < 0.1
    assert found.source == "bench runs of foreign, from outside"
    assert found.approach.to_admission_ns < 1_000_000


def test_it_is_planned_with_the_requests_of_its_runs(found: Replica, runs: list[Run]) -> None:
    lengths = [(one.prompt_tokens, one.output_tokens) for run in runs for one in run.outcomes]
    assert found.mix.rows == tuple(lengths)
    assert found.mix.cached_share == 0


def test_its_cache_is_not_full_before_the_model_refuses(found: Replica, runs: list[Run]) -> None:
    """It has room for `REACH` times the positions that were seen, and for a block that is not full of each request."""
    config, most = found.config, found.costs.most[LIMITED.index("kv_tokens")]
    assert config.num_blocks >= REACH * most / config.block_size + config.max_num_seqs
    assert replica_of_runs(runs, num_blocks=500).config.num_blocks == 500


def test_every_step_that_is_told_is_one_that_there_was() -> None:
    load = {"rate": 20.0, "duration_s": 4.0, "seed": 2, **LENGTHS}
    books = TRUE.run(requests_for(load, TRUE), Change(), seed=0)
    true = {shape_of_record(step)[:5] for step in books.steps}
    told = [one.shape[:5] for one in read_steps(run_of(books), 256).seen if one.num_steps == 1 and not one.arrivals]
    assert len(told) > 0.5 * len(books.steps)
    assert sum(shape in true for shape in told) > 0.9 * len(told)


def test_runs_that_no_simulation_explains_are_refused(runs: list[Run]) -> None:
    waits = [msgspec.structs.replace(run, outcomes=tuple(map(held_back, run.outcomes))) for run in runs]
    with pytest.raises(ConfigError, match="far from what they measured: TTFT -100%, TPOT") as error:
        checked_by_runs(replica_of_runs(runs), waits, 0, 0.0)
    assert "below saturation" in str(error.value.info.hint)


def test_a_server_a_tenth_too_slow_is_a_tenth_off_though_its_queue_makes_people_wait_several_times_as_long() -> None:
    at_the_brink = outside(TRUE, 70.0)
    slower = msgspec.structs.replace(TRUE, pace=TRUE.pace.times(1.1))
    costs = checked_by_runs(slower, [at_the_brink], 0, 0.0).costs
    assert costs.about["off"]["ttft"] > 1
    assert costs.about["error"] == pytest.approx(0.12)
    assert costs.errors.drift == pytest.approx(math.log(1.12))


def held_back(outcome: Outcome) -> Outcome:
    """Its first token comes ten seconds later, and all that follow."""
    late = tuple(at_ns + 10 * 10**9 for at_ns in outcome.chunk_ns)
    return msgspec.structs.replace(outcome, chunk_ns=late, end_ns=outcome.end_ns + 10 * 10**9)


def test_runs_that_say_too_little_are_refused_with_what_is_missing(runs: list[Run]) -> None:
    few = msgspec.structs.replace(runs[0], outcomes=runs[0].outcomes[:1])
    with pytest.raises(ConfigError, match="could be told"):
        replica_of_runs([few])
    alone = outside(msgspec.structs.replace(TRUE, config=msgspec.structs.replace(TRUE.config, max_num_seqs=1)), 2.0)
    with pytest.raises(ConfigError, match="much the same number of requests") as error:
        replica_of_runs([alone])
    assert "two loads" in str(error.value.info.hint)
