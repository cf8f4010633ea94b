"""vLLM's own scheduler under a virtual clock: a run that it decides is decided so again from the ledger of that run."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Queue
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCore

from splittime.attach.settings import VllmSettings, changed
from splittime.attach.simulators import VllmReplica, simulator_of
from splittime.attach.versions import vllm_version
from splittime.attach.vllm_engine import VllmEngine, by_plan, ready_ns, replay
from splittime.attach.vllm_offline import PlannedStep, offline_request, offline_scheduler, sampled
from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.plan.load import Asked, asked_requests
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.change import Change
from splittime.simulate.costed import Answers, output_token
from splittime.simulate.recorded import Recorded, read_ledger
from splittime.simulate.replica import Approach
from splittime.simulate.run import Delivery, SimulatedServer
from splittime.simulate.shape import StepShape, StepTime, shape_of_record
from splittime.simulate.trace import TracedRequest, ended_by_token
from splittime.simulate.what_if import predict, recorded_load, write_simulated

pytestmark = pytest.mark.vllm

LENGTH = 256
ONE_AT_A_TIME = VllmSettings(
    max_num_seqs=1, max_num_batched_tokens=16, num_blocks=16, block_size=16, max_model_len=LENGTH
)
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
    async_scheduling=st.booleans(),
)


AROUND = Delivery(11, 13, 17)


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


def ended_by_tokens(asked: Sequence[TracedRequest], seed: int) -> list[TracedRequest]:
    """Returns the requests; a token ends some of them before they have all that they may have."""
    rng, ended = random.Random(seed), []
    for traced in asked:
        most = traced.request.sampling.max_tokens or 1
        if most > 1 and traced.stops_after is None and rng.random() < 0.3:
            account = msgspec.structs.replace(traced.account, max_tokens=most)
            traced = ended_by_token(traced._replace(account=account), rng.randrange(1, most))
        ended.append(traced)
    return ended


def served(config: VllmSettings, asked: Sequence[TracedRequest], delivery: Delivery = AROUND) -> Recorded:
    clock, answers = VirtualClock(), Answers()
    engine = VllmEngine(config, clock, by_plan(OwnCosts()), answers, asked)
    accounts: list[Any] = []
    steps: list[Any] = []
    around = QueueLimits(2**40, 2**40), delivery, engine.after_step_ns, answers
    SimulatedServer(clock, *around, accounts.append, steps.append).run(engine.run, list(asked))
    told = {**msgspec.to_builtins(config), "kv_cache_groups": ["FullAttentionSpec"]}
    facts = ServerFacts(version="", model="", max_model_len=LENGTH, settings=told, engine=f"vllm {vllm_version()}")
    return Recorded(accounts, steps, facts)


@example(ONE_AT_A_TIME, 241)  # two came at one instant
@settings(max_examples=40)
@given(SETTINGS, st.integers(0, 10_000))
def test_a_simulated_run_is_decided_again_from_its_ledger(config: VllmSettings, seed: int) -> None:
    recorded = served(config, ended_by_tokens(requests(seed), seed))
    assert replay(recorded) is None


@settings(max_examples=20)
@given(SETTINGS, st.integers(0, 10_000))
def test_accounts_and_steps_of_a_simulated_run_sum(config: VllmSettings, seed: int) -> None:
    asked = ended_by_tokens(requests(seed), seed)
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
    SimulatedServer(clock, *around, lambda account: None, steps.append).run(engine.run, list(asked))
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


class OwnLoop(EngineCore):
    """vLLM's own loop for asynchronous scheduling around our scheduler with books; its device is a clock."""

    def __init__(self, config: VllmSettings, clock: VirtualClock, answers: Answers) -> None:
        self.scheduler = offline_scheduler(config, clock, by_plan(OwnCosts()))
        self.batch_queue_size, self.batch_queue = 2, deque(maxlen=2)
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False
        self.is_ec_consumer = True  # up to 0.30
        self.model_executor, self.vllm_config = self, self.scheduler.vllm_config
        self.aborts_queue: Queue = Queue()
        self._clock, self._answers, self._free_ns = clock, answers, 0
        self.leavers: list[tuple[int, str]] = []  # the first that leaves last

    def hear_of_leavers(self, abort: Callable[[str], None]) -> None:
        while self.leavers and self.leavers[-1][0] <= self._clock.now_ns():
            abort(self.leavers.pop()[1])

    def _should_throttle_prefills(self) -> bool:
        return False

    @contextmanager
    def capture_iteration_details(self, plan: Any) -> Iterator[None]:
        yield None

    def _attach_iteration_details(self, outputs: Any, details: Any) -> None:
        """Nobody asks for them."""

    def _attach_weight_version(self, outputs: Any) -> None:
        """Nobody asks for it."""

    def execute_model(self, plan: Any, non_block: bool) -> "OwnLoop":
        names = plan.num_scheduled_tokens
        samples = frozenset(name for name in names if not self.scheduler.requests[name].is_prefill_chunk)
        self._launched, time = PlannedStep(plan, samples), self.scheduler.books.planned
        if names:
            self._free_ns = max(self._free_ns, self._clock.now_ns()) + time.device_ns
        self._done_ns = self._free_ns if names else 0
        return self.sample_tokens(None, non_block)

    def sample_tokens(self, grammar: object, non_block: bool) -> Any:
        return Result(partial(self._result, self._launched, self._done_ns))

    def _result(self, planned: PlannedStep, done_ns: int) -> Any:
        self._clock.advance_to(done_ns - 1)
        self.hear_of_leavers(lambda name: self.aborts_queue.put([name]))
        self._clock.advance_to(done_ns)
        return sampled(self.scheduler, planned, self._answers)


