"""What is rare in a real vLLM's engine: a session's end, a fault of vLLM's or of ours, very many who wait."""

import time
from functools import partial

import pytest

pytest.importorskip("vllm")

from counted_calls import calls_of
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus
from vllm_driver import Driver

from splittime.attach import vllm_scheduler
from splittime.attach.joining import Joining
from splittime.attach.mail import FOLDER, Receiver
from splittime.attach.request_book import name_of
from splittime.attach.vllm_scheduler import Bookkeeping
from splittime.core.errors import ConfigError
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import verify_steps
from splittime.ledger.store import Ledger

pytestmark = pytest.mark.vllm


def is_idle_now(driver: Driver) -> bool:
    """Whether nobody is left for whom the books would call the engine busy."""
    driver.clock.advance(5_000)
    driver.add("behind", most=1)
    driver.step()
    return driver.records[-1].idle_ns >= 5_000


def test_a_sessions_end_leaves_nobody_behind():
    """A request whose client streams its input: it waits for more, and what ends it looks like a request."""
    driver = Driver()
    request = driver.add("session", most=2, resumable=True)
    driver.step(2)
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    driver.add("session", most=2)
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert driver.scheduler.books.books == {}
    assert is_idle_now(driver)


def test_more_input_of_a_session_has_a_book_of_its_own():
    driver = Driver()
    driver.add("session", most=2, resumable=True)
    driver.step(2)
    first = driver.ended.pop("session")
    driver.add("session", most=2, resumable=True)
    driver.step(2)
    assert [len(each.token_steps) for each in (first, driver.ended["session"])] == [2, 2]
    assert driver.scheduler.books.books == {}


def test_a_diffusion_model_is_refused(monkeypatch):
    """vLLM has another scheduler for it, whose plans the books do not know."""
    DiffusionConfig = pytest.importorskip("vllm.config.diffusion").DiffusionConfig
    monkeypatch.setenv(FOLDER, "/nowhere")
    config = Driver().scheduler.vllm_config
    config.diffusion_config = DiffusionConfig(canvas_length=4)
    for arguments, named in (((config,), {}), ((), {"vllm_config": config})):
        with pytest.raises(ConfigError, match="no books are kept of a diffusion model"):
            vllm_scheduler.scheduler(*arguments, **named)


def test_steps_whose_results_vllm_drops_are_forgotten():
    """What its fault tolerance does: it aborts all, and empties its queue of batches."""
    driver = Driver(async_scheduling=True)
    driver.add("a")
    driver.end(driver.plan())
    lost = [driver.plan(), driver.plan()]
    driver.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert all(plan.num_scheduled_tokens for plan in lost)
    driver.add("b", most=1)
    driver.step()
    assert driver.records[-1].rows == (("b", 0, 20),)
    assert driver.scheduler._st_flights == {}
    assert is_idle_now(driver)
    verify_steps(driver.records)


def told_of(joining: Joining) -> dict[str, object]:
    until = time.monotonic() + 30
    while not joining.engines[0].stopped and time.monotonic() < until:
        time.sleep(0.01)
    facts = joining.engines[0].facts_and_gaps()
    assert facts is not None
    return {"engine": facts.engine, **facts.settings}


def test_facts_that_cannot_be_read_are_told_of(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "sockets"))
    scheduler = Driver().scheduler
    scheduler.policy = None  # as where a release of vLLM's has it no more
    joining = Joining(lambda engine: Ledger())
    receiver = Receiver(0, joining.take, joining.join)
    try:
        with pytest.raises(AttributeError):
            Bookkeeping._st_open_mail(scheduler)
        told = told_of(joining)
    finally:
        receiver.close()
    assert told["engine"].startswith("vllm 0.")
    assert told["books_stopped"] == "AttributeError: 'NoneType' object has no attribute 'value'"


def crowded(length: int) -> Driver:
    driver = Driver(max_num_seqs=2)
    for number in range(length):
        driver.add(f"w{number}", prompt=4, most=8)
    driver.step()
    return driver


def test_a_plan_costs_the_same_however_many_wait():
    """Ends, arrivals and admissions among them."""
    counts = []
    for length in (50, 3_000):
        driver = crowded(length)
        driver.add("late", prompt=4)
        counts.append(calls_of(partial(driver.step, 20)))
        assert driver.now("late") == (Stage.QUEUE, Cause.BATCH_SLOTS)
        assert len(driver.ended) == 4
        verify_steps(driver.records)
    assert counts[1] < 1.2 * counts[0]


def test_who_is_passed_over_has_a_cause_of_its_own_and_the_crowd_behind_it_none():
    driver = Driver(max_num_seqs=2)
    driver.scheduler.lora_config = type("Loras", (), {"max_loras": 1})
    driver.add("one", lora_request=LoRARequest("one", 1, "nowhere"))
    driver.add("two", lora_request=LoRARequest("two", 2, "nowhere"))
    for number in range(100):
        driver.add(f"w{number}", prompt=4)
    plan = driver.plan()
    told, rest = driver.scheduler._why(plan)
    assert (dict(told), rest) == ({"two": Cause.LORA_SLOTS, "w1": Cause.BATCH_SLOTS}, Cause.BATCH_SLOTS)
    assert driver.scheduler.books.waiting_for() == {"lora_slots": 1, "batch_slots": 99}
    driver.end(plan)


def test_a_client_may_name_its_request_at_any_length():
    driver, name = Driver(), "x" * 100_000
    driver.add(name, most=2)
    driver.step(2)
    assert [record.rows[0][0] for record in driver.records] == [name, name]  # a ledger that is run again: as it was
    driver.scheduler.books._name_of = name_of
    driver.add(name, most=2)
    driver.step(2)
    assert [record.rows[0][0] for record in driver.records[2:]] == [name_of(name)] * 2
    assert driver.ended[name_of(name)].finish_reason == "length"
