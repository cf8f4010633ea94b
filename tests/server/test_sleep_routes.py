"""Sleep over HTTP: what is told, what is refused meanwhile and how, and that nothing of it is lost from the books."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from patience import until
from splittime.core.engine import FALLING_ASLEEP, Rest, SleepReport

from .conftest import LiveServer, say

BODY = {"model": "fake", "prompt": "hi", "max_tokens": 4}


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    said: list = []
    thread = threading.Thread(target=lambda: said.append(work()), daemon=True)
    thread.start()
    return thread, said


def test_a_sleep_tells_where_the_time_went_and_waking_too(launch: Callable[..., LiveServer]) -> None:
    server = launch()
    status, _, told = server.post("/sleep?level=2", b"")
    assert status == 200
    assert (told["action"], told["level"], told["changed"]) == ("sleep", 2, True)
    assert told["parts_ms"] == {"kv": 2.0}
    assert told["total_ms"] == 9.0
    assert server.get("/is_sleeping")[2] == {"is_sleeping": True, "state": "asleep", "level": 2}
    metrics = server.get("/metrics")[2].decode()
    assert "splittime_asleep 2.0" in metrics
    assert 'vllm:engine_sleep_state{engine="0",model_name="fake",sleep_state="awake"} 0.0' in metrics
    assert 'vllm:engine_sleep_state{engine="0",model_name="fake",sleep_state="discard_all"} 1.0' in metrics
    status, _, told = server.post("/wake_up", {})
    assert (status, told["action"], told["slept_s"]) == (200, "wake", 7.0)
    assert server.get("/is_sleeping")[2] == {"is_sleeping": False, "state": "awake", "level": 0}
    status, _, told = server.post("/wake", b"")
    assert (status, told["changed"]) == (200, False)
    metrics = server.get("/metrics")[2].decode()
    assert 'splittime_sleep_seconds_count{action="sleep",part="kv"} 1' in metrics
    assert "splittime_asleep 0.0" in metrics


def test_what_comes_meanwhile_is_refused_with_the_way_out_and_booked(launch: Callable[..., LiveServer]) -> None:
    server = launch()
    server.post("/sleep", b"")
    status, fields, body = server.post("/v1/completions", BODY)
    error = body["error"]
    assert status == 503
    assert (error["code"], error["reason"]) == ("asleep", "asleep")
    assert "POST /wake" in error["hint"]
    assert int(fields["retry-after"]) >= 1
    (account,) = server.ledger.accounts()
    account.verify()
    assert account.finish_reason == "refused"
    assert account.error is not None
    assert account.error.code == "asleep"
    assert 'splittime_refusals_total{reason="asleep"} 1.0' in server.get("/metrics")[2].decode()
    assert server.engine.submitted == []
    assert server.service.admission.queued_requests == 0


def test_who_is_asked_how_things_are_says_asleep(launch: Callable[..., LiveServer]) -> None:
    server = launch()
    server.post("/sleep", b"")
    status, _, body = server.get("/ready")
    assert (status, body["error"]["code"]) == (503, "asleep")
    assert server.get("/health")[0] == 200
    assert server.get("/v1/models")[0] == 200
    assert server.get("/", accept="application/json")[2]["ready"] is False
    assert server.get("/stats")[2]["engine"]["rest"] == {"state": "asleep", "level": 1}
    assert server.post("/tokenize", {"prompt": "abc"})[2]["count"] == 3
    data = server.get("/dashboard/data")[2]
    assert data["engine"]["rest"]["state"] == "asleep"
    assert server.request("PATCH", "/knobs", {"max_num_seqs": 2})[0] == 503
    server.post("/wake", b"")
    assert server.get("/ready")[0] == 200
    assert server.post("/v1/completions", BODY)[0] == 200


def test_a_running_request_ends_and_the_next_is_refused(launch: Callable[..., LiveServer]) -> None:
    server = launch(say("x" * 60, end=False), step_s=0.02)
    running, answer = in_thread(lambda: server.post("/v1/completions", {**BODY, "max_tokens": 40}))
    until(lambda: len(server.engine.submitted) == 1)
    falling, told = in_thread(lambda: server.post("/sleep?mode=wait&timeout_s=60", b""))
    until(lambda: server.engine.rest.state != "awake")
    status, _, body = server.post("/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "asleep")
    server.engine.step_s = 0.0
    running.join(60)
    falling.join(60)
    assert (answer[0][0], answer[0][2]["usage"]["completion_tokens"]) == (200, 40)
    assert (told[0][0], told[0][2]["level"]) == (200, 1)


def test_a_request_that_meets_sleep_on_its_way_to_the_engine(launch: Callable[..., LiveServer]) -> None:
    """It was admitted before; the engine's client is the one that refuses it."""
    server = launch()
    submit = server.engine.submit

    def falls_asleep_first(request: object) -> None:
        server.engine.rest_now = Rest(FALLING_ASLEEP)
        submit(request)

    server.engine.submit = falls_asleep_first
    status, _, body = server.post("/v1/completions", {**BODY, "n": 2})
    assert (status, body["error"]["code"]) == (503, "asleep")
    assert server.service.admission.queued_requests == 0
    for account in server.ledger.accounts():
        account.verify()
    assert {account.error.code for account in server.ledger.accounts()} == {"asleep"}
    assert server.service.num_open == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=3", b"", "level"),
        ("/sleep?level=one", b"", "level"),
        ("/sleep?mode=keep", b"", "mode"),
        ("/sleep?timeout_s=-1", b"", "timeout_s"),
        ("/sleep?timeout_s=nan", b"", "timeout_s"),
        ("/sleep?tags=weights", b"", "tags"),
        ("/wake_up?tags=weights", b"", "tags"),
        ("/sleep", {"level": 2}, None),
        ("/sleep", b"x" * 1000, None),
    ],
)
def test_what_is_not_understood_is_refused(launch: Callable[..., LiveServer], path: str, body: object, param: str):
    server = launch()
    status, _, answer = server.post(path, body)
    assert status in (400, 413)
    assert answer["error"]["param"] == param
    assert server.get("/is_sleeping")[2]["is_sleeping"] is False


