"""The engine on models of which some layers keep states: however a request is scheduled, its numbers are the same.

batched = alone, chunked = whole, planned ahead = one after the other, preempted = undisturbed: by the native kernels to
the last bit, and so is a prompt that goes on from a checkpoint, for what prompts wrote. What decode steps wrote and a
later prompt reads is the same but for the last bits (the keys of the layers with attention), so there tokens are
compared, and by torch's kernels, whose products depend on what is beside them, tokens and nearly the same scores.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from native_or_not import has_native_kernels
from random_models import STATEFUL, make

from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import CHECKPOINT_TOKENS
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.runner.compose import RunnerThread, load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.config_sizes import sizes_of_config
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

LENGTHS = (3, 17, 64, 65, 130, 7, 48, 191)
NO_CACHE = {"enable_prefix_caching": False}
KERNELS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not has_native_kernels(), reason="no kernels"))]
Outcome = list[tuple[int, float]]


def loaded(folder: Path, **changes: Any) -> TorchRunner:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": 16, "packed_cache": "off"}
    return load_torch_runner(RunnerConfig(model_path=str(folder), **(settings | changes)))


@pytest.fixture(scope="module", params=KERNELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tmp_path_factory.mktemp("model")
    make("qwen3.5", folder)
    return loaded(folder, kernels=request.param)


class Served:
    """An engine and what came of its requests, by name. num_computed: tokens that its steps computed."""

    def __init__(self, runner: TorchRunner, *, is_ahead: bool = False, **changes: Any) -> None:
        resolved = runner.resolved
        settings: dict[str, Any] = {
            **{"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, "block_size": 16},
            **{"num_blocks": resolved.num_blocks, "num_state_slots": resolved.num_state_slots},
        }
        self.scheduler = Scheduler(SchedulerConfig(**(settings | changes)))
        engine, ahead = Engine(self.scheduler, plans_ahead=is_ahead), RunnerThread(runner.run) if is_ahead else None
        self._crank = Crank(EngineParts(engine, ahead or runner), SystemClock())
        self.found: dict[str, Outcome] = {}
        self.num_computed = 0

    def serve(self, prompts: dict[str, tuple[int, ...]], max_tokens: int = 6, temperature: float = 0.7) -> None:
        for number, (name, prompt) in enumerate(prompts.items()):
            drawn = {"temperature": temperature, "seed": number, "logprobs": 1, "ignore_eos": True}
            now_ns, sampling = time.monotonic_ns(), SamplingParams(max_tokens=max_tokens, **drawn)
            request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=now_ns)
            self._crank.submit(request, now_ns)
            self.found[name] = []
        while self._crank.has_work:
            output = self._crank.turn()
            self.scheduler.check()
            if output is not None and output.record is not None:
                self.num_computed += sum(count for _, _, count in output.record.rows)
            for news in output.outputs if output else ():
                assert news.error is None, news.error
                scores = (one.logprob for one in news.logprobs)
                self.found[news.request_id] += zip(news.token_ids, scores, strict=True)


def require_same(runner: TorchRunner, found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    if runner.resolved.kernels == "native":
        assert found == expected
    require_nearly_same(found, expected)


def require_nearly_same(found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    for name, outcome in expected.items():
        assert [token for token, _ in found[name]] == [token for token, _ in outcome]
        assert [score for _, score in found[name]] == pytest.approx([score for _, score in outcome], abs=1e-3)


def prompts() -> dict[str, tuple[int, ...]]:
    """Prompts that share 80 tokens in pairs."""
    source, found = random.Random(7), {}
    for number, length in enumerate(LENGTHS):
        if number % 2 == 0:
            shared = [source.randrange(3, 97) for _ in range(80)]
        found[f"{number}"] = (*shared, *(source.randrange(3, 97) for _ in range(length)))
    return found


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> dict[str, Outcome]:
    """Each in an engine of its own, whole, with no prefix cache."""
    found = {}
    for number, (name, prompt) in enumerate(prompts().items()):
        engine = Served(runner, max_num_seqs=1, **NO_CACHE)
        engine.serve({**{f"before {n}": (5,) for n in range(number)}, name: prompt})
        found[name] = engine.found[name]
    return found


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("budget", [8, 29, 64, 512])
def test_company_and_cuts_change_no_bit(
    runner: TorchRunner, alone: dict[str, Outcome], budget: int, is_ahead: bool
) -> None:
    engine = Served(runner, is_ahead=is_ahead, max_num_batched_tokens=budget)
    engine.serve(prompts())
    require_same(runner, engine.found, alone)


@pytest.mark.parametrize("num_state_slots", [3, 10, 64])
def test_a_hit_is_a_computed_prompt_to_the_last_bit(
    runner: TorchRunner, alone: dict[str, Outcome], num_state_slots: int
) -> None:
    """Twice the same, with slots for hardly a checkpoint, some, and all."""
    engine = Served(runner, num_state_slots=num_state_slots)
    for _ in range(2):
        engine.serve(prompts())
        require_same(runner, engine.found, alone)
    assert (engine.scheduler.counts.prefix_hit_tokens > 0) == (num_state_slots > 3)


def test_at_every_length_a_prompt_goes_on_from_its_last_checkpoint(runner: TorchRunner) -> None:
    source = random.Random(3)
    longest = tuple(source.randrange(3, 97) for _ in range(200))
    lengths = [1, 63, 64, 65, 66, 127, 128, 129, 144, 192, 193, 200]
    cold = Served(runner, **NO_CACHE)
    cold.serve({f"{length}": longest[:length] for length in lengths}, max_tokens=1)
    warm = Served(runner)
    warm.serve({"all": longest}, max_tokens=1)
    for length in lengths:
        before = warm.num_computed
        name, number = f"{length}", lengths.index(length)
        warm.serve({**{f"{n}": longest[:1] for n in range(number)}, name: longest[:length]}, max_tokens=1)
        require_same(runner, {name: warm.found[name]}, {name: cold.found[name]})
        computed = length - (length - 1) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
        assert warm.num_computed - before == number + computed


def test_a_preempted_request_is_undisturbed(runner: TorchRunner) -> None:
    """What its outputs wrote is computed again as a prompt, so scores may differ in the last bits."""
    asked, tight = {name: prompts()[name] for name in ("1", "3", "6")}, {"num_blocks": 26, "max_model_len": 256}
    engines = [Served(runner, **NO_CACHE), Served(runner, **tight, **NO_CACHE), Served(runner, **tight)]
    for engine in engines:
        engine.serve(asked, max_tokens=60)
    preempted = [engine.scheduler.counts.num_preemptions for engine in engines]
    assert preempted[0] == 0
    assert min(preempted[1:]) > 0
    for engine in engines[1:]:
        require_nearly_same(engine.found, engines[0].found)


def test_turns_of_two_agents_compute_what_is_new(runner: TorchRunner) -> None:
    """Six turns each by turns: at most a checkpoint's tokens more than is new, and the answers of an engine that
    computes all of it again. (Engines have the runner's memory to themselves, one after the other.)"""
    source, turns, cold = random.Random(5), list[tuple[str, tuple[int, ...]]](), Served(runner, **NO_CACHE)
    histories = {name: tuple(source.randrange(3, 97) for _ in range(100)) for name in ("one", "two")}
    answers = []
    for _ in range(6):
        for agent, history in histories.items():
            turns.append((agent, history))
            cold.serve({agent: history}, max_tokens=9, temperature=0.0)
            answers.append([token for token, _ in cold.found[agent]])
            histories[agent] = (*history, *answers[-1], *(source.randrange(3, 97) for _ in range(20)))
    warm, known = Served(runner), dict.fromkeys(histories, 0)
    for (agent, history), answer in zip(turns, answers, strict=True):
        before = warm.num_computed
        warm.serve({agent: history}, max_tokens=9, temperature=0.0)
        assert [token for token, _ in warm.found[agent]] == answer
        new = len(history) + 8 - known[agent]
        assert new <= warm.num_computed - before < new + CHECKPOINT_TOKENS
        known[agent] = len(history) + 8
    assert (cold.num_computed, warm.num_computed) == (2166, 758)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": '{"method": "suffix"}', "kernels": "native"}, "speculative_config"),
        ({"kv_export": True}, "kv_export"),
        ({"kv_cache_memory_bytes": 1 << 16}, "max_num_seqs"),
    ],
)
def test_what_states_do_not_go_with_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], param: str) -> None:
    make("qwen3.5", tmp_path)
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, **settings)
    assert caught.value.info.param == param


def test_sizes_of_the_config_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    make("qwen3.5", tmp_path)
    runner = loaded(tmp_path, kernels="torch")
    assert sizes_of_config(tmp_path, "float32").cost == runner.cost
    assert runner.cost.state_bytes == runner.resolved.state_bytes > 0


@pytest.mark.parametrize("variant", [name for name in STATEFUL if name != "qwen3.5"])
def test_other_shapes_go_on_from_checkpoints_too(variant: str, tmp_path: Path) -> None:
    make(variant, tmp_path)
    runner, asked = loaded(tmp_path), {name: prompts()[name] for name in ("2", "3")}
    cold = Served(runner, **NO_CACHE)
    cold.serve(asked)
    warm = Served(runner)
    for _ in range(2):
        warm.serve(asked)
        require_same(runner, warm.found, cold.found)
    assert warm.scheduler.counts.prefix_hit_tokens > 0
