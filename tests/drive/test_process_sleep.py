"""Sleep across the process boundary: nobody slips in between, and what becomes of an engine that dies in its sleep."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from test_process import collect, make_request

from patience import until_async
from splittime.core.engine import ASLEEP, AWAKE, FALLING_ASLEEP, Rest, SleepAsk, SleepReport
from splittime.core.errors import Conflict, EngineError, Overloaded, RequestError
from splittime.core.request import FinishReason
from splittime.drive import process as process_module
from splittime.drive.process import ProcessClient

WORKER = [sys.executable, str(Path(__file__).with_name("sleepy_worker.py"))]
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "RESTART_DELAYS_S", (0.0,))


@asynccontextmanager
async def sleepy(**settings: object) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(WORKER, json.dumps(settings).encode())
    try:
        await asyncio.wait_for(client.start(), PATIENCE_S)
        async with asyncio.timeout(2 * PATIENCE_S):
            yield client
    finally:
        await asyncio.wait_for(client.stop(), PATIENCE_S)


async def kill(client: ProcessClient) -> None:
    """And wait until its death was noticed."""
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until_async(lambda: client.pid != pid)


async def falling_asleep(client: ProcessClient) -> tuple[asyncio.Task, asyncio.Task]:
    """Returns a request that runs for long, and the sleep that waits for it."""
    running = asyncio.create_task(collect(client, make_request("running", max_tokens=5_000)))
    await until_async(lambda: client.stats().num_running == 1)
    falling = asyncio.create_task(client.sleep(SleepAsk(1)))
    await asyncio.sleep(0)
    return running, falling


async def test_asleep_and_back() -> None:
    async with sleepy() as client:
        before, _, _ = await collect(client, make_request("before", max_tokens=60))
        assert client.stats().blocks_cached > 0
        report = await client.sleep(SleepAsk(2))
        assert (report.level, report.weights_bytes, report.kv_bytes) == (2, 100, 20)
        assert client.stats().blocks_cached == 0
        assert client.rest == client.stats().rest == Rest(ASLEEP, 2)
        with pytest.raises(Overloaded) as refused:
            client.submit(make_request("refused"))
        assert (refused.value.info.status, refused.value.info.code) == (503, "asleep")
        assert not (await client.sleep(SleepAsk(2))).changed
        with pytest.raises(Conflict):
            await client.sleep(SleepAsk(1))
        assert await client.configure({"max_num_seqs": 3})
        woken = await client.wake()
        assert woken.slept_ns > 0
        assert client.rest == Rest()
        after, reason, _ = await collect(client, make_request("after", max_tokens=60))
        assert (after, reason) == (before, FinishReason.LENGTH)
        assert not (await client.wake()).changed


async def test_from_the_call_on_nobody_comes_in_and_who_is_there_ends() -> None:
    async with sleepy(step_ns=2_000_000) as client:
        running = asyncio.create_task(collect(client, make_request("running", max_tokens=30)))
        await asyncio.sleep(0)
        falling = asyncio.create_task(client.sleep(SleepAsk(1)))
        await asyncio.sleep(0)
        assert client.rest.state == FALLING_ASLEEP
        with pytest.raises(Overloaded, match="falling asleep"):
            client.submit(make_request("late"))
        report, (tokens, reason, _) = await falling, await running
        assert (len(tokens), reason) == (30, FinishReason.LENGTH)
        assert report.changed
        assert client.rest == Rest(ASLEEP, 1)


async def test_a_caller_that_goes_away_changes_nothing() -> None:
    async with sleepy(step_ns=2_000_000) as client:
        running = asyncio.create_task(collect(client, make_request("running", max_tokens=30)))
        await asyncio.sleep(0)
        falling = asyncio.create_task(client.sleep(SleepAsk(1)))
        await asyncio.sleep(0)
        falling.cancel()
        await running
        await until_async(lambda: client.rest == Rest(ASLEEP, 1))
        assert (await client.wake()).changed


async def test_abort_ends_the_running_and_waking_calls_a_sleep_off() -> None:
    async with sleepy(step_ns=20_000_000) as client:
        running, falling = await falling_asleep(client)
        assert (await client.wake()).changed
        with pytest.raises(Conflict) as called_off:
            await falling
        assert called_off.value.info.code == "sleep_called_off"
        assert client.rest == Rest()
        with pytest.raises(Conflict) as late:
            await client.sleep(SleepAsk(1, timeout_s=0.02))
        assert late.value.info.code == "sleep_timeout"
        assert client.rest == Rest()
        report = await client.sleep(SleepAsk(1, "abort"))
        assert report.aborted_requests == 1
        _, reason, _ = await running
        assert reason is FinishReason.ERROR


async def test_what_cannot_be_asked_changes_nothing() -> None:
    async with sleepy() as client:
        with pytest.raises(RequestError):
            await client.sleep(SleepAsk(7))
        assert client.rest.state == AWAKE


async def test_an_engine_that_dies_in_its_sleep_stays_asleep_until_it_is_woken(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    async with sleepy(folder=str(folder)) as client:
        before, _, _ = await collect(client, make_request("before"))
        await client.configure({"max_num_seqs": 3})
        await client.sleep(SleepAsk(2))
        await kill(client)
        assert client.pid is None
        assert client.rest == client.stats().rest == Rest(ASLEEP, 2)
        assert not client.is_ready
        with pytest.raises(Overloaded, match="asleep"):
            client.submit(make_request("refused"))
        assert await client.sleep(SleepAsk(2)) == SleepReport(action="sleep", level=2, changed=False)
        with pytest.raises(Conflict):
            await client.sleep(SleepAsk(1))
        folder.rmdir()
        with pytest.raises(EngineError, match=r"stays asleep: .*no folder"):
            await client.wake()
        assert (client.rest, client.pid) == (Rest(ASLEEP, 2), None)
        folder.mkdir()
        first, second = await asyncio.gather(client.wake(), client.wake())
        assert (first.changed, second.changed) == (True, False)
        assert ("load", 1, 2) in first.parts
        assert first.restarted
        assert first.slept_ns > 0
        assert client.rest == Rest()
        assert await client.configure({"max_prefill_tokens": 9}) | {"max_num_seqs": 3} == client.stats().knobs
        after, _, _ = await collect(client, make_request("after"))
        assert after == before


async def test_an_engine_that_dies_while_it_wakes_is_asleep() -> None:
    async with sleepy(dies_waking=True) as client:
        await client.sleep(SleepAsk(2))
        with pytest.raises(EngineError, match="stays asleep"):
            await client.wake()
        await until_async(lambda: client.pid is None)
        assert client.rest == Rest(ASLEEP, 2)
        assert (await client.wake()).changed


async def test_an_engine_that_dies_before_it_slept_gets_a_successor_that_is_awake() -> None:
    async with sleepy(step_ns=20_000_000) as client:
        running, falling = await falling_asleep(client)
        await kill(client)
        with pytest.raises(EngineError):
            await falling
        assert (await running)[1] is FinishReason.ERROR
        await until_async(lambda: client.is_ready)
        assert client.rest == Rest()
        assert (await collect(client, make_request("after")))[1] is FinishReason.LENGTH


async def test_stopping_answers_who_waits_for_sleep() -> None:
    async with sleepy(step_ns=20_000_000) as client:
        running, falling = await falling_asleep(client)
    with pytest.raises(EngineError, match="shutting down"):
        await asyncio.wait_for(falling, PATIENCE_S)
    assert (await asyncio.wait_for(running, PATIENCE_S))[1] is FinishReason.ERROR


async def test_stopping_asleep() -> None:
    async with sleepy() as client:
        await client.sleep(SleepAsk(1))
        pid = client.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_it_did_is_in_the_facts() -> None:
    """Only of an engine that tells facts at all: this one has none, the process's entry is kept all the same."""
    async with sleepy() as client:
        await client.sleep(SleepAsk(1))
        await client.wake()
        known = client._known_facts._process
        assert known is not None
        assert [report.action for report in known.sleeps] == ["sleep", "wake"]


