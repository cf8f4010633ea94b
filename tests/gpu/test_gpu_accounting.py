"""What a step on a card is held against: bytes and operations counted by hand, and beside what the kernels count."""

import pytest
import torch

from benchmarks.gpu import floors
from benchmarks.gpu.profiled import covered, summary
from benchmarks.gpu.shapes import SHAPES, write
from benchmarks.scenarios.engine_driver import Run
from benchmarks.scenarios.mechanisms import memory_use
from benchmarks.scenarios.reversals import crossover
from benchmarks.scenarios.streams import Decoded, Streams
from benchmarks.timed_run import RequestOutcome
from splittime.core.facts import TokenCost
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import Account
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

CEILING = {"bytes_per_s": 1e12, "operations_per_s": 1e15}
LLAMA = SHAPES["llama-3.1-8b"]


def cost_of(shape) -> TokenCost:
    """By hand, of a dense model in bfloat16."""
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads, head_dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    head = shape["vocab_size"] * hidden
    return TokenCost(
        weight_bytes=2 * (layers * layer + head),
        kv_bytes_per_token=2 * 2 * layers * kv_heads * head_dim,
        operations_per_token=2 * layers * layer,
        operations_per_context_token=4 * layers * heads * head_dim,
        head_bytes=2 * head,
        operations_per_sample=2 * head,
        window_tokens=None,
        windowed_share=0.0,
    )


def test_decode_of_8b_by_hand():
    """15.0 GB of weights, embedding apart; 128 KiB of keys and values a token of context."""
    cost = cost_of(LLAMA)
    assert cost.weight_bytes == 2 * (32 * 218_103_808 + 525_336_576) == 15_009_316_864
    assert floors.decode_bytes(cost, cost.weight_bytes, 64 * 1024) == 15_009_316_864 + 65536 * 131072
    assert floors.decode_operations(cost, 64, 64 * 1024) == 64 * 2 * 7_504_658_432 + 65536 * 4 * 32 * 4096


def test_prefill_counts_each_pair_once_and_the_head_for_one_row():
    cost = cost_of(LLAMA)
    pairs = sum(range(1, 2049))
    want = 2048 * 2 * 32 * 218_103_808 + pairs * 4 * 32 * 4096 + 2 * 525_336_576
    assert floors.prefill_operations(cost, 2048) == want
    assert floors.prefill_operations(cost, 1) == floors.decode_operations(cost, 1, 1)


def test_the_floor_is_the_larger_of_both():
    assert floors.floor_s(2e12, 1e15, CEILING) == 2.0
    assert floors.floor_s(1e12, 3e15, CEILING) == 3.0


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_steps_read_what_is_accounted(quantization, tmp_path):
    """The head is among what a decode step reads; the embedding's rows are not."""
    settings = {"kernels": "native", "load_format": "dummy", "packed_cache": "off", "quantization": quantization}
    streams = Streams(str(write("tiny", tmp_path)), settings | {"max_model_len": 64}, most=3, prompt_tokens=9)
    decoded = streams.decode(3, 4)
    assert decoded.weight_bytes == 4 * streams.resolved.weights_bytes
    if quantization is None:
        assert streams.runner.cost == cost_of(SHAPES["tiny"])
        assert streams.runner.cost.weight_bytes == streams.resolved.weights_bytes
    first = decoded.records[0]
    assert first.kv_tokens_read == sum(start + count for _, start, count in first.rows)
    streams.begin_anew(is_ahead=True)
    assert streams.crank.engine.plans_ahead
    assert len(streams.decode(2, 3).records) == 3


def record(begin_ns, end_ns, **more):
    parts = {"plan_ns": 0, "launch_ns": 0, "device_ns": end_ns - begin_ns, "sample_ns": 0, "commit_ns": 0}
    counts = {"prefill_tokens": 0, "decode_tokens": 2, "kv_tokens_read": 0, "blocks_used": 0, "num_running": 2}
    rest = {"num_waiting": 0, "rows": (), "host_gap_ns": 0, "idle_ns": 0}
    return StepRecord(step_id=0, begin_ns=begin_ns, end_ns=end_ns, **{**parts, **counts, **rest, **more})


