"""The path of a card, without one: nothing waits where it must not, nothing mixes the two sides, captured steps are
replayed, and the tokens are those of the same kernels on tensors of the CPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch

pytest.importorskip("triton")

from fake_card import CARD, CardError, FakeCard

from splittime.core.sampling import SamplingParams
from splittime.core.step import PENDING, Admitted, Row, StepPlan, StepResult
from splittime.kernels.triton import elementwise
from splittime.kernels.triton.device import is_interpreted
from splittime.runner import ceilings
from splittime.runner.compose import gauge_of, load_torch_runner, sleeper_of
from splittime.runner.config import RunnerConfig
from splittime.runner.device import execution
from splittime.runner.marks import StreamMark, to_device, to_host

pytestmark = [
    pytest.mark.timeout(600),  # the interpreter is slow
    pytest.mark.skipif(not is_interpreted(), reason="there is a card: it need not be faked"),
]
PROMPT = tuple(range(3, 12))
DRAWN = {
    "a": SamplingParams(temperature=0.0, seed=1, logprobs=2, max_tokens=9, ignore_eos=True),
    "b": SamplingParams(temperature=1.2, top_p=0.9, top_k=7, seed=2, max_tokens=9, ignore_eos=True),
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
HELD = SamplingParams(temperature=0.0, seed=3, repetition_penalty=1.5, prompt_logprobs=1, max_tokens=9)


@pytest.fixture
def card() -> Iterator[FakeCard]:
    with FakeCard() as made:
        yield made


def config(folder: Path, **more: Any) -> RunnerConfig:
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 32, "block_size": 8, "num_threads": 1}
    memory = {"kv_cache_memory_bytes": 1 << 16, "packed_cache": "off", "load_format": "dummy", "kernels": "triton"}
    return RunnerConfig(model_path=str(folder), **{**small, **memory, **more})


def write(folder: Path, **changes: Any) -> Path:
    told = {**tiny_checkpoint.CONFIG, "num_hidden_layers": 1, "torch_dtype": "bfloat16", **changes}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def plans(has_host: bool) -> tuple[StepPlan, ...]:
    """Two requests: a prompt beside a chunk of one; the chunk's rest beside a token that is not known yet; decode steps
    of both and of one. Blocks are copied to host memory and back."""
    a, b = (Admitted(name, PROMPT, 0, sampling, ()) for name, sampling in DRAWN.items())
    there, back = (((0, 0), (2, 1)), ((0, 4), (1, 5))) if has_host else ((), ())
    return (
        StepPlan(1, (Row("a", 0, PROMPT, (0, 1), 1), Row("b", 0, PROMPT[:4], (2, 3), 0)), (a, b)),
        StepPlan(2, (Row("a", 9, (PENDING,), (), 1), Row("b", 4, PROMPT[4:], (), 1)), offloads=there),
        StepPlan(3, (Row("a", 10, (PENDING,), (), 1), Row("b", 9, (PENDING,), (), 1)), restores=back),
        StepPlan(4, (Row("a", 11, (PENDING,), (), 1), Row("b", 10, (PENDING,), (), 1))),
        StepPlan(5, (Row("b", 11, (PENDING,), (), 1),), released=("a",)),
    )


def driven(runner: Any, card: FakeCard | None) -> list[StepResult]:
    """Each step is launched before the one before is collected."""
    results = []
    for plan in plans(runner.resolved.num_host_slots > 0):
        if card is None:
            runner.launch(plan)
        else:
            with card.no_waiting():
                runner.launch(plan)
        if plan.step_id > 1:
            results.append(runner.collect())
    results.append(runner.collect())
    runner.run(StepPlan(6, (), released=("b",)))
    assert all(row.error is None for result in results for row in result.rows)
    return results


def rows_of(results: list[StepResult]) -> list[Any]:
    return [result.rows for result in results]


def test_the_steps_of_a_card(tmp_path: Path) -> None:
    """With copies to host memory, captured and not, before sleep and after it."""
    asked = config(write(tmp_path), kv_offload_memory_bytes=1 << 14)
    want = rows_of(driven(load_torch_runner(asked), None))
    with FakeCard() as card:
        runner: Any = load_torch_runner(asked)
        runner.capture((1, 2))
        results = driven(runner, card)
        assert [result.execution for result in results] == ["eager", "eager", "captured", "captured", "captured"]
        assert card.replays == 3
        assert rows_of(results) == want
        sleeper = sleeper_of(runner)
        assert sleeper.sleep(1).weights_bytes > 0
        sleeper.wake()
        assert rows_of(driven(runner, card)) == want
        assert card.replays == 6


@pytest.mark.sweep
def test_what_a_start_does(card: FakeCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up compiles all that steps need, and captures some; the host waits for what begins a capture alone."""
    runner: Any = load_torch_runner(config(write(tmp_path, **MIXTURE), quantization="int4", kv_cache_dtype="fp8"))
    card.waits.clear()
    monkeypatch.setattr(execution, "REPLAYS", 1)
    runner.warm_up()
    assert set(card.waits) == {"a capture begins", "synchronize"}
    assert runner.resolved.graph_sizes
    compiled = set(card.compiled)
    driven(runner, card)
    assert card.compiled == compiled, "no request waits for a compiler"
    for name, size in {"COPY_BYTES": 1 << 10, "CARD_TOKENS": 16, "CARD_WIDTH": 64, "PASSES": 1}.items():
        monkeypatch.setattr(ceilings, name, size)
    *_, found = gauge_of(runner).measure()
    assert found.read_bytes_per_s
    assert found.operations_per_s


