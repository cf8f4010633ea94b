"""A load of `bench` meets a simulated server as it would meet a real one."""

import random
from pathlib import Path

import msgspec
import pytest
from known_replicas import LOAD, REPLICA

from splittime.core.errors import ConfigError, NotFound
from splittime.plan import load as planned_load
from splittime.plan.load import load_at, requests_for
from splittime.simulate.change import Change
from splittime.simulate.cost import Pace, PaceOf
from splittime.simulate.replica import Approach, load_replica, save_replica


def test_a_load_arrives_as_it_would_be_sent() -> None:
    requests = requests_for(LOAD, REPLICA)
    assert len(requests) == pytest.approx(100, abs=40)
    assert {len(each.request.prompt_token_ids) for each in requests} == {96}
    assert all(each.received_ns - each.marks[0].begin_ns == 1_000 + 960 + 500 for each in requests)
    starts = [each.marks[0].begin_ns for each in requests]
    assert starts == sorted(starts)
    assert starts[-1] < 5_000_000_000


def test_every_request_of_a_load_is_answered_and_accounted_for() -> None:
    books = REPLICA.run(requests_for(LOAD, REPLICA), Change(), seed=0)
    assert {account.output_tokens for account in books.accounts} == {12}
    assert {account.finish_reason for account in books.accounts} == {"length"}
    for account in books.accounts:
        assert sum(each.end_ns - each.begin_ns for each in account.intervals) == account.end_ns - account.start_ns


def test_prompts_share_in_the_simulated_cache_what_they_share_in_truth() -> None:
    shared = {**LOAD, "prefix_share": 0.5}
    cached = {
        share: sum(a.cached_tokens for a in REPLICA.run(requests_for(load, REPLICA), Change(), 0).accounts)
        for share, load in (("none", LOAD), ("half", shared))
    }
    num_requests = len(requests_for(shared, REPLICA))
    assert cached["none"] == 0
    assert cached["half"] == pytest.approx(48 * num_requests, rel=0.1)


def test_who_hangs_up_leaves_the_simulated_server() -> None:
    load = {**LOAD, "cancel_probability": 1.0, "cancel_after_s": "0.003"}
    books = REPLICA.run(requests_for(load, REPLICA), Change(), seed=0)
    assert {account.finish_reason for account in books.accounts} == {"abort"}


def test_a_trace_is_replayed_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{at},16,1\n" for at in range(11)))
    assert load_at({"trace": str(trace)}, 5.0)["speed_up"] == pytest.approx(5.0)
    with pytest.raises(ConfigError, match="not for a --duration") as error:
        load_at({"trace": str(trace), "duration_s": 3.0}, 5.0)
    assert "--rate" in str(error.value.info.hint)
    monkeypatch.setattr(planned_load, "MAX_REQUESTS", 10)
    with pytest.raises(ConfigError, match="the trace has 11 requests; a plan simulates at most 10") as error:
        load_at({"trace": str(trace)}, 5.0)
    assert "Cut the trace, or give --rate" in str(error.value.info.hint)
    assert load_at({"trace": str(trace), "rate": 5.0, "duration_s": 30.0}, 5.0)["duration_s"] == 30.0


def test_a_replica_is_the_same_after_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("replica") / "replica.json"
    save_replica(REPLICA, path)
    assert load_replica(path) == REPLICA
    for costs in ({"device": (1.0,)}, {"device": (-1.0,) * 6}, {"move_ns": 1e999}, {"most": ()}, {"persistence": 1.0}):
        broken = msgspec.structs.replace(REPLICA.costs, **costs)
        save_replica(msgspec.structs.replace(REPLICA, costs=broken), path)
        with pytest.raises(ConfigError):
            load_replica(path)
    host, pace = ((-1.0, 0.0, 0.0),) * 5, PaceOf(factors=(0.0,))
    for parts in (
        {"costs": msgspec.structs.replace(REPLICA.costs, host=host)},
        {"costs": msgspec.structs.replace(REPLICA.costs, device=(1e300,) * 6)},
        {"pace": Pace(pace, pace)},
        {"approach": Approach(to_admission_ns=-1)},
    ):
        save_replica(msgspec.structs.replace(REPLICA, **parts), path)
        with pytest.raises(ConfigError, match="costs that cannot be"):
            load_replica(path)
    spread = tuple(tuple(-1.0 if row == at == 0 else 0.0 for at in range(6)) for row in range(6))
    save_replica(
        msgspec.structs.replace(REPLICA, costs=msgspec.structs.replace(REPLICA.costs, covariance=spread)), path
    )
    assert load_replica(path).drawn(1.0, random.Random(0)).costs.is_sound, "a spread below 0 is none"
    path.write_text('{"format": 1}')
    with pytest.raises(ConfigError, match="does not describe a server"):
        load_replica(path)
    with pytest.raises(NotFound, match="there is no file"):
        load_replica(path.with_name("none.json"))
