"""Requests with adapters in one engine: however they are scheduled, each has the tokens that it has alone, and those
without an adapter have what they have in a server that serves none."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_checkpoint
from native_or_not import has_native_kernels

import adapter_files
from splittime.assemble.worker import WorkerSettings
from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError, SplittimeError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.process import ProcessClient
from splittime.engine.engine import Engine
from splittime.runner.compose import RunnerThread, load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.draft_sources import drafting_of
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")
ADAPTERS = ("a#1", "b#2", "c#3")
WHO = ("", *ADAPTERS)
PROMPTS = [tuple((7 * k + 3 * (i // 4)) % 50 + 5 for k in range(9 + 5 * i)) for i in range(8)]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    (root / "base").mkdir()
    base = tiny_checkpoint.write(root / "base")
    for number, name in enumerate(ADAPTERS):
        adapter_files.write_adapter(root / name[0], base, seed=number + 5, size=0.5)
    return root


def config_of(folder: Path, **changes: Any) -> RunnerConfig:
    settings = {"max_model_len": 96, "block_size": 8, "num_threads": 1, "packed_cache": "off", "enable_lora": True}
    return RunnerConfig(model_path=str(folder / "base"), **{**settings, "dtype": "float32", **changes})


def load_runner(folder: Path, **changes: Any) -> TorchRunner:
    runner = load_torch_runner(config_of(folder, **changes))
    for name in ADAPTERS if runner.slots.adapters is not None else ():
        runner.slots.adapters.load(name, str(folder / name[0]))
    return runner


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchRunner:
    return load_runner(folder)


def request(name: str, prompt: tuple[int, ...], adapter: str) -> Request:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, ignore_eos=True, seed=len(prompt), logprobs=1)
    given = {"prompt_token_ids": prompt, "sampling": sampling, "submitted_ns": time.monotonic_ns()}
    return Request(request_id=name, adapter=adapter, **given)


def generate(
    runner: Any, asked: list[tuple[tuple[int, ...], str]], ahead: RunnerThread | None = None, **changes: Any
) -> tuple[list[list], Scheduler]:
    """Tokens with their log-probabilities, of all through one engine at once."""
    inner = getattr(runner, "_runner", runner)
    settings = {"max_model_len": 96, "block_size": 8, "num_blocks": inner.resolved.num_blocks, "max_num_seqs": 8}
    scheduler = Scheduler(SchedulerConfig(**(settings | changes)))
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=ahead is not None), ahead or runner), SystemClock())
    found: dict[str, list] = {}
    for i, (prompt, adapter) in enumerate(asked):
        crank.submit(request(f"r{i}", prompt, adapter), time.monotonic_ns())
        found[f"r{i}"] = []
    while crank.has_work:
        output = crank.turn()
        scheduler.check()
        for news in output.outputs if output else ():
            assert news.error is None, news.error
            found[news.request_id] += [(entry.token_id, entry.logprob) for entry in news.logprobs]
    return list(found.values()), scheduler


ASKED = [(prompt, WHO[i % len(WHO)]) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> list[list]:
    plain = {"max_num_seqs": 1, "enable_prefix_caching": False}
    return [generate(runner, [one], **plain)[0][0] for one in ASKED]


def test_batched_and_chunked_is_alone(runner: TorchRunner, alone: list[list]) -> None:
    for budget in (9, 200):
        assert generate(runner, ASKED, max_num_batched_tokens=budget, enable_prefix_caching=False)[0] == alone


def test_who_uses_no_adapter_has_what_a_server_without_adapters_gives(folder: Path, alone: list[list]) -> None:
    free = [one for one in ASKED if not one[1]]
    without = load_runner(folder, enable_lora=False)
    assert generate(without, free)[0] == [one for one, (_, name) in zip(alone, ASKED, strict=True) if not name]


def test_a_prefix_serves_its_own_adapter_alone(runner: TorchRunner) -> None:
    asked = [(PROMPTS[-1], name) for name in WHO]
    cold, _ = generate(runner, asked, enable_prefix_caching=False)
    assert len({str(one) for one in cold}) == len(WHO)
    warm, scheduler = generate(runner, asked * 2, max_num_seqs=1)
    assert scheduler.counts.prefix_hit_tokens == len(WHO) * ((len(PROMPTS[-1]) - 1) // 8) * 8
    assert [[token for token, _ in one] for one in warm] == [[token for token, _ in one] for one in cold * 2]


def test_preempted_is_undisturbed(folder: Path, alone: list[list]) -> None:
    small = load_runner(folder, kv_cache_memory_bytes=load_runner(folder).resolved.kv_bytes_per_block * 15)
    tokens, scheduler = generate(small, ASKED, enable_prefix_caching=False)
    assert scheduler.counts.num_preemptions > 0
    assert [[token for token, _ in one] for one in tokens] == [[token for token, _ in one] for one in alone]


def test_planned_ahead_is_one_after_the_other(runner: TorchRunner, alone: list[list]) -> None:
    assert generate(runner, ASKED, RunnerThread(runner.run), enable_prefix_caching=False)[0] == alone


def test_with_one_place_all_get_their_turn(runner: TorchRunner, alone: list[list]) -> None:
    assert generate(runner, ASKED, max_loras=1, enable_prefix_caching=False)[0] == alone


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_drafts_change_no_token(folder: Path, alone: list[list], method: str) -> None:
    """A draft model guesses without the adapter; what is accepted is verified with it."""
    more = {} if method == "suffix" else {"model": "base", "num_speculative_tokens": 3}
    speculation = msgspec.json.encode({"method": method, **more}).decode()
    path = None if method == "suffix" else str(folder / "base")
    guessing = drafting_of(load_runner(folder, speculative_config=speculation, draft_model_path=path))
    assert generate(guessing, ASKED, enable_prefix_caching=False)[0] == alone


# ---- in a process of its own


@pytest.mark.sweep  # three seconds of torch for each of two processes
def test_a_process_loads_beside_its_steps_and_its_successor_reads_all_again(folder: Path, alone: list[list]) -> None:
    settings = WorkerSettings(config_of(folder), SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    asyncio.run(_through_process(msgspec.json.encode(settings), folder, alone))


async def _through_process(settings: bytes, folder: Path, alone: list[list]) -> None:
    client = ProcessClient([sys.executable, "-m", "splittime.assemble.worker"], settings)
    await asyncio.wait_for(client.start(), 60)
    try:
        free = asyncio.create_task(_read(client, "free", *ASKED[0]))
        await asyncio.gather(*(client.load_adapter(name, str(folder / name[0])) for name in ADAPTERS))
        assert await free == _tokens(alone[0])
        with pytest.raises(ConfigError, match=r"adapter_config\.json"):
            await client.load_adapter("none#4", str(folder / "base"))
        assert await asyncio.gather(*(_read(client, f"r{i}", *one) for i, one in enumerate(ASKED))) == [
            *map(_tokens, alone)
        ]
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await _until_up_again(client)
        client.unload_adapter("b#2")
        assert await _read(client, "again", *ASKED[1]) == _tokens(alone[1])
        with pytest.raises(SplittimeError, match="not loaded"):
            await _read(client, "gone", *ASKED[2])
    finally:
        await client.stop()


async def _until_up_again(client: ProcessClient) -> None:
    async with asyncio.timeout(60):
        while client.num_restarts == 0 or not client.is_ready:
            await asyncio.sleep(0.01)


async def _read(client: ProcessClient, name: str, prompt: tuple[int, ...], adapter: str) -> list[int]:
    client.submit(request(name, prompt, adapter))
    tokens: list[int] = []
    async for item in client.stream(name):
        if item.output.error is not None:
            raise SplittimeError(item.output.error.message)
        tokens += item.output.token_ids
    return tokens


def _tokens(scored: list) -> list[int]:
    return [token for token, _ in scored]
