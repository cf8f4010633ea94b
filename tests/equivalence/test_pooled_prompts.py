"""Embeddings equal transformers', pooled as a model's files say: alone, in a batch, in chunks, behind a cached prefix,
and after a preemption. And they are the same numbers however they were scheduled."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import Driver, Sequence
from random_models import make
from safetensors.torch import load_file, save_file

from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import POOLINGS, SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.runner.compose import RunnerThread, load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

MAX_ABS_ERROR = 1e-4
LENGTHS = (1, 40, 17, 32, 5, 63)
SOME = ("llama", "mistral-window", "qwen2", "qwen3", "qwen3-moe")


def load(folder: Path, **settings: Any) -> TorchRunner:
    chosen = {"max_num_seqs": 4, "max_model_len": 96, "num_threads": 1} | settings
    return load_torch_runner(RunnerConfig(model_path=str(folder), **chosen))


@pytest.fixture(scope="module", params=SOME)
def pair(request, tmp_path_factory):
    """(transformers' model, ours)"""
    folder = tmp_path_factory.mktemp(request.param)
    return make(request.param, folder), load(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The second and the fourth begin alike."""
    source = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 97, (length,), generator=source).tolist() for length in LENGTHS]
    return [*made[:3], made[1][:20] + made[3][20:], *made[4:]]


def expected(model: Any, prompt: list[int], kind: str) -> torch.Tensor:
    with torch.no_grad():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[kind]


def embed(
    runner: TorchRunner, asked: list[tuple[list[int], str]], ahead: RunnerThread | None = None, **changes: Any
) -> tuple[list[RequestOutput], Scheduler]:
    """All through one engine at once, with a request beside them that decodes."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 96, "block_size": 16}
    scheduler = Scheduler(SchedulerConfig(**(limits | {"num_blocks": runner.resolved.num_blocks} | changes)))
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=ahead is not None), ahead or runner), SystemClock())
    kinds = [SamplingParams(pooling=kind, seed=0) for _, kind in asked]
    kinds.append(SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, seed=0))
    for number, (prompt, sampling) in enumerate(zip([*(prompt for prompt, _ in asked), [3, 4]], kinds, strict=True)):
        now_ns = time.monotonic_ns()
        named = {"request_id": f"r{number}", "prompt_token_ids": tuple(prompt), "sampling": sampling}
        crank.submit(Request(**named, submitted_ns=now_ns, priority=-number), now_ns)
    ends: dict[str, RequestOutput] = {}
    while crank.has_work:
        output = crank.turn()
        scheduler.check()
        ends |= {news.request_id: news for news in (output.outputs if output else ()) if news.finish_reason}
    assert all(end.error is None for end in ends.values())
    return [ends[f"r{number}"] for number in range(len(asked))], scheduler


def vector(pooled: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pooled, np.float32).copy())


def test_embeddings_equal_transformers(pair, prompts) -> None:
    model, runner = pair
    asked = [(prompt, kind) for prompt in prompts for kind in POOLINGS]
    for outputs in (embed(runner, asked)[0], embed(runner, asked, max_num_batched_tokens=13)[0]):
        for output, (prompt, kind) in zip(outputs, asked, strict=True):
            assert (vector(output.pooled) - expected(model, prompt, kind)).abs().max() <= MAX_ABS_ERROR
            assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, ())


@pytest.fixture(scope="module")
def alone(qwen, prompts) -> dict[str, list[bytes]]:
    """Each embedding with nobody beside it, its prompt whole."""
    runner = load(qwen)
    found = {}
    for kind in POOLINGS:
        sequences = [
            Sequence(f"s{n}", prompt, SamplingParams(pooling=kind, seed=0)) for n, prompt in enumerate(prompts)
        ]
        found[kind] = [_whole(Driver(runner), sequence) for sequence in sequences]
    return found


def _whole(driver: Driver, sequence: Sequence) -> bytes:
    driver.runner.slots._by_id.clear()
    driver.prefill(sequence)
    return sequence.results[-1].pooled


@pytest.mark.parametrize(
    ("changes", "is_ahead"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 5}, False),
        ({"max_num_batched_tokens": 13}, True),
        ({"batching": "static"}, True),
        ({"policy": "priority", "max_prefill_tokens": 1}, False),
    ],
)
def test_they_are_the_same_however_they_are_scheduled(qwen, prompts, alone, changes: dict, is_ahead: bool) -> None:
    runner = load(qwen)
    asked = [(prompt, kind) for kind in POOLINGS for prompt in prompts]
    outputs, _ = embed(runner, asked, RunnerThread(runner.run) if is_ahead else None, **changes)
    assert [output.pooled for output in outputs] == [one for kind in POOLINGS for one in alone[kind]]


def test_a_cached_prefix_and_a_preemption_change_nothing(qwen, prompts, alone) -> None:
    runner = load(qwen)
    outputs, scheduler = embed(runner, [(prompt, "last") for prompt in prompts * 2], max_num_seqs=1)
    assert [output.pooled for output in outputs] == alone["last"] * 2
    assert scheduler.counts.prefix_hit_tokens >= 16 * (1 + 2 + 1 + 1 + 3)
    driver = Driver(runner)
    for kind in POOLINGS:
        sequence = Sequence(kind, prompts[1], SamplingParams(pooling=kind, seed=0))
        driver.step({sequence: 9})
        driver.preempt(sequence)
        driver.prefill(sequence, [3, 1, 20])
        assert sequence.results[-1].pooled == alone[kind][1]
        assert not any(result.pooled for result in sequence.results[:-1])


def test_what_is_said_of_some_tokens_behind_the_prompt_equals_transformers(pair, prompts) -> None:
    model, runner = pair
    for chunks in ([], [4, 1, 9]):
        driver = Driver(runner)
        for number, prompt in enumerate(prompts):
            ids = (number, 96, 3)
            driver.runner.slots._by_id.clear()
            sequence = Sequence(f"s{number}", prompt, SamplingParams(pooling="logits", allowed_token_ids=ids, seed=0))
            driver.prefill(sequence, chunks)
            with torch.no_grad():
                want = model(torch.tensor([prompt])).logits[0, -1, list(ids)]
            assert (vector(sequence.results[-1].pooled) - want).abs().max() <= MAX_ABS_ERROR
            assert not any(result.pooled or result.token_ids for result in sequence.results[:-1])


def test_a_model_saved_without_its_head_is_read(qwen, prompts, alone, tmp_path) -> None:
    """As Qwen3-Embedding is: no name begins with "model."."""
    tensors = load_file(qwen / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    outputs, _ = embed(load(tmp_path), [(prompts[1], "mean")])
    assert outputs[0].pooled == alone["mean"][1]


def test_attention_to_what_comes_later_is_refused(qwen, tmp_path) -> None:
    values = json.loads((qwen / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal is False"):
        load(tmp_path)