async def test_stopping_while_several_wait_for_a_successor() -> None:
    """Nothing is started any more, and nobody waits for ever."""
    async with sleepy() as client:
        await client.sleep(SleepAsk(1))
        await kill(client)
        waking = [asyncio.create_task(client.wake()) for _ in range(3)]
        stopping = asyncio.create_task(client.stop())  # in the same turn of the loop: no successor is ready by then
        await asyncio.wait_for(stopping, PATIENCE_S)
        assert client.num_restarts == 1
    for task in waking:
        with pytest.raises(EngineError, match=r"^the server is shutting down") as caught:
            await asyncio.wait_for(task, PATIENCE_S)
        assert caught.value.info.status == 503
    assert client.pid is None
    with pytest.raises(EngineError, match="shutting down"):
        await client.wake()
    with pytest.raises(EngineError, match="shutting down"):
        client.spawn()
    assert client.pid is None


async def test_a_message_that_is_none_ends_the_engine_with_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "splittime")
    async with sleepy() as client:
        pid = client.pid
        assert client._incarnation is not None
        client._incarnation.push.send(b"\xc1")
        await until_async(lambda: client.pid != pid and client.is_ready)
        assert (await collect(client, make_request("after")))[1] is FinishReason.LENGTH
    assert "a message to the engine cannot be taken in" in caplog.text
    assert "the engine is ready again after" in caplog.text


async def test_a_paused_engine_is_let_go_on_while_it_falls_asleep() -> None:
    async with sleepy() as client:
        await client.configure({"paused": True})
        waiting = asyncio.create_task(collect(client, make_request("waiting")))
        await asyncio.sleep(0)
        falling = asyncio.create_task(client.sleep(SleepAsk(1)))
        await asyncio.sleep(0)
        await client.configure({"paused": False})
        assert (await falling).changed
        assert (await waiting)[1] is FinishReason.LENGTH


async def test_the_log_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "splittime")
    async with sleepy() as client:
        await client.sleep(SleepAsk(1))
        await client.sleep(SleepAsk(1))
        await client.wake()
        await client.wake()
    said = [record.getMessage() for record in caplog.records if record.name == "splittime.engine"]
    assert [line.split(" after ")[0] for line in said] == ["asleep (level 1)", "awake again"]
