"""A damaged ledger is refused, with the step or the request that is wrong; every honest one passes."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from known_runs import TIGHT, record_run

from splittime.attach.engine_books import DecidedPlan, EngineBooks
from splittime.attach.request_book import AskedRequest
from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.simulate.change import Change
from splittime.simulate.recorded import Recorded, require_sound_accounts, require_sound_steps
from splittime.simulate.replica import replica_of
from splittime.simulate.trace import traced_requests
from splittime.simulate.what_if import requests_of

CONFIG = msgspec.structs.replace(TIGHT, max_num_seqs=4, num_blocks=60)
LENGTH = CONFIG.max_model_len


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record_run(CONFIG, seed=9, count=80, have_deadlines=False)


@pytest.fixture(scope="module")
def recorded_ahead() -> Recorded:
    return record_run(CONFIG, seed=9, count=80, have_deadlines=False, plans_ahead=True)


def with_step(recorded: Recorded, **wrong: Any) -> Recorded:
    steps = list(recorded.steps)
    steps[40] = msgspec.structs.replace(steps[40], **wrong)
    return msgspec.structs.replace(recorded, steps=steps)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"device_ns": 2**62}, "and its parts 4611686018427"),
        ({"device_ns": 2**70}, "and its parts 11805916207174"),
        ({"offload_ns": 2**62}, "and its parts"),
        ({"plan_ns": -1}, "plan_ns -1"),
        ({"idle_ns": -1}, "idle_ns -1"),
        ({"kv_tokens_read": -(10**15)}, "kv_tokens_read -1000000000000000"),
        ({"kv_tokens_read": 10**18}, "reads 1000000000000000000 KV positions; its rows allow"),
        ({"offloaded_blocks": -1}, "offloaded_blocks -1"),
        ({"decode_tokens": 10**9}, "1000000000 tokens"),
        ({"host_gap_ns": 2**62}, "with a gap of 4611686018427"),
        ({"end_ns": 2**62}, "it can take 1 to"),
        ({"execution": "moon"}, "is run 'moon'; it can be host, eager, captured"),
        ({"rows": (("r0", -1, 1),)}, "a row of 1 tokens from position -1 on"),
        ({"rows": (("r0", 3, 0),)}, "a row of 0 tokens"),
        ({"rows": (("r0", LENGTH, 1),)}, f"there are positions 0 to {LENGTH}"),
    ],
)
def test_a_step_that_cannot_have_been_is_refused(recorded: Recorded, wrong: dict[str, Any], words: str) -> None:
    damaged = with_step(recorded, **wrong)
    with pytest.raises(ConfigError, match=f"step {damaged.steps[40].step_id} .*{words}.*that cannot be") as raised:
        replica_of(damaged)
    assert "Record another" in str(raised.value.info.hint)


@pytest.mark.parametrize(
    "wrong", [{"hidden_ns": 10**15}, {"ahead_ns": 10**15}, {"ahead_ns": 10**15, "hidden_ns": 10**15}]
)
def test_what_the_host_did_beside_a_step_is_within_the_steps(recorded_ahead: Recorded, wrong: dict[str, int]) -> None:
    replica_of(recorded_ahead)
    with pytest.raises(ConfigError, match="that cannot be"):
        replica_of(with_step(recorded_ahead, **wrong))


def test_steps_out_of_order_are_refused(recorded: Recorded) -> None:
    earlier = 1_000 * 10**9
    steps = [
        msgspec.structs.replace(step, begin_ns=step.begin_ns - earlier, end_ns=step.end_ns - earlier)
        if odd % 2
        else step
        for odd, step in enumerate(recorded.steps)
    ]
    with pytest.raises(ConfigError, match=f"step {steps[1].step_id} begins .* ns before the step before it"):
        replica_of(msgspec.structs.replace(recorded, steps=steps))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: {"intervals": a.intervals[::-1]}, "has a gap, or ends before it starts"),
        (lambda a: {"end_ns": a.start_ns - 1}, "has a gap, or ends before it starts"),
        (lambda a: {"output_tokens": -5}, "-5"),
        (lambda a: {"prompt_tokens": -5}, "-5"),
    ],
)
@pytest.mark.parametrize("use", [replica_of, lambda damaged: traced_requests(damaged.accounts, LENGTH)])
def test_an_account_that_cannot_have_been_is_refused(
    recorded: Recorded,
    spoil: Callable[[ClosedAccount], dict[str, Any]],
    words: str,
    use: Callable[[Recorded], object],
) -> None:
    accounts = list(recorded.accounts)
    one = next(number for number, account in enumerate(accounts) if account.output_tokens > 1)
    accounts[one] = msgspec.structs.replace(accounts[one], **spoil(accounts[one]))
    with pytest.raises(ConfigError, match=f"the account of request {accounts[one].request_id} .*{words}"):
        use(msgspec.structs.replace(recorded, accounts=accounts))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("plans_ahead", [False, True])
def test_honest_ledgers_pass(seed: int, plans_ahead: bool) -> None:
    """Preemptions, moves of blocks, sleep, ends of every kind; whole, cut off, and of stretches out of order."""
    config = msgspec.structs.replace(TIGHT, num_host_slots=8)
    run = record_run(config, seed, count=60, sleeps_at_ns=300_000, plans_ahead=plans_ahead)
    require_sound_accounts(run.accounts)
    for steps in (run.steps, run.steps[7:-5], [*run.steps[50:60], *run.steps[20:30]]):
        require_sound_steps(steps, config.max_model_len)


def test_simulated_ledgers_pass(recorded: Recorded, recorded_ahead: Recorded) -> None:
    for each in (recorded, recorded_ahead):
        books = replica_of(each).run(requests_of(each, LENGTH), Change(), seed=0)
        require_sound_steps(books.steps, LENGTH)
        require_sound_accounts(books.accounts)


def plan(start: int, count: int) -> DecidedPlan:
    return DecidedPlan((("a", start, count),), int(count == 1), start + count, (), (), (), (), 1, 1, 0)


def books_of_vllm(plans_ahead: bool) -> list[StepRecord]:
    """Two steps, the second planned beside the first, until after the first one's result was there."""
    books = EngineBooks(plans_ahead)
    books.receive(AskedRequest("a", 0, 4, 9), 100, 100)
    first, second = books.begin(plan(0, 4), 200, 210), books.begin(plan(4, 1), 220, 40_000)
    assert first is not None
    assert second is not None
    books.commit(first, [("a", 1)], 30_000)
    one = books.end_step(first, {}, 30_000, 41_000)
    books.commit(second, [("a", 1)], 50_000)
    return [one, books.end_step(second, {}, 50_000, 50_010)]


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_books_of_another_engine_pass(plans_ahead: bool) -> None:
    steps = books_of_vllm(plans_ahead)
    assert steps[0].hidden_ns > steps[0].end_ns - steps[0].begin_ns or not plans_ahead
    require_sound_steps(steps, 5)
    with pytest.raises(ConfigError, match="a row of 1 tokens from position 4 on; there are positions 0 to 4"):
        require_sound_steps(steps, 4)
