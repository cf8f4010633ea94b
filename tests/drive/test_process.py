"""The process boundary: the same tokens as in-process, deaths that end every stream, a successor that serves."""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.fake_runner import expected_tokens
from patience import until_async
from splittime.core.errors import ConfigError, Conflict, Overloaded
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive import process
from splittime.drive.messages import Loading
from splittime.drive.process import ProcessClient
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage

WORKER = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


@asynccontextmanager
async def running_client(**settings: int | bool) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(WORKER, json.dumps(settings).encode())
    try:
        await asyncio.wait_for(client.start(), 60)
        yield client
    finally:
        await client.stop()


def make_request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 20, **fields: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(
        request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=time.monotonic_ns(), **fields
    )


async def collect(client: ProcessClient, request: Request) -> tuple[list[int], FinishReason | None, Account]:
    """Submit a request and read its stream to the end."""
    account = Account(request.request_id, request.submitted_ns, Stage.HANDOFF)
    client.submit(request)
    tokens: list[int] = []
    reason = None
    async for item in client.stream(request.request_id):
        assert reason is None, "an output after the terminal one"
        tokens += item.output.token_ids
        account.extend(item.output.marks)
        reason = item.output.finish_reason
    account.close(time.monotonic_ns())
    account.verify()
    return tokens, reason, account


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread is Linux's")
async def test_the_engine_gives_way_to_the_loop_and_its_messages_do_not() -> None:
    async with running_client() as client:
        threads = (client.pid, *map(int, os.listdir(f"/proc/{client.pid}/task")))
        computes, *threads = [os.getpriority(os.PRIO_PROCESS, thread) - os.nice(0) for thread in threads]
    assert computes == 5
    assert set(threads) == {0, 5}


def test_progress_of_the_start_is_told_but_not_too_often() -> None:
    async def run() -> list[Loading]:
        told: list[Loading] = []
        client = ProcessClient(WORKER, b"{}", on_loading=told.append)
        try:
            await asyncio.wait_for(client.start(), 60)
        finally:
            await client.stop()
        return told

    assert asyncio.run(run()) == [Loading("layer 1 of 2, 3 MB", 0.25), Loading("warming up", 0.9)]


async def test_same_tokens_as_in_process() -> None:
    async with running_client() as client:
        prompts = [tuple(range(1, 3 + i)) for i in range(20)]
        results = await asyncio.gather(*(collect(client, make_request(f"r{i}", p)) for i, p in enumerate(prompts)))
        for prompt, (tokens, reason, account) in zip(prompts, results, strict=True):
            assert tokens == expected_tokens(prompt, 20)
            assert reason is FinishReason.LENGTH
            stages = {interval.stage for interval in account.intervals()}
            assert {Stage.HANDOFF, Stage.QUEUE, Stage.PREFILL, Stage.DECODE, Stage.DELIVER} >= stages
            assert Stage.UNATTRIBUTED not in stages
        assert len(client._streams) == 0


async def test_kill_ends_streams_and_a_successor_serves() -> None:
    async with running_client(step_ns=20_000_000) as client:
        calls = [asyncio.create_task(collect(client, make_request(f"r{i}", max_tokens=2000))) for i in range(5)]
        await asyncio.sleep(0.1)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for tokens, reason, account in await asyncio.wait_for(asyncio.gather(*calls), 60):
            assert reason is FinishReason.ERROR
            assert tokens == expected_tokens((1, 2, 3), len(tokens))
            assert any(i.cause is Cause.ENGINE_DIED for i in account.intervals())
        assert not client.is_ready
        with pytest.raises(Overloaded):
            client.submit(make_request("early"))
        await wait_until_ready(client)
        assert client.num_restarts == 1
        tokens, _, _ = await collect(client, make_request("late"))
        assert tokens == expected_tokens((1, 2, 3), 20)


def test_a_successor_counts_its_steps_on_and_leaves_one_number_out() -> None:
    """No step of its own follows one of its predecessor's; a token's step is one that was told."""
    told: list[int] = []

    async def scenario() -> None:
        client = ProcessClient(WORKER, b"{}", on_record=lambda record: told.append(record.step_id))
        try:
            await asyncio.wait_for(client.start(), 60)
            for number in range(3):
                client.submit(make_request(f"r{number}"))
                steps = [item.step_id async for item in client.stream(f"r{number}") if item.output.token_ids]
                assert set(steps) <= set(told)
                if number == 2:
                    return
                last = told[-1]
                os.kill(client.pid, signal.SIGKILL)
                while client.num_restarts == number or not client.is_ready:
                    await asyncio.sleep(0.02)
                assert told[-1] == last
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert len(set(told)) == len(told)
    assert told == sorted(told)
    breaks = [after - before for before, after in itertools.pairwise(told) if after != before + 1]
    assert breaks == [2, 2]


async def test_failing_runner_ends_streams_and_a_successor_serves() -> None:
    async with running_client(fail_on_token=777) as client:
        _, reason, _ = await collect(client, make_request("bad", (5, 777)))
        assert reason is FinishReason.ERROR
        await wait_until_ready(client)
        tokens, _, _ = await collect(client, make_request("good"))
        assert tokens == expected_tokens((1, 2, 3), 20)


async def test_changed_knobs_are_shown_at_once_and_outlive_the_engine() -> None:
    async with running_client() as client:
        await client.configure({"max_num_seqs": 3, "policy": "priority"})
        await client.configure({"enable_prefix_caching": False}, lasts=False)
        assert client.stats().knobs["max_num_seqs"] == 3
        assert client.stats().knobs["enable_prefix_caching"] is False
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until_async(lambda: not client.is_ready)
        await wait_until_ready(client)
        await collect(client, make_request("later"))
        assert (client.stats().knobs["max_num_seqs"], client.stats().knobs["policy"]) == (3, "priority")
        assert client.stats().knobs["enable_prefix_caching"] is True, "what does not last is not repeated"


