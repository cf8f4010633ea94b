"""The engine on a real model, greedy, float32: however a request is scheduled, its tokens are the same.

batched = alone, chunked = whole, prefix hit = cold, preempted = undisturbed, any policy = fcfs, process = in-process.
The oracle is the request alone in an engine with everything off.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from splittime.assemble.worker import WorkerSettings
from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.process import ProcessClient
from splittime.engine.engine import Engine
from splittime.runner.compose import RunnerThread, load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

MODEL = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
PROMPT_LENGTHS = (3, 17, 32, 61, 90, 130, 7, 48)
MAX_TOKENS = 24


def make_prompts() -> list[tuple[int, ...]]:
    """Prompts that share a prefix of 32 tokens in pairs."""
    prompts = []
    for i, length in enumerate(PROMPT_LENGTHS):
        shared = [(17 * k + i // 2) % 3000 + 300 for k in range(32)]
        own = [(31 * k + 7 * i) % 3000 + 300 for k in range(length)]
        prompts.append(tuple(shared + own))
    return prompts


def load_runner(**changes: Any) -> TorchRunner:
    settings = {"model_path": str(MODEL), "dtype": "float32", "max_model_len": 256, "block_size": 16}
    return load_torch_runner(RunnerConfig(**(settings | changes)), None)


def generate(
    runner: TorchRunner, prompts: list[tuple[int, ...]], ahead: RunnerThread | None = None, **changes: Any
) -> tuple[list[list[int]], Scheduler]:
    """All prompts through one engine at once; greedy."""
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 256,
        "block_size": 16,
        "num_blocks": runner.resolved.num_blocks,
    }
    scheduler = Scheduler(SchedulerConfig(**(settings | changes)))
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=ahead is not None), ahead or runner), SystemClock())
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        crank.submit(make_request(f"r{i}", prompt, priority=-i), time.monotonic_ns())
        tokens[f"r{i}"] = []
    while crank.has_work:
        output = crank.turn()
        scheduler.check()
        for news in output.outputs if output else ():
            assert news.error is None, news.error
            tokens[news.request_id] += news.token_ids
    return list(tokens.values()), scheduler


def make_request(name: str, prompt: tuple[int, ...], priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        submitted_ns=time.monotonic_ns(),
        priority=priority,
    )


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return load_runner()


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> list[list[int]]:
    """Each prompt in an engine of its own, whole, with no prefix cache."""
    plain = {"max_num_seqs": 1, "enable_prefix_caching": False}
    return [generate(runner, [prompt], **plain)[0][0] for prompt in make_prompts()]


def test_batched_is_alone(runner: TorchRunner, alone: list[list[int]]) -> None:
    assert generate(runner, make_prompts(), enable_prefix_caching=False)[0] == alone


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_chunked_is_whole(runner: TorchRunner, alone: list[list[int]], budget: int) -> None:
    tokens, _ = generate(runner, make_prompts(), max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert tokens == alone


def test_prefix_hit_is_cold(runner: TorchRunner, alone: list[list[int]]) -> None:
    prompts = make_prompts()
    tokens, scheduler = generate(runner, [*prompts, *prompts], max_num_seqs=4)
    assert scheduler.counts.prefix_hit_tokens > sum(PROMPT_LENGTHS)
    assert tokens == alone + alone


def test_preempted_is_undisturbed(alone: list[list[int]]) -> None:
    small = load_runner(kv_cache_memory_bytes=_bytes_of_blocks(18))
    assert small.resolved.num_blocks == 18
    tokens, scheduler = generate(small, make_prompts(), enable_prefix_caching=False)
    assert scheduler.counts.num_preemptions > 0
    assert tokens == alone


@pytest.mark.parametrize("budget", [13, 512])
def test_planned_ahead_is_one_after_the_other(runner: TorchRunner, alone: list[list[int]], budget: int) -> None:
    prompts = make_prompts()
    ahead = RunnerThread(runner.run)
    assert generate(runner, [*prompts, *prompts], ahead, max_num_batched_tokens=budget)[0] == alone + alone


def test_planned_ahead_and_preempted_is_undisturbed(alone: list[list[int]]) -> None:
    small = load_runner(kv_cache_memory_bytes=_bytes_of_blocks(18))
    tokens, scheduler = generate(small, make_prompts(), RunnerThread(small.run), enable_prefix_caching=False)
    assert scheduler.counts.num_preemptions > 0
    assert tokens == alone


@pytest.mark.parametrize("policy", ["priority", "shortest_prefill", "deadline"])
def test_any_policy_gives_the_same_tokens(runner: TorchRunner, alone: list[list[int]], policy: str) -> None:
    assert generate(runner, make_prompts(), policy=policy, max_num_seqs=3)[0] == alone


def test_static_batches_give_the_same_tokens(runner: TorchRunner, alone: list[list[int]]) -> None:
    assert generate(runner, make_prompts(), batching="static", max_num_seqs=3)[0] == alone


def test_process_is_in_process(alone: list[list[int]]) -> None:
    settings = WorkerSettings(
        RunnerConfig(model_path=str(MODEL), dtype="float32", max_model_len=256),
        SchedulerConfig(max_num_seqs=8),
    )
    assert asyncio.run(_through_process(msgspec.json.encode(settings))) == alone


async def _through_process(settings: bytes) -> list[list[int]]:
    client = ProcessClient([sys.executable, "-m", "splittime.assemble.worker"], settings)
    await asyncio.wait_for(client.start(), 60)
    try:
        return await asyncio.gather(*(_read(client, f"r{i}", prompt) for i, prompt in enumerate(make_prompts())))
    finally:
        await client.stop()


async def _read(client: ProcessClient, name: str, prompt: tuple[int, ...]) -> list[int]:
    client.submit(make_request(name, prompt))
    return [token async for item in client.stream(name) for token in item.output.token_ids]


def _bytes_of_blocks(count: int) -> int:
    return load_runner().resolved.kv_bytes_per_block * count