def test_only_post_sleeps(launch: Callable[..., LiveServer]) -> None:
    server = launch()
    status, fields, body = server.get("/sleep")
    assert (status, body["error"]["hint"], fields["allow"]) == (405, "use POST", "POST")
    assert server.get("/wake")[0] == 405


def test_a_key_is_needed_where_there_is_one(launch: Callable[..., LiveServer]) -> None:
    server = launch(config={"api_key": ("secret",)})
    assert server.post("/sleep", b"")[0] == 401
    assert server.post("/sleep", b"", {"Authorization": "Bearer secret"})[0] == 200


def test_draining_asleep_ends_at_once_and_admits_no_sleep(launch: Callable[..., LiveServer]) -> None:
    server = launch()
    server.post("/sleep", b"")
    drained = server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.service.drain()))
    assert drained is not None
    until(lambda: server.service.is_draining)
    status, _, body = server.post("/wake", b"")
    assert (status, body["error"]["code"]) == (503, "draining")
    status, _, body = server.post("/v1/completions", BODY)
    assert (status, body["error"]["code"]) == (503, "draining")


def test_draining_ends_what_a_sleep_waits_for(launch: Callable[..., LiveServer]) -> None:
    server = launch(say("x" * 60, end=False), step_s=0.02, config={"grace_s": 0.1})
    running, answer = in_thread(lambda: server.post("/v1/completions", {**BODY, "max_tokens": 4000}))
    until(lambda: len(server.engine.running) == 1)
    falling, told = in_thread(lambda: server.post("/sleep", b""))
    until(lambda: server.engine.rest.state != "awake")
    server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.service.drain()))
    running.join(60)
    falling.join(60)
    assert answer[0][2]["error"]["code"] == "draining"
    assert (told[0][0], told[0][2]["error"]["code"]) == (503, "draining")


def test_draining_answers_who_waits_for_a_stuck_engine_to_wake(
    launch: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "splittime")
    server = launch()
    asked = threading.Event()

    async def never() -> SleepReport:
        asked.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it ended")

    server.engine.wake = never
    waking, told = in_thread(lambda: server.post("/wake", b""))
    assert asked.wait(60)
    server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.service.drain()))
    waking.join(60)
    status, _, body = told[0]
    assert (status, body["error"]["code"]) == (503, "draining")
    assert "shutting down: 0 requests open" in caplog.text


def test_knobs_while_it_falls_asleep(launch: Callable[..., LiveServer]) -> None:
    """One that is paused would never get there."""
    server = launch()
    server.engine.rest_now = Rest(FALLING_ASLEEP)
    assert server.request("PATCH", "/knobs", {"max_num_seqs": 2})[0] == 200
    server.service.is_draining = True
    assert server.request("PATCH", "/knobs", {"max_num_seqs": 3})[0] == 503


def test_the_parts_of_a_start_are_no_labels(launch: Callable[..., LiveServer]) -> None:
    server = launch()

    async def anew() -> SleepReport:
        parts = (("load weights of x", 5, 9), ("warm-up", 9, 15))
        return SleepReport(action="wake", level=1, begin_ns=5, end_ns=15, parts=parts, restarted=True)

    server.engine.wake = anew
    _, _, told = server.post("/wake", b"")
    assert list(told["parts_ms"]) == ["load weights of x", "warm-up"]
    metrics = server.get("/metrics")[2].decode()
    assert 'splittime_sleep_seconds_count{action="wake",part="start"} 1' in metrics
    assert "warm-up" not in metrics