async def test_messages_that_cannot_be_read_end_the_engine_not_the_service() -> None:
    async with running_client(step_ns=2_000_000) as client:
        client._on_record = lambda record: 1 / 0
        _, reason, _ = await asyncio.wait_for(collect(client, make_request("lost", max_tokens=2000)), 60)
        assert reason is FinishReason.ERROR
        client._on_record = None
        await wait_until_ready(client)
        assert (await collect(client, make_request("good")))[0] == expected_tokens((1, 2, 3), 20)


async def test_a_successor_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_client() as client:
        monkeypatch.setattr("splittime.drive.process.RESTART_DELAYS_S", (0.0,))
        spawn, failures = client.spawn, iter([OSError("no memory"), OSError("no memory")])

        def failing_spawn() -> None:
            for failure in failures:
                raise failure
            spawn()

        monkeypatch.setattr(client, "spawn", failing_spawn)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until_async(lambda: not client.is_ready)
        await asyncio.wait_for(wait_until_ready(client), 60)
        assert client.num_restarts == 3


async def wait_until_ready(client: ProcessClient) -> None:
    await until_async(lambda: client.is_ready)


async def test_abort_frees_and_ends_once() -> None:
    async with running_client(step_ns=20_000_000) as client:
        task = asyncio.create_task(collect(client, make_request("r", max_tokens=2000)))
        await asyncio.sleep(0.05)
        client.abort("r")
        client.abort("r")
        client.abort("never heard of")
        _, reason, _ = await asyncio.wait_for(task, 60)
        assert reason is FinishReason.ABORT
        assert client.stats().blocks_used == 0


async def test_duplicate_id_and_impossible_prompt_are_refused() -> None:
    async with running_client(step_ns=2_000_000) as client:
        task = asyncio.create_task(collect(client, make_request("r", max_tokens=50)))
        await asyncio.sleep(0)  # the task runs until it waits: it has submitted
        with pytest.raises(Conflict):
            client.submit(make_request("r"))
        _, reason, _ = await collect(client, make_request("long", tuple(range(1, 3000))))
        assert reason is FinishReason.ERROR
        await task


async def test_deadline_ends_a_waiting_request_while_paused() -> None:
    async with running_client() as client:
        await client.configure({"paused": True})
        for seconds in (0.5, 2, 8):  # on a busy machine the shortest may be over before the engine hears of it
            request = make_request("r", deadline_ns=time.monotonic_ns() + round(seconds * 1e9))
            _, reason, account = await asyncio.wait_for(collect(client, request), 60)
            assert reason is FinishReason.DEADLINE
            causes = {i.cause for i in account.intervals() if i.stage is Stage.QUEUE}
            if Cause.PAUSED in causes:
                break
        assert Cause.PAUSED in causes


async def test_configure_answers_with_all_knobs_or_an_error() -> None:
    async with running_client() as client:
        knobs = await client.configure({"max_num_seqs": 3})
        assert knobs["max_num_seqs"] == 3
        with pytest.raises(ConfigError, match="max_num_sequences"):
            await client.configure({"max_num_sequences": 3})
        with pytest.raises(ConfigError):
            await client.configure({"max_num_seqs": 100_000})


async def test_engine_that_cannot_start_says_why_and_is_not_tried_again() -> None:
    client = ProcessClient(WORKER, b'{"refuse": true}')
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(client.start(), 60)
    assert client.num_restarts == 0
    await client.stop()


def test_worker_leaves_when_its_parent_is_killed() -> None:
    script = f"""
import asyncio, sys
from splittime.drive.process import ProcessClient
async def main():
    client = ProcessClient({WORKER!r}, b"{{}}")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def scenario() -> None:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
        parent.kill()
        await parent.wait()
        for _ in range(1200):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the worker outlived its parent")

    asyncio.run(scenario())


async def test_a_hung_engine_is_not_ready_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.monotonic_ns()
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns)
    monkeypatch.setattr(process, "time", clock)
    monkeypatch.setattr(process, "PING_EVERY_S", 0.02)

    def pass_s(seconds: float) -> None:
        nonlocal now_ns
        now_ns += int(seconds * 1e9)

    async with running_client() as client:
        pass_s(process.SILENT_AFTER_S)
        assert not client.is_ready
        await asyncio.wait_for(wait_until_ready(client), 60)  # idle, and answering
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        while client.is_ready:  # what it said before has still to be heard
            await asyncio.sleep(0.02)
            pass_s(process.SILENT_AFTER_S)
        pass_s(process.HUNG_AFTER_S)
        await until_async(lambda: client.num_restarts != 0)
        await asyncio.wait_for(wait_until_ready(client), 60)
        assert client.num_restarts == 1
        tokens, _, _ = await collect(client, make_request("after"))
        assert tokens == expected_tokens((1, 2, 3), 20)


async def test_stop_before_start_is_harmless() -> None:
    client = ProcessClient(WORKER, b"{}")
    client.spawn()
    await client.stop()


async def test_sigterm_to_the_whole_group_is_left_to_the_parent() -> None:
    """A service manager sends SIGTERM to every process; the parent drains, so the engine must go on."""
    async with running_client(step_ns=2_000_000) as client:
        task = asyncio.create_task(collect(client, make_request("r", max_tokens=50)))
        await asyncio.sleep(0.03)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        tokens, reason, _ = await asyncio.wait_for(task, 60)
        assert reason is FinishReason.LENGTH
        assert len(tokens) == 50
        assert client.num_restarts == 0
