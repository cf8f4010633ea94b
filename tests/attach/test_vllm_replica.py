"""vLLM's own scheduler under a virtual clock: a run that it decides is decided so again from the ledger of that run."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from splittime.attach.settings import VllmSettings, changed
from splittime.attach.simulators import simulator_of
from splittime.attach.versions import vllm_version
from splittime.attach.vllm_engine import VllmEngine, by_plan
from splittime.attach.vllm_replay import ready_ns, replay
from splittime.attach.vllm_replica import VllmReplica
from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.asked import Asked, asked_requests
from splittime.simulate.change import Change
from splittime.simulate.costed import Answers, output_token
from splittime.simulate.recorded import Recorded, read_ledger
from splittime.simulate.replica import Approach
from splittime.simulate.run import Delivery, serve_each
from splittime.simulate.shape import StepShape, StepTime, shape_of_record
from splittime.simulate.trace import TracedRequest
from splittime.simulate.what_if import predict, recorded_load, write_simulated

pytestmark = pytest.mark.vllm

LENGTH = 256
TIGHT = VllmSettings(max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=20, block_size=16)

SETTINGS = st.builds(
    VllmSettings,
    max_model_len=st.just(LENGTH),
    max_num_seqs=st.sampled_from((1, 3, 12)),
    max_num_batched_tokens=st.sampled_from((16, 64, 300)),
    num_blocks=st.sampled_from((16, 20, 60)),
    block_size=st.sampled_from((16,)),
    policy=st.sampled_from(("fcfs", "priority")),
    enable_prefix_caching=st.booleans(),
    long_prefill_token_threshold=st.sampled_from((0, 8)),
    watermark=st.sampled_from((0.0, 0.1)),
)


class OwnCosts:
    """Steps of other lengths, so that who comes when differs."""

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        device_ns = 900 + 31 * shape.tokens + now_ns % 97
        return StepTime(plan_ns=20 + shape.rows, device_ns=device_ns, commit_ns=15, host_gap_ns=9)


def requests(seed: int, count: int = 40) -> list[TracedRequest]:
    """Returns requests in bursts: some ask what was asked before or go on with an answer, some leave, some meet a stop
    string, some are of another priority."""
    rng, at_ns, asked = random.Random(seed), 0, []
    for _ in range(count):
        at_ns += rng.choice((0, 3, 700, 9_000))
        prompt = tuple(rng.randrange(1_000) for _ in range(rng.choice((1, 15, 17, 40, 100))))
        if asked and rng.random() < 0.5:
            before = rng.choice(asked)
            answer = (output_token(f"asked-{asked.index(before)}"),) * before.output_tokens
            prompt = (*before.prompt, *rng.choice((answer, answer[:20], ())), *prompt)[: LENGTH - 1]
        leaves_ns = at_ns + rng.choice((0, 500, 5_000, 40_000)) if rng.random() < 0.2 else None
        most = min(rng.choice((1, 2, 8, 40, 120)), LENGTH - len(prompt))
        asked.append(Asked(at_ns, prompt, most, leaves_ns, priority=rng.choice((0, 0, 1, -3))))
    return [_hashed(traced, rng) for traced in asked_requests(asked, Approach(5, 0.3, 2), LENGTH)]


def _hashed(traced: TracedRequest, rng: random.Random) -> TracedRequest:
    """Returns a request whose account says what its prompt and answer begin with, as a server's would."""
    name, prompt = traced.request.request_id, traced.request.prompt_token_ids
    answer = answer_hashes(prompt, (output_token(name),) * (traced.request.sampling.max_tokens or 1))
    hashes = prompt_hashes(prompt)
    known = {
        "prompt_parts": hashes.parts,
        "prefixes": hashes.prefixes,
        "answer_prefixes": answer,
    }
    account = msgspec.structs.replace(traced.account, **known)
    stops_after = rng.choice((1, 3)) if rng.random() < 0.2 else None
    return traced._replace(account=account, stops_after=stops_after)


def served(config: VllmSettings, asked: Sequence[TracedRequest]) -> Recorded:
    clock, answers = VirtualClock(), Answers()
    engine = VllmEngine(config, clock, by_plan(OwnCosts()), answers, asked)
    accounts: list[Any] = []
    steps: list[Any] = []
    around = QueueLimits(2**40, 2**40), Delivery(11, 13, 17), engine.after_step_ns, answers
    serve_each(list(asked), engine.run, clock, *around, accounts.append, steps.append)
    told = {**msgspec.to_builtins(config), "async_scheduling": False, "kv_cache_groups": ["FullAttentionSpec"]}
    facts = ServerFacts(version="", model="", max_model_len=LENGTH, settings=told, engine=f"vllm {vllm_version()}")
    return Recorded(accounts, steps, facts)


@settings(max_examples=40)
@given(SETTINGS, st.integers(0, 10_000))
def test_a_simulated_run_is_decided_again_from_its_ledger(config: VllmSettings, seed: int) -> None:
    recorded = served(config, requests(seed))
    assert replay(recorded) is None


