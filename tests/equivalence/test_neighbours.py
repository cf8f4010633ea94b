"""A request's numbers do not depend on who else is served, nor on how its prompt was cut: to the last bit.

(Only outputs that are computed again after a preemption may differ in the last bit: ADR 5.)
"""

import random
import time
from pathlib import Path

import pytest
import torch
from listening import prompt_logits
from native_or_not import has_native_kernels
from random_models import make

from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

MODEL = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
ROUTES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")


def outcomes(runner, prompts, config):
    """The (token, logprob) pairs of each prompt, all served by one engine."""
    crank = Crank(EngineParts(Engine(Scheduler(config)), runner), SystemClock())
    found = {}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, ignore_eos=True, seed=number, logprobs=1)
        request = Request(
            request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling, submitted_ns=time.monotonic_ns()
        )
        crank.submit(request, request.submitted_ns)
        found[request.request_id] = []
    while crank.has_work:
        output = crank.turn()
        for news in output.outputs if output else ():
            assert news.error is None
            found[news.request_id] += zip(news.token_ids, (one.logprob for one in news.logprobs), strict=True)
    return found


@pytest.mark.parametrize("name", ROUTES)
def test_neighbours_and_chunks_change_nothing(name):
    config = RunnerConfig(model_path=str(MODEL), max_model_len=256, packed_cache="off", num_threads=2, **ROUTES[name])
    runner, source = load_torch_runner(config), random.Random(7)
    prompts = [tuple(source.randrange(300, 3000) for _ in range(length)) for length in (1, 33, 70, 17, 64, 5, 129)]
    settings = {"max_model_len": 256, "block_size": 16, "num_blocks": runner.resolved.num_blocks}
    alone = {}
    for number, prompt in enumerate(prompts):
        plain = SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False, **settings)
        alone[f"{number}"] = outcomes(runner, [*[(5,)] * number, prompt], plain)[f"{number}"]
    for budget in (8, 32, 64, 500):
        shared = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, **settings)
        assert outcomes(runner, prompts, shared) == alone


@pytest.mark.parametrize(
    "variant", ["qwen2-moe", "glm-moe", "gpt-oss-yarn", "cohere-head-norms", "cohere2", "starcoder2"]
)
def test_chunks_change_no_bit_of_what_torch_computes(variant, tmp_path):
    """Gates and routers by sigmoid, clamped experts and layer norms are not of the native kernels."""
    make(variant, tmp_path)
    source = random.Random(7)
    prompt = [source.randrange(3, 97) for _ in range(200)]
    whole, _ = prompt_logits(tmp_path, prompt, dtype="float32", kernels="native")
    for size in (1, 7, 29):
        found, _ = prompt_logits(tmp_path, prompt, [size] * (200 // size), dtype="float32", kernels="native")
        assert torch.equal(found, whole)
