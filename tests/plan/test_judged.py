"""A simulated run is judged as a real one: by the same figures, from the client's side."""

import msgspec
import pytest
from known_replicas import LOAD, REPLICA

from splittime.bench.book.figures import summary
from splittime.bench.book.records import Ending, Phase
from splittime.bench.book.slo import parse_slo
from splittime.ledger import derive
from splittime.plan.capacity import judged, run_of
from splittime.plan.load import requests_for
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.change import Change
from splittime.simulate.run import SimulatedBooks


@pytest.fixture(scope="module")
def books() -> SimulatedBooks:
    return REPLICA.run(requests_for(LOAD, REPLICA), Change(), seed=0)


def test_the_client_sees_what_the_accounts_say(books: SimulatedBooks) -> None:
    found = summary(run_of(books))
    ttft = derive.percentiles([derive.ttft_ns(account) for account in books.accounts], (50, 99))
    assert found.figures["ttft"].percentiles["p50"].value == pytest.approx(ttft["p50"], rel=1e-3)
    assert found.figures["ttft"].percentiles["p99"].value == pytest.approx(ttft["p99"], rel=1e-3)
    assert found.counted == len(books.accounts)


def test_an_slo_is_kept_and_broken(books: SimulatedBooks) -> None:
    kept = judged(books, parse_slo("ttft_p99=10s,itl_p99=10s"))
    assert all(result.ok for result in kept)
    broken = judged(books, parse_slo("ttft_p99=1us,itl_p99=10s"))
    assert [result.name for result in broken if not result.ok] == ["ttft_p99"]


def test_who_warms_up_does_not_count(books: SimulatedBooks) -> None:
    run = run_of(books, warm_up_share=0.5)
    assert 0 < len(run.measured()) < len(run.outcomes)
    assert all(outcome.intended_ns < run.measured_from_ns for outcome in run.outcomes if outcome.phase is Phase.WARM_UP)


def test_the_refused_and_the_leavers_are_told_apart() -> None:
    tight = msgspec.structs.replace(REPLICA, limits=QueueLimits(1, 10**12))
    load = {**LOAD, "rate": 400.0, "duration_s": 1.0}
    endings = {outcome.ending for outcome in run_of(tight.run(requests_for(load, tight), Change(), 0)).outcomes}
    assert endings == {Ending.COMPLETE, Ending.REFUSED}
    leavers = {**LOAD, "cancel_probability": 1.0, "cancel_after_s": "0.003"}
    gone = run_of(REPLICA.run(requests_for(leavers, REPLICA), Change(), 0))
    assert {outcome.ending for outcome in gone.outcomes} == {Ending.CANCELLED}