@settings(max_examples=20)
@given(SETTINGS, st.integers(0, 10_000))
def test_accounts_and_steps_of_a_simulated_run_sum(config: VllmSettings, seed: int) -> None:
    asked = requests(seed)
    recorded = served(config, asked)
    assert {each.request_id for each in recorded.accounts} == {each.request.request_id for each in asked}
    verify_steps(recorded.steps)
    steps = {step.step_id: step for step in recorded.steps}
    for account in recorded.accounts:
        account.verify()
        assert all(account.token_ready_ns[i] == ready_ns(steps[s]) for i, s in enumerate(account.token_steps))
        waits = [each for each in account.intervals if each.stage in (Stage.QUEUE, Stage.PREEMPTED)]
        assert all(each.cause is not None for each in waits)
    assert sum(len(step.victims) for step in recorded.steps) == sum(each.num_preemptions for each in recorded.accounts)


def test_a_tight_cache_preempts_and_its_requests_say_so() -> None:
    recorded = served(TIGHT, requests(3, 60))
    assert any(step.victims for step in recorded.steps)
    again = [each for account in recorded.accounts for each in account.intervals if each.stage is Stage.PREEMPTED]
    assert {each.cause for each in again} & {Cause.KV_BLOCKS, Cause.POLICY}
    assert replay(recorded) is None


def test_prompts_are_found_in_the_cache_and_the_replay_finds_them_too() -> None:
    recorded = served(msgspec.structs.replace(TIGHT, num_blocks=200), requests(5, 60))
    assert sum(account.cached_tokens > 0 for account in recorded.accounts) > 5
    assert replay(recorded) is None


def test_another_decision_is_noticed_where_it_is_made() -> None:
    recorded = served(TIGHT, requests(7))
    other = msgspec.structs.replace(recorded.steps[9], num_waiting=recorded.steps[9].num_waiting + 1)
    steps = [*recorded.steps[:9], other, *recorded.steps[10:]]
    found = replay(msgspec.structs.replace(recorded, steps=steps))
    assert found is not None
    assert found.step_id <= 10


def test_other_settings_than_the_recorded_ones_diverge() -> None:
    recorded = served(TIGHT, requests(7))
    told = recorded.facts.settings | {"max_num_seqs": 2}
    assert replay(msgspec.structs.replace(recorded, facts=msgspec.structs.replace(recorded.facts, settings=told)))


def test_the_costs_of_a_plan_are_those_of_its_record() -> None:
    seen: list[StepShape] = []

    class Watching(OwnCosts):
        def of(self, shape: StepShape, now_ns: int) -> StepTime:
            seen.append(shape)
            return super().of(shape, now_ns)

    clock, answers, asked, steps = VirtualClock(), Answers(), requests(11), []
    engine = VllmEngine(TIGHT, clock, by_plan(Watching()), answers, asked)
    around = QueueLimits(2**40, 2**40), Delivery(), engine.after_step_ns, answers
    serve_each(list(asked), engine.run, clock, *around, lambda account: None, steps.append)
    assert seen == [shape_of_record(step) for step in steps]


def test_a_change_is_predicted_and_its_run_kept(tmp_path) -> None:
    recorded = served(msgspec.structs.replace(TIGHT, num_blocks=200), requests(13, 80))
    simulator = simulator_of(recorded.facts)
    prediction = predict(recorded, Change({"max_num_seqs": 2}), draws=2, to_replica=simulator.to_replica)
    queue = prediction.figure("queue_ms_p50")
    assert queue.after > 2 * queue.before
    load = recorded_load(recorded, None, simulator.to_replica)
    write_simulated(load, Change({"max_num_seqs": 2}), tmp_path / "two.sqlite")
    kept = read_ledger(tmp_path / "two.sqlite")
    assert (kept.facts.engine, kept.facts.simulated) == (f"vllm {vllm_version()}", "max_num_seqs 2")
    assert max(step.num_running for step in kept.steps) == 2
    assert replay(kept) is None


def test_the_same_settings_give_what_was_recorded_again() -> None:
    recorded = served(msgspec.structs.replace(TIGHT, num_blocks=200), requests(13, 80))
    prediction = predict(recorded, Change(), draws=2, to_replica=simulator_of(recorded.facts).to_replica)
    figure = prediction.figure("e2e_ms_p50")
    assert figure.before == pytest.approx(figure.recorded, rel=0.2)


def test_a_request_that_never_fits_is_an_error_and_not_a_wait_for_ever() -> None:
    with pytest.raises(ConfigError, match="never fits into 4 blocks"):
        served(msgspec.structs.replace(TIGHT, num_blocks=4), requests(3))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_prefill_tokens", 32, "vLLM's scheduler has no 'max_prefill_tokens'"),
        ("policy", "deadline", "bad setting"),
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("num_blocks", 15, "room for a request of max_model_len"),
        ("max_num_batched_tokens", 4, "at least max_num_seqs"),
        ("enable_chunked_prefill", False, "without chunked prefill"),
    ],
)
def test_a_change_that_vllm_cannot_have_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        changed(TIGHT, Change({name: value}))


def test_a_replica_is_a_value_of_its_own_kind() -> None:
    recorded = served(msgspec.structs.replace(TIGHT, num_blocks=200), requests(13, 80))
    replica = simulator_of(recorded.facts).to_replica(recorded)
    assert isinstance(replica, VllmReplica)
    assert replica.config.num_blocks == 200