class Result(NamedTuple):
    result: Callable[[], Any]


def by_own_loop(config: VllmSettings, asked: Sequence[TracedRequest]) -> list[StepRecord]:
    """Returns the steps of vLLM's own loop, which takes in who has come before it plans."""
    clock, answers, records = VirtualClock(), Answers(), []
    loop = OwnLoop(config, clock, answers)
    coming = deque(sorted(asked, key=lambda traced: traced.received_ns))
    for traced in asked:
        answers.learn(traced.request.request_id, len(traced.request.prompt_token_ids), traced.answer)
    leavers = [(max(each.leaves_ns, each.received_ns), each.request.request_id) for each in asked if each.leaves_ns]
    loop.leavers = sorted(leavers, reverse=True)
    while coming or loop.scheduler.has_requests() or loop.batch_queue:
        if not loop.scheduler.has_unfinished_requests() and not loop.batch_queue:
            clock.advance_to(coming[0].received_ns if coming else 0)
        while coming and coming[0].received_ns <= clock.now_ns():
            loop.scheduler.add_request(offline_request(coming.popleft(), config))
        loop.hear_of_leavers(lambda name: loop.abort_requests([name]))
        loop.step_with_batch_queue()
        _, record = loop.scheduler.told.take()
        if record is not None:
            records.append(record)
            clock.advance(loop.scheduler.books.ended.host_gap_ns)
    return records


@settings(max_examples=20)
@given(SETTINGS, st.integers(0, 10_000))
def test_our_loop_plans_ahead_as_vllms_own_does(config: VllmSettings, seed: int) -> None:
    config = msgspec.structs.replace(config, async_scheduling=True)
    asked = ended_by_tokens([each._replace(stops_after=None) for each in requests(seed)], seed)
    assert served(config, asked, Delivery()).steps == by_own_loop(config, asked)


def test_a_run_that_plans_ahead_hides_its_plans_and_computes_rows_for_nothing() -> None:
    asked = ended_by_tokens(requests(5, 60), 5)
    ahead = served(msgspec.structs.replace(TIGHT, num_blocks=200, async_scheduling=True), asked)
    in_turn = served(msgspec.structs.replace(TIGHT, num_blocks=200), asked)
    assert sum(step.hidden_ns > 0 for step in ahead.steps) > len(ahead.steps) / 2
    rows = [sum(len(step.rows) for step in run.steps) for run in (ahead, in_turn)]
    assert rows[0] > rows[1]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_request_that_never_fits_is_an_error_and_not_a_wait_for_ever(is_ahead: bool) -> None:
    with pytest.raises(ConfigError, match="never fits into 4 blocks"):
        served(msgspec.structs.replace(TIGHT, num_blocks=4, async_scheduling=is_ahead), requests(3))


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