def test_what_the_host_works_out_waits(card: FakeCard, tmp_path: Path) -> None:
    """Penalties and prompt log-probabilities do, which is why the steps of the others are held against `no_waiting`."""
    runner: Any = load_torch_runner(config(write(tmp_path)))
    plan = StepPlan(1, (Row("h", 0, PROMPT, (0, 1), 1),), (Admitted("h", PROMPT, 0, HELD, ()),))
    with card.no_waiting(), pytest.raises(CardError, match="waits"):
        runner.launch(plan)
    result = runner.run(StepPlan(2, plan.rows, plan.admitted, ("h",)))
    assert len(result.rows[0].prompt_logprobs) == len(PROMPT) - 1


# ---- the card itself: that it would tell


def test_tensors_of_both_sides_are_told(card: FakeCard) -> None:
    there, here = torch.ones(3, device=CARD), torch.ones(3)
    assert (there + 1).is_cuda
    assert there[1:].view(2, 1).device == CARD
    assert not there.to("cpu").is_cuda
    with pytest.raises(CardError, match="of the card and of the host"):
        there + here
    with pytest.raises(CardError, match="x is not on the card"):
        elementwise.finite(here.view(1, 3).to(CARD, copy=True).cpu())
    there.untyped_storage().resize_(0)
    with pytest.raises(CardError, match="given back"):
        there.add_(1)


def test_what_waits_is_told(card: FakeCard) -> None:
    there = torch.arange(4, device=CARD)
    asked = (there.tolist, there.cpu, lambda: there[there > 1], lambda: there[torch.tensor([0])], there.sum().item,
             lambda: bool(there.any()), lambda: torch.ones(4).to(CARD, non_blocking=True), there.nonzero)  # fmt: skip
    for ask in asked:
        ask()
        with card.no_waiting(), pytest.raises(CardError, match="waits"):
            ask()
    assert len(card.waits) == len(asked)


def test_copies_take_their_time(card: FakeCard) -> None:
    with card.no_waiting():
        host = to_host(torch.arange(4, device=CARD))
        end = StreamMark(CARD)
    assert host.tolist() != [0, 1, 2, 3]
    end.wait()
    assert host.tolist() == [0, 1, 2, 3]
    pinned = torch.ones(4).pin_memory()
    to_device(pinned, CARD)
    pinned.fill_(2)
    with pytest.raises(CardError, match="written to"):
        StreamMark(CARD).wait()


def test_what_a_capture_refuses(card: FakeCard) -> None:
    x = torch.ones(2, 3, device=CARD)
    for attempt in (
        lambda: elementwise.finite(x),
        x.tolist,
        lambda: to_device(torch.ones(2), CARD),
        lambda: StreamMark(CARD),
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CardError):
            attempt()


def test_a_replay_reads_what_is_there_then(card: FakeCard) -> None:
    x, graph = torch.ones(2, 3, device=CARD), torch.cuda.CUDAGraph()
    elementwise.finite(x)
    with torch.cuda.graph(graph):
        doubled = (x * 2)[:, 1:]
        is_finite = elementwise.finite(x)
    x[0].fill_(torch.inf)
    graph.replay()
    assert doubled.tolist() == [[torch.inf] * 2, [2.0] * 2]
    assert is_finite.tolist() == [False, True]
