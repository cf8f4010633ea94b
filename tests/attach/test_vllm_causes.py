"""Causes that are known by construction, stated by vLLM's real scheduler, to the step. Needs no server."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm_driver import Driver

from splittime.attach import vllm_scheduler
from splittime.attach.engine_books import UNKNOWN_AHEAD
from splittime.attach.versions import facts_of
from splittime.attach.vllm_offline import OfflineAsyncScheduler
from splittime.attach.vllm_scheduler import Bookkeeping
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps

pytestmark = pytest.mark.vllm

GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="a+")}


def test_slots():
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, most=3)
    for _ in range(2):
        driver.step()
        assert driver.now("c") == (Stage.QUEUE, Cause.BATCH_SLOTS)
    driver.step()  # both end with it
    driver.step()
    assert driver.now("c") == (Stage.DECODE, None)
    assert [len(record.rows) for record in driver.records] == [2, 2, 2, 1]


def test_token_budget():
    driver = Driver(max_num_batched_tokens=32)
    driver.add("a", prompt=40)
    driver.add("b", prompt=40)
    driver.step()
    assert driver.now("b") == (Stage.QUEUE, Cause.TOKEN_BUDGET)
    assert driver.now("a") == (Stage.PREFILL, None)
    driver.step()
    assert driver.now("b")[0] is Stage.PREFILL
    driver.add("c", prompt=40)
    driver.add("d", prompt=40)
    driver.step()
    assert driver.records[2].rows == (("a", 40, 1), ("b", 24, 16), ("c", 0, 15))
    assert driver.now("d") == (Stage.QUEUE, Cause.TOKEN_BUDGET)


def test_a_budget_that_decodes_take_stalls_a_half_computed_prompt():
    driver = Driver(max_num_batched_tokens=16, max_num_seqs=16)
    driver.add("long", prompt=200)
    driver.step()
    for number in range(15):
        driver.add(f"short{number}", prompt=1)
    seen = set()
    for _ in range(8):
        driver.step()
        seen |= {driver.now(name) for name in driver.scheduler.books.books}
    assert (Stage.QUEUE, Cause.TOKEN_BUDGET) in seen
    assert driver.now("long")[0] is Stage.PREFILL  # vLLM serves who runs in the order of arrival


def test_blocks_and_who_stands_behind():
    driver = Driver(num_blocks=16)
    driver.add("a", prompt=150)
    driver.add("b", prompt=150)
    driver.add("c", prompt=5)
    driver.step()
    assert driver.now("b") == (Stage.QUEUE, Cause.KV_BLOCKS)
    assert driver.now("c") == (Stage.QUEUE, Cause.POLICY)
    assert driver.records[0].blocks_used == 10


def test_a_preemption_names_its_victim_and_what_is_computed_again():
    driver = Driver(num_blocks=16, enable_prefix_caching=False)
    driver.add("a", prompt=126, most=60)
    driver.add("b", prompt=126, most=60)
    driver.step(3)
    assert driver.records[-1].victims == ()
    while not (driver.records and driver.records[-1].victims):
        driver.step()
    record = driver.records[-1]
    assert record.victims == ("b",)
    assert driver.now("b") == (Stage.PREEMPTED, Cause.KV_BLOCKS)
    assert [name for name, _, _ in record.rows] == ["a"]
    while driver.now("b")[0] is Stage.PREEMPTED:
        driver.step()
    while "b" not in driver.ended:
        driver.step()
    stages = [mark.stage for mark in driver.ended["b"].marks]
    assert stages == [Stage.QUEUE, Stage.PREFILL, Stage.DECODE, Stage.PREEMPTED, Stage.RECOMPUTE, Stage.DECODE]
    assert driver.ended["b"].num_preemptions == 1
    verify_steps(driver.records)


@pytest.mark.parametrize(
    ("state", "runs"),
    [
        (PauseState.PAUSED_ALL, (Stage.DECODE_STALL, Cause.PAUSED)),
        (PauseState.PAUSED_NEW, (Stage.DECODE, None)),
    ],
)
def test_pauses(state, runs):
    driver = Driver()
    driver.add("a")
    driver.step()
    driver.add("b")
    driver.scheduler.set_pause_state(state)
    driver.step()
    assert driver.now("b") == (Stage.QUEUE, Cause.PAUSED)
    assert driver.now("a") == runs
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.step()
    assert driver.now("b") == (Stage.DECODE, None)


def test_a_pause_is_told_when_it_begins_since_no_plan_follows():
    """vLLM's engine does not plan while it is paused for all."""
    driver = Driver(max_num_seqs=1)
    driver.add("a", most=3)
    driver.add("b", most=3)
    driver.step()
    driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    driver.add("late", most=3)
    assert driver.now("a") == (Stage.DECODE_STALL, Cause.PAUSED)
    assert driver.now("b") == (Stage.QUEUE, Cause.PAUSED)
    assert driver.now("late") == (Stage.QUEUE, Cause.PAUSED)
    driver.clock.advance(5_000)
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.step()
    assert driver.now("a") == (Stage.DECODE, None)
    assert driver.records[-1].idle_ns >= 5_000  # nobody's work kept the device waiting
    verify_steps(driver.records)


