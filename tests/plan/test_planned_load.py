"""A load of `bench` meets a simulated server as it would meet a real one."""

import random
from pathlib import Path

import msgspec
import pytest
from known_replicas import LOAD, REPLICA

from splittime.core.errors import ConfigError, NotFound
from splittime.plan import load as planned_load
from splittime.plan.load import lengths_words, load_at, requests_for
from splittime.simulate.change import Change
from splittime.simulate.cost import Pace, PaceOf
from splittime.simulate.recorded import Mix, mix_of
from splittime.simulate.replica import Approach, Replica, load_replica, save_replica


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


OF_ITS_OWN = msgspec.structs.replace(REPLICA, mix=Mix(((130, 33), (130, 33), (40, 7)), cached_share=0.5))
WHEN = {"rate": 20.0, "duration_s": 5.0, "seed": 3}


def lengths_of(load: dict, replica: Replica = OF_ITS_OWN) -> set[tuple[int, int]]:
    requests = requests_for({**WHEN, **load}, replica)
    return {(len(each.request.prompt_token_ids), each.request.sampling.max_tokens) for each in requests}


def test_a_server_is_planned_with_the_requests_that_it_served() -> None:
    """The lengths come from its own rows, prompt and answer of one row together, unless a flag says others."""
    assert lengths_of({}) == {(130, 33), (40, 7)}
    assert lengths_of({"input_tokens": "96", "output_tokens": "12"}) == {(96, 12)}
    assert lengths_of({"output_tokens": "12"}) == {(130, 12), (40, 12)}
    assert lengths_of({"input_tokens": "96"}) == {(96, 33), (96, 7)}
    assert lengths_of({}, REPLICA) == {(512, 128)}, "of which nothing is known but its speed"
    small = msgspec.structs.replace(OF_ITS_OWN.config, max_model_len=200)
    assert lengths_of({}, msgspec.structs.replace(OF_ITS_OWN, config=small)) == {(130, 33), (40, 7)}


@pytest.mark.parametrize(
    ("load", "share"),
    [({}, 0.5), ({"output_tokens": "2"}, 0.5), ({"input_tokens": "96"}, 0), ({"prefix_share": 0.0}, 0)],
)
def test_prompts_of_its_own_have_as_much_in_common_as_they_had(load: dict, share: float) -> None:
    accounts = OF_ITS_OWN.run(requests_for({**WHEN, **load}, OF_ITS_OWN), Change(), 0).accounts
    cached, prompts = (sum(getattr(one, name) for one in accounts) for name in ("cached_tokens", "prompt_tokens"))
    assert cached / prompts == pytest.approx(share, abs=0.06)


def test_it_is_told_whence_lengths_are() -> None:
    assert lengths_words({}, OF_ITS_OWN) == "as the 3 requests that it served, and 50% of the prompts' tokens cached"
    assert lengths_words({"input_tokens": "9"}, OF_ITS_OWN) == "as the answers of 3 requests that it served"
    assert lengths_words({"output_tokens": "9", "prefix_share": 0.1}, OF_ITS_OWN).startswith("as the prompts of 3")
    assert lengths_words(LOAD, OF_ITS_OWN) == lengths_words({"trace": "a.csv"}, REPLICA) == ""
    assert "nothing is known" in lengths_words({}, REPLICA)


def test_the_mix_of_a_ledger_is_of_answers_that_ended() -> None:
    accounts = REPLICA.run(requests_for(LOAD, REPLICA), Change(), seed=0).accounts
    left = msgspec.structs.replace(accounts[0], finish_reason="abort", output_tokens=1)
    assert mix_of([left, *accounts[1:]]) == Mix(((96, 12),) * (len(accounts) - 1))
    assert mix_of([left]) == Mix(((96, 1),)), "nobody knows better"
    assert mix_of([]) is None
    half = [msgspec.structs.replace(accounts[0], cached_tokens=72), accounts[1]]
    assert mix_of(half) == Mix(((96, 12),) * 2, cached_share=72 / 192)


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