def test_memory_that_holds_tokens_by_time_while_somebody_waits():
    rows = (("a", 0, 1), ("b", 0, 1))
    waiting = {"rows": rows, "num_waiting": 3}
    steps = [
        record(0, 10, kv_tokens_read=60, **waiting),
        record(10, 40, kv_tokens_read=20, **waiting),
        record(40, 90, kv_tokens_read=1, rows=rows),  # nobody waits
        record(90, 99, kv_tokens_read=1, rows=rows[:1], num_waiting=3),
    ]  # not all that run are in it
    request = Request(
        request_id="a", prompt_token_ids=(1,) * 4, sampling=SamplingParams(max_tokens=2, seed=0), submitted_ns=0
    )
    outcome = RequestOutcome(request, Account("a", 0, Stage.HANDOFF), token_ready_ns=[50, 90])
    outcome.account.close(99)
    found = memory_use(Run([outcome], steps, wall_s=2.0), capacity_tokens=100)
    assert found["held_share"] == pytest.approx((60 * 10 + 20 * 30) / 40 / 100)
    assert (found["tokens_per_s"], found["running_mean"], found["steps"]) == (1.0, 2, 4)


def test_the_crossover_is_where_fewer_bits_no_longer_win():
    def arm(*rates):
        return {"ceilings": {}} | {
            str(n): {"tokens_per_s": {"median": rate}} for n, rate in zip((1, 4, 16), rates, strict=True)
        }

    assert crossover({"int4": arm(9, 20, 30), "16 bits": arm(3, 21, 40)}, "int4", "16 bits") == 4
    assert crossover({"int4": arm(9, 20, 41), "16 bits": arm(3, 19, 40)}, "int4", "16 bits") is None


def test_windows_cut_the_steps_and_the_bytes():
    whole = Decoded([record(at, at + 10) for at in range(0, 70, 10)], 700)
    windows = whole.windows(3)
    assert [len(one.records) for one in windows] == [2, 2, 2]
    assert [one.weight_bytes for one in windows] == [200, 200, 200]
    assert [one.records[0].begin_ns for one in windows] == [0, 20, 40]
    assert windows[0].tokens_per_s == pytest.approx(4 / 20e-9)


@pytest.mark.parametrize(("share", "want"), [(0.5, 5), (0.99, 10), (0.01, 1), (0.1, 1), (1.0, 10)])
def test_percentile(share, want):
    assert floors.percentile([float(value) for value in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)], share) == want


def test_spans_that_overlap_are_covered_once():
    assert covered([(0, 10), (5, 12), (20, 30), (21, 22), (25, 28)]) == 22
    found = summary([("a", 0, 10), ("b", 5, 12), ("a", 20, 30)])
    assert found["idle"] == pytest.approx(1 - 22 / 30)
    assert list(found["kernels_ms"]) == ["a", "b"]
    assert found["kernels_ms"]["a"] == pytest.approx(0.02)
    assert summary([]) == {}


def test_shapes_are_the_models_they_are_named_after():
    """Parameters in thousands of millions, as their makers tell them."""
    told = {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5}
    for name, size in told.items():
        assert parameters(SHAPES[name]) / 1e9 == pytest.approx(size, rel=0.01), name


def parameters(shape) -> int:
    cost = cost_of(shape)
    tables = 1 if shape.get("tie_word_embeddings") else 2
    if "num_experts" not in shape:
        return cost.operations_per_token // 2 + tables * shape["vocab_size"] * shape["hidden_size"]
    attention = (
        cost.operations_per_token // 2
        - 3 * shape["num_hidden_layers"] * shape["hidden_size"] * shape["intermediate_size"]
    )
    experts = (
        3 * shape["num_hidden_layers"] * shape["num_experts"] * shape["hidden_size"] * shape["moe_intermediate_size"]
    )
    return attention + experts + tables * shape["vocab_size"] * shape["hidden_size"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