def test_a_preemption_by_no_plan_is_in_the_next_step():
    driver = Driver()
    driver.add("a", prompt=40)
    driver.step(2)
    driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert driver.now("a") == (Stage.PREEMPTED, None)
    driver.step()
    assert driver.records[-1].victims == ("a",)
    driver.step(2)
    assert driver.records[-1].victims == ()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.step()
    stages = [mark.stage for mark in driver.ended["a"].marks]
    assert stages[:5] == [Stage.QUEUE, Stage.PREFILL, Stage.DECODE, Stage.PREEMPTED, Stage.RECOMPUTE]
    assert driver.ended["a"].num_preemptions == 1


def test_a_prompt_that_must_go_whole():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=256)
    driver.add("a", prompt=200)
    driver.add("b", prompt=100)
    driver.step()
    assert driver.now("b") == (Stage.QUEUE, Cause.TOKEN_BUDGET)
    driver.step()
    assert driver.now("b") == (Stage.DECODE, None)


def test_a_grammar_that_is_being_compiled():
    driver = Driver()
    driver.add("a", sampling=GRAMMAR)
    driver.add("b")
    driver.step()
    assert driver.now("a") == (Stage.QUEUE, Cause.GRAMMAR)
    assert driver.now("b") == (Stage.DECODE, None)  # it keeps nobody else waiting


def test_a_grammar_that_is_made_while_no_slot_is_free():
    """vLLM leaves its status as it was: it looks again when there is a slot."""
    driver = Driver(max_num_seqs=1)
    driver.add("runs")
    driver.step()
    asking = driver.add("a", sampling=GRAMMAR)
    driver.add("b")
    driver.step()
    assert driver.now("a") == (Stage.QUEUE, Cause.GRAMMAR)
    assert driver.now("b") == (Stage.QUEUE, Cause.BATCH_SLOTS)
    made: Future[object] = Future()
    asking.structured_output_request._grammar = made
    driver.step()
    assert driver.now("a") == (Stage.QUEUE, Cause.GRAMMAR)
    made.set_result(object())
    driver.step()
    assert asking.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert [mark.cause for mark in driver.ended["a"].marks][-2:] == [Cause.GRAMMAR, Cause.BATCH_SLOTS]


def test_blocks_that_one_lacks_whose_grammar_is_made_keep_all_behind_it():
    driver = Driver(num_blocks=5, max_model_len=64)
    driver.add("runs", prompt=40)
    driver.step()
    asking = driver.add("a", prompt=40, sampling=GRAMMAR)
    driver.step()
    asking.structured_output_request._grammar = object()
    driver.add("b", prompt=40)
    driver.step()
    assert asking.status == RequestStatus.WAITING
    assert driver.now("a") == (Stage.QUEUE, Cause.KV_BLOCKS)
    driver.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert driver.ended["b"].marks[-1].cause is Cause.POLICY


def test_prompts_that_are_left_to_other_engines():
    """Data-parallel engines take turns with prompts: why one waits then has no word, and gets none."""
    driver = Driver()
    driver.add("runs")
    driver.step()
    driver.add("a")
    plan = driver.scheduler.schedule(throttle_prefills=True)
    driver.end(plan)
    assert driver.now("a") == (Stage.QUEUE, None)


