"""`Ops.bytes_read`: what products and attention really took from memory, and nothing else."""

import subprocess
import sys

import pytest
import torch
from integers import inputs, rows_of

from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, LinearShape, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import Weighing

SHAPE = KvShape(num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8)
POSITION_BYTES = {torch.float32: 128, torch.bfloat16: 64, torch.int8: 48}  # keys and values of a position, and scales


class Reads:
    """What was read since this was made."""

    def __init__(self, ops):
        self.ops, self.before = ops, ops.bytes_read()

    def __call__(self):
        found = {kind: count - self.before.get(kind, 0) for kind, count in self.ops.bytes_read().items()}
        return {kind: count for kind, count in found.items() if count}


def least_bytes(scheme, out, columns):
    return out * columns // (2 if scheme.name == "int4" else 1)


@pytest.mark.parametrize("scheme", [WeightScheme("int8"), WeightScheme("int8", 16), WeightScheme("int4", 32)], ids=str)
def test_a_product_counts_its_weight_once(ops, scheme):
    weight, unread = (
        ops.pack_rounded([rows_of(scheme, 64, 128)], LinearShape(64, 128, None, scheme)) for _ in range(2)
    )
    reads = Reads(ops)
    assert reads() == {}
    ops.linear(inputs(1, 128), weight)
    kind = f"weights.{scheme.name}"
    assert reads().keys() == {kind}
    one = reads()[kind]
    assert least_bytes(scheme, 64, 128) <= one <= 64 * 128 * 2
    if ops.name == "native":
        assert one == weight.blob.numel()
    ops.linear(inputs(37, 128), weight)
    assert reads() == {kind: 2 * one}
    ops.linear(inputs(0, 128), weight)
    assert reads() == {kind: 2 * one}  # of no tokens nothing is read
    del unread


def test_floats_and_stacks_count_as_what_they_are_kept_in(ops):
    int4, plain = WeightScheme("int4", 32), WeightScheme("float32")
    parts = [
        ops.pack_rounded([rows_of(int4, 32, 64)], LinearShape(32, 64, None, int4)),
        ops.pack_linear([inputs(16, 64)], None, plain),
    ]
    reads = Reads(ops)
    ops.linear(inputs(2, 64), ops.stack_linear(parts))
    found = reads()
    assert found.keys() == {"weights.int4", "weights.float32"}
    assert found["weights.float32"] == 16 * 64 * 4
    ops.linear(inputs(2, 64), parts[0])
    assert reads() == found | {"weights.int4": 2 * found["weights.int4"]}


def test_bfloat16_weights(native):
    ops = make_backend("native", torch.float32)
    weight, reads = ops.pack_linear([inputs(16, 64)], None, WeightScheme("bfloat16")), Reads(ops)
    ops.linear(inputs(2, 64), weight)
    assert reads() == {"weights.bfloat16": 16 * 64 * 2}


def a_store(dtype):
    data = torch.zeros(9, 2, 2, SHAPE.block_size * SHAPE.head_dim, dtype=dtype)
    return LayerKv(data, torch.ones(9, 2, 2, SHAPE.block_size) if dtype == torch.int8 else None)


def a_batch():
    """A decode row of 9 positions, and 3 tokens after 2."""
    return AttentionBatch(
        query_begins=[0, 1, 4],
        context_lens=[9, 5],
        block_tables=torch.tensor([[0, 1, 2], [3, 4, 8]]),
        token_blocks=torch.tensor([2, 3, 3, 4]),
        token_offsets=torch.tensor([0, 2, 3, 0]),
        num_decode_rows=1,
    )


@pytest.mark.parametrize("dtype", POSITION_BYTES, ids=str)
def test_attention_counts_what_it_looks_at(ops, dtype):
    store, unread, reads = a_store(dtype), a_store(dtype), Reads(ops)
    plan = ops.plan_attention(a_batch(), SHAPE, None)
    ops.rope_write(inputs(4, 8 * 8).view(4, 8, 8), None, torch.ones(4, 4, dtype=torch.complex64), store, plan)
    assert reads() == {}  # written is not read
    ops.attention(inputs(4, 4 * 8).view(4, 4, 8), store, plan, Weighing(0.3))
    kind = f"kv.{str(dtype).removeprefix('torch.')}"
    found = reads()
    assert found.keys() == {kind}
    blocks = 5 * SHAPE.block_size  # the torch backends take whole blocks
    assert 14 * POSITION_BYTES[dtype] <= found[kind] <= blocks * POSITION_BYTES[dtype]
    if ops.name == "native":
        assert found[kind] == 14 * POSITION_BYTES[dtype]
    del unread


def test_a_window_counts_less(native):
    ops = make_backend("native", torch.float32)
    reads = Reads(ops)
    plan = ops.plan_attention(a_batch(), SHAPE, 2)
    ops.attention(inputs(4, 4 * 8).view(4, 4, 8), a_store(torch.int8), plan, Weighing(0.3))
    assert reads() == {"kv.int8": (2 + 4) * POSITION_BYTES[torch.int8]}  # 2 positions, and those of 3 queries


def test_a_process_that_has_read_nothing_says_so(native):
    """Not even what the choice of an instruction set has read."""
    script = (
        "import torch\n"
        "from splittime.kernels import api\n"
        "from splittime.kernels.choose import make_backend\n"
        "for name in ('native', 'torch', 'reference'):\n"
        "    ops = make_backend(name, torch.float32)\n"
        "    ops.pack_linear([torch.ones(16, 64)], None, api.WeightScheme('int8'))\n"
        "    assert ops.bytes_read() == {}, ops.bytes_read()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
