"""A ledger's load is asked again: as much, when it came, with in common what was; what is no use is refused."""

from typing import Any

import msgspec
import pytest
from known_runs import TIGHT, record_run

from splittime.bench.book.records import Phase
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.simulate.recorded import Recorded
from splittime.simulate.what_if import requests_of
from splittime.tune import measure
from splittime.tune.measure import RecordedLoad, busiest
from splittime.wire.scrape import ServerLimits

LIMITS = ServerLimits(vocab_size=4096, max_model_len=256, block_size=16)


def recorded(count: int = 60, **facts: Any) -> Recorded:
    found = record_run(msgspec.structs.replace(TIGHT, num_blocks=60), seed=4, count=count, have_deadlines=False)
    return msgspec.structs.replace(found, facts=msgspec.structs.replace(found.facts, version="1", **facts))


def test_the_requests_come_again_as_they_came() -> None:
    ledger = recorded()
    schedule = RecordedLoad(ledger, "1", 2)(LIMITS)
    came = sorted(requests_of(ledger, ledger.facts.max_model_len), key=lambda one: one.arrived_ns)
    assert [len(one.prompt) for one in schedule.requests] == [len(one.request.prompt_token_ids) for one in came]
    assert [one.at_ns for one in schedule.requests] == [one.arrived_ns - came[0].arrived_ns for one in came]
    assert all(0 <= token < 4096 for one in schedule.requests for token in one.prompt)


def test_what_was_in_common_is_in_common_and_no_run_finds_another_s() -> None:
    load = RecordedLoad(recorded(), "1", 2)
    first, second = load(LIMITS), load(LIMITS)
    assert first.digest == second.digest
    assert {one.prompt[:16] for one in first.requests}.isdisjoint(
        one.prompt[:16] for one in second.requests if len(one.prompt) >= 16
    )
    beginnings = [one.prompt[:20] for one in first.requests if len(one.prompt) > 20]
    assert len(set(beginnings)) < len(beginnings)


def test_the_busiest_stretch_is_taken() -> None:
    came = requests_of(recorded(), 256)
    span_ns = max(one.arrived_ns for one in came) - min(one.arrived_ns for one in came)
    found = busiest(came, span_ns // 4)
    assert found[-1].arrived_ns - found[0].arrived_ns < span_ns // 4
    for one in came:
        near = [each for each in came if 0 <= each.arrived_ns - one.arrived_ns < span_ns // 4]
        assert len(near) <= len(found)


def test_the_request_at_the_end_of_the_warm_up_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    load = RecordedLoad(recorded(), "1", 2)
    times = [one.at_ns or 0 for one in load(LIMITS).requests]
    from_ns = next(at_ns for at_ns in times if at_ns > times[-1] // 10)
    monkeypatch.setattr(measure, "WARM_UP_SHARE", from_ns / (times[-1] + 1))
    schedule = load(LIMITS)
    assert schedule.measured_from_ns == from_ns
    assert [one.phase is Phase.MEASURED for one in schedule.requests] == [at_ns >= from_ns for at_ns in times]


@pytest.mark.parametrize(
    ("facts", "count", "words"),
    [
        ({"simulated": "max_num_seqs 4"}, 60, "simulated"),
        ({"machine": Machine(cpu="x", threads=1, cores=64)}, 60, "number of cores: 64 there, 2 here"),
        ({}, 5, "have 5 requests"),
    ],
)
def test_a_ledger_that_is_no_use_is_refused(facts: dict[str, Any], count: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RecordedLoad(recorded(count, **facts), "1", 2)


def test_a_ledger_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="another version: 1 there, 2 here"):
        RecordedLoad(recorded(), "2", 2)