def test_adapters():
    driver = Driver()
    driver.scheduler.lora_config = SimpleNamespace(max_loras=1)
    driver.add("a", lora_request=LoRARequest("one", 1, "nowhere"))
    driver.add("b", lora_request=LoRARequest("two", 2, "nowhere"))
    driver.step()
    assert driver.now("a") == (Stage.DECODE, None)
    assert driver.now("b") == (Stage.QUEUE, Cause.LORA_SLOTS)


def test_an_abort_in_the_middle_of_a_step():
    driver = Driver()
    driver.add("a")
    driver.add("b")
    driver.step()
    plan = driver.plan()
    driver.scheduler.finish_requests(["a", "unknown"], RequestStatus.FINISHED_ABORTED)
    driver.end(plan)
    assert driver.ended["a"].finish_reason == "abort"
    assert len(driver.ended["a"].token_steps) == 1
    driver.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert sorted(driver.ended) == ["a", "b"]


def test_hits_of_the_prefix_cache():
    driver = Driver()
    driver.add("a", prompt=64, most=2, first=0)
    driver.step(3)
    driver.add("b", prompt=64, most=2, first=0)
    driver.step(3)
    assert (driver.ended["a"].cached_tokens, driver.ended["b"].cached_tokens) == (0, 48)
    assert driver.ended["b"].answer_ids == [7, 7]


def test_steps_that_are_planned_beside_others():
    """vLLM's asynchronous scheduler, driven as its engine drives it: a plan is made while a step runs."""
    driver = Driver(async_scheduling=True)
    assert [each for each in OfflineAsyncScheduler.__mro__ if each in (Bookkeeping, AsyncScheduler, Scheduler)] == [
        Bookkeeping, AsyncScheduler, Scheduler,
    ]  # fmt: skip
    driver.add("a", most=4)
    before = driver.plan()
    while "a" not in driver.ended:
        after = driver.plan()
        driver.end(before)
        before = after
    verify_steps(driver.records)
    assert driver.ended["a"].token_steps == [1, 2, 3, 4]
    assert set(UNKNOWN_AHEAD) <= set(facts_of(driver.scheduler).unknown)
    assert not set(UNKNOWN_AHEAD) & set(facts_of(Driver().scheduler).unknown)
    assert all(record.hidden_ns for record in driver.records[:-1])
    assert all(mark.stage is not Stage.DECODE_STALL for mark in driver.ended["a"].marks)


def test_a_fault_of_ours_ends_the_books_and_no_request(caplog):
    driver = Driver()
    driver.scheduler._st_fail = lambda error: Bookkeeping._st_fail(driver.scheduler, error)
    driver.scheduler.told.stop = lambda why: None
    driver.add("a", most=2)
    driver.scheduler._st_books.begin = lambda *arguments: 1 / 0
    plan = driver.plan()
    assert plan.num_scheduled_tokens == {"a": 20}
    assert "the books of this engine end here" in caplog.text
    driver.scheduler.update_from_output(plan, ModelRunnerOutput(["a"], {"a": 0}, [[7]]))
    assert driver.scheduler.requests["a"].num_output_tokens == 1


def test_arrivals_are_noted_where_the_engine_reads_them():
    vllm_scheduler._note_arrivals()
    first = EngineCore.preprocess_add_request
    vllm_scheduler._note_arrivals()
    assert EngineCore.preprocess_add_request is first


READ = (
    "_pause_state", "max_num_scheduled_tokens", "max_num_running_reqs", "running", "waiting", "requests",
    "kv_cache_manager", "policy", "block_size", "num_spec_tokens", "vllm_config",
)  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_the_scheduler_is_there(name):
    assert hasattr(Driver().scheduler, name)


READ_OF_REQUESTS = (
    "num_computed_tokens", "is_prefill_chunk", "client_index", "priority", "output_token_ids", "has_encoder_inputs",
)  # fmt: skip
READ_OF_PLANS = (
    "num_scheduled_tokens", "scheduled_spec_decode_tokens", "total_num_scheduled_tokens", "scheduled_new_reqs",
)  # fmt: skip


def test_what_is_read_of_a_request_and_a_plan_is_there():
    driver = Driver()
    request = driver.add("a")
    plan = driver.plan()
    assert not [name for name in READ_OF_REQUESTS if not hasattr(request, name)]
    assert not [name for name in READ_OF_PLANS if not hasattr(plan, name)]
    assert hasattr(Scheduler, "_preempt_request")
