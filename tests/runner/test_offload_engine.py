"""Copies in host memory under the whole engine, in the interpreter: a prompt that comes back after its blocks were
evicted gives the tokens and logprobs that it gives in a cache with room for all, and most of it is not computed."""

import pytest
import torch

pytest.importorskip("triton")

from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import TokenLogprob
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.timeout(600)  # the interpreter is slow
BLOCK, MAX_LEN = 8, 24
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 8 * 4  # layers, K and V, heads, tokens, head_dim, float32
RETURNING = ("a", "b", "a2", "b2")
PROMPT = 18  # two full blocks, which are kept, and two tokens
Answer = tuple[list[int], list[TokenLogprob]]


def load(folder, num_blocks: int, num_host_slots: int, kernels: str = "triton", **settings) -> TorchRunner:
    per_block = BLOCK_BYTES if settings.get("kv_cache_dtype") is None else BLOCK_BYTES * 12 // 32  # of 8 bits: scales
    per_block //= settings.get("tensor_parallel_size", 1)  # each rank has its part of every block
    given = {"max_num_seqs": 2, "num_threads": 1, "block_size": BLOCK, "max_model_len": MAX_LEN, **settings}
    return load_torch_runner(
        RunnerConfig(
            model_path=str(folder),
            kernels=kernels,
            kv_cache_memory_bytes=num_blocks * per_block,
            kv_offload_memory_bytes=num_host_slots * per_block,
            **given,
        )
    )


def answers(runner: TorchRunner, is_ahead: bool = False):
    """The prompts one after the other; and the steps, and the engine."""
    resolved = runner.resolved
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=26,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            num_blocks=resolved.num_blocks,
            num_host_slots=resolved.num_host_slots,
        )
    )
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=is_ahead), runner), SystemClock())  # type: ignore[arg-type]
    found: dict[str, Answer] = {name: ([], []) for name in RETURNING}
    records: list[StepRecord] = []
    for name in RETURNING:
        prompt = tuple((7 * ord(name[0]) + 5 * place) % 59 for place in range(PROMPT))
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0, logprobs=1)
        crank.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=0), 1)
        while crank.has_work:
            output = crank.turn()
            scheduler.check()
            assert output is not None
            records += [output.record] if output.record is not None else []
            for news in output.outputs:
                assert news.error is None, news.error
                found[news.request_id][0].extend(news.token_ids)
                found[news.request_id][1].extend(news.logprobs)
    verify_steps(records)
    return found, records, crank


def compare(got: dict[str, Answer], want: dict[str, Answer], abs_error: float = 1e-4) -> None:
    assert {name: tokens for name, (tokens, _) in got.items()} == {name: tokens for name, (tokens, _) in want.items()}
    for name, (_, logprobs) in want.items():
        near = pytest.approx([one.logprob for one in logprobs], abs=abs_error)
        assert [one.logprob for one in got[name][1]] == near


@pytest.fixture(scope="module")
def want(folder):
    found, _, crank = answers(load(folder, num_blocks=64, num_host_slots=0))
    assert crank.stats().prefix_hit_tokens == 2 * 16
    return found


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one after the other", "ahead"])
@pytest.mark.sample(1)
def test_the_same_tokens_from_host_memory(folder, want, is_ahead):
    runner = load(folder, num_blocks=3, num_host_slots=8)
    assert runner.resolved.kv_offload == f"64 tokens of evicted blocks in {8 * BLOCK_BYTES} bytes of host memory"
    if not is_ahead:
        runner.warm_up()  # which makes copies too, and leaves nothing behind
    found, records, crank = answers(runner, is_ahead)
    compare(found, want)
    stats = crank.stats()
    assert stats.prefix_host_hit_tokens == stats.restored_tokens == 2 * 16
    assert stats.host_blocks_used == stats.offloaded_tokens // BLOCK == 4
    for record in records:
        assert (record.restore_ns > 0) == (record.restored_blocks > 0)
        assert (record.offload_ns > 0) == (record.offloaded_blocks > 0)
    assert sum(record.prefill_tokens for record in records) == 2 * PROMPT + 2 * 2


def test_scales_go_with_what_they_scale_and_captured_steps_find_both(folder):
    runner = load(folder, num_blocks=3, num_host_slots=8, kv_cache_dtype="fp8")
    runner.capture((2,))
    found, _, crank = answers(runner, is_ahead=True)
    assert crank.stats().restored_tokens == 2 * 16
    compare({name: found[f"{name}2"] for name in "ab"}, {name: found[name] for name in "ab"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="each rank would need a card of its own")
@pytest.mark.sweep
def test_ranks_keep_their_own_copies(folder, want):
    runner = load(
        folder, num_blocks=3, num_host_slots=8, tensor_parallel_size=2, num_threads=2, collective_timeout_s=300
    )
    try:
        found, records, crank = answers(runner)
    finally:
        runner.close()
    compare(found, want)
    assert (runner.resolved.num_blocks, runner.resolved.num_host_slots) == (3, 8)
    assert crank.stats().restored_tokens == 2 * 16
    assert all(record.restore_ns > 0 for record in records if record.restored_blocks)


def test_where_the_cache_is_in_host_memory_it_is_refused(folder):
    with pytest.raises(ConfigError, match="in host memory already") as caught:
        load(folder, num_blocks=64, num_host_slots=4, kernels="torch")
    assert "kv_cache_memory_bytes" in (caught.value.info.hint or "")
