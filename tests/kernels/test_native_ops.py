"""The binding: custom ops as torch sees them, the fused layer beside its composition, the choice of instruction set."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.kernels import api
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, WeightScheme
from splittime.models.layers import Attention, DecoderLayer, Mlp

SHAPE = KvShape(num_blocks=12, block_size=16, num_kv_heads=2, head_dim=16)
HEADS, HIDDEN, INNER, EPS = 4, 48, 80, 1e-5
SCHEMES = [WeightScheme("float32"), WeightScheme("bfloat16"), WeightScheme("int8"), WeightScheme("int4", 32)]


@pytest.fixture(scope="module")
def ops():
    try:
        native = api.resolve("native", torch.float32)
    except ConfigError as error:
        pytest.skip(str(error))
    native.set_threads(2)
    return native


def weights(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def layer_of(ops, scheme, with_norm, with_bias):
    heads = HEADS + 2 * SHAPE.num_kv_heads
    bias = torch.linspace(-1, 1, heads * SHAPE.head_dim) if with_bias else None
    qk_norm = ops.pack_norm(torch.rand(HEADS + SHAPE.num_kv_heads, SHAPE.head_dim) + 0.5, EPS) if with_norm else None
    attention = Attention(
        ops=ops,
        qkv=ops.pack_linear([weights(heads * SHAPE.head_dim, HIDDEN, 1)], bias, scheme),
        output=ops.pack_linear([weights(HIDDEN, HEADS * SHAPE.head_dim, 2)], None, scheme),
        qk_norm=qk_norm,
        num_heads=HEADS,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        window_tokens=None,
    )
    gate_up = ops.pack_linear([weights(INNER, HIDDEN, 3), weights(INNER, HIDDEN, 4)], None, scheme)
    mlp = Mlp(ops, gate_up, ops.pack_linear([weights(HIDDEN, INNER, 5)], None, scheme))
    norm = ops.pack_norm(torch.rand(HIDDEN) + 0.5, EPS)
    return DecoderLayer(ops, norm, attention, norm, mlp)


def a_batch():
    """A decode row at position 20 and a row of 5 tokens at the start of its context."""
    return AttentionBatch(
        query_begins=[0, 1, 6],
        context_lens=[21, 5],
        block_tables=torch.tensor([[3, 4], [7, 12]]),
        token_blocks=torch.tensor([4, 7, 7, 7, 7, 7]),
        token_offsets=torch.tensor([4, 0, 1, 2, 3, 4]),
        num_decode_rows=1,
    )


def a_store():
    sizes = (SHAPE.num_blocks + 1, 2, SHAPE.num_kv_heads, SHAPE.block_size * SHAPE.head_dim)
    return LayerKv(torch.randn(sizes, generator=torch.Generator().manual_seed(6)), None)


def turns_of(tokens):
    angles = torch.linspace(0, 3, tokens * SHAPE.head_dim // 2).view(tokens, -1)
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_fused_layer_is_its_composition_to_the_last_bit(ops, scheme, with_norm, with_bias):
    layer = layer_of(ops, scheme, with_norm, with_bias)
    fused = ops.fuse_layer(layer)
    plan = ops.plan_attention(a_batch(), SHAPE, None, torch.float32)
    hidden, turns = weights(6, HIDDEN, 7), turns_of(6)
    stores = a_store(), a_store()
    want = layer(hidden.clone(), turns, stores[0], plan)
    for _ in range(2):  # the second call finds the scratch memory dirty
        got = fused(hidden.clone(), turns, stores[1], plan)
        assert torch.equal(got, want)
    assert torch.equal(stores[0].data, stores[1].data)
    assert not torch.equal(want, hidden)


def test_parts_are_packed_as_their_concatenation(ops):
    for rows in ((32, 16, 7), (7, 9)):  # aligned to panels, and not
        parts = [weights(count, 64, count) for count in rows]
        for scheme in SCHEMES:
            apart = ops.pack_linear(parts, None, scheme)
            together = ops.pack_linear([torch.cat(parts)], None, scheme)
            assert torch.equal(apart.blob, together.blob)
            assert apart.blob.numel() == ops.packed_bytes(sum(rows), 64, scheme)


def test_a_blob_is_all_there_is_to_a_packed_weight(ops):
    for scheme in SCHEMES:
        packed = ops.pack_linear([weights(40, 64, 8)], torch.ones(40), scheme)
        again = ops.linear_from_blob(packed.blob.clone(), 40, 64, torch.ones(40), scheme)
        x = weights(3, 64, 9)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, again))


def test_torch_knows_the_custom_ops(ops):
    """Schemas, mutation and the shapes that tracing uses, checked by torch itself."""
    checks = ("test_schema", "test_faketensor")
    packed = ops.pack_linear([weights(40, 64, 10)], None, WeightScheme("int8"))
    x, batch = weights(6, 64, 11), a_batch()
    opcheck, custom = torch.library.opcheck, torch.ops.splittime
    for residual in (None, weights(6, 40, 12)):
        opcheck(custom.linear.default, (x, packed.blob, None, None, residual, 2, 40, 0, 0), test_utils=checks)
    opcheck(custom.rms_norm.default, (x, torch.ones(64), 1e-5), test_utils=checks)
    opcheck(custom.silu_mul.default, (x,), test_utils=checks)
    arrays = ops.plan_attention(batch, SHAPE, None, torch.float32).arrays
    qkv, store, heads = weights(6, 8 * 16, 13).view(6, 8, 16), a_store(), torch.view_as_real(turns_of(6))
    sizes = (1, HEADS, SHAPE.block_size, SHAPE.head_dim)
    opcheck(custom.rope_write.default, (qkv, store.data, None, None, heads, arrays, *sizes, 1e-5), test_utils=checks)
    sizes = (1, SHAPE.block_size, SHAPE.head_dim, 0)
    opcheck(custom.attention.default, (qkv[:, :HEADS], store.data, None, arrays, *sizes, 0.25), test_utils=checks)


def test_calls_from_many_threads_do_not_mix(ops):
    """The library serves one parallel call at a time; results are those of a call alone."""
    packed = ops.pack_linear([weights(512, 256, 14)], None, WeightScheme("bfloat16"))
    inputs = [weights(3, 256, seed) for seed in range(4)]
    want = [ops.linear(x, packed) for x in inputs]
    wrong = []

    def hammer(place):
        for _ in range(200):
            if not torch.equal(ops.linear(inputs[place], packed), want[place]):
                wrong.append(place)

    threads = [threading.Thread(target=hammer, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for count in (1, 3, 2):
        ops.set_threads(count)
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_wrong_instruction_set_is_not_used(ops, monkeypatch):
    from splittime.kernels.native import check, library

    good = check._product
    best = library.isa_names()[-1]
    if best == "portable":
        pytest.skip("this CPU has no other")
    monkeypatch.setattr(check, "_product", lambda *case: good(*case) * (2 if library.selected_isa() == best else 1))
    with pytest.warns(UserWarning, match=f"the {best} kernels give wrong results"):
        assert check.choose_isa.__wrapped__()[0] != best


def test_the_instruction_set_is_chosen_by_its_rate(ops, monkeypatch):
    """The last in the list where they are alike, or nearly; another where it is clearly faster."""
    from splittime.kernels.native import check

    names = ["portable", "avx2", "avx512", "avx512bf16"]
    for times, want in (
        ([4, 2, 2], "avx512bf16"),
        ([4, 2, 2.1], "avx512bf16"),
        ([4, 2, 4], "avx512"),
        ([1, 2, 2], "avx2"),
    ):
        taken = dict(zip(names[1:], ([each] * len(check.RATED) for each in times), strict=True))
        monkeypatch.setattr(check, "_product_times", lambda tried, taken=taken: {name: taken[name] for name in tried})
        assert check.fastest(names)[0] == want
    assert check.fastest(["portable"])[0] == "portable"
    monkeypatch.undo()
    name, reason = check.choose_isa.__wrapped__()
    assert name in reason
    assert name != "portable" or len(check.native.isa_names()) == 1


def test_a_forked_child_can_end(ops):
    """It has none of the pool's threads; it must neither wait for them nor need them."""
    script = (
        "import os, sys, torch\n"
        "from splittime.kernels import api\n"
        "ops = api.resolve('native', torch.float32)\n"
        "ops.set_threads(2)\n"
        "packed = ops.pack_linear([torch.ones(4096, 256)], None, api.WeightScheme('float32'))\n"
        "ops.linear(torch.ones(4, 256), packed)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert ops.linear(torch.ones(4, 256), packed)[3, 4095] == 256\n"
        "    sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_weight_that_is_not_finite_shows(ops, scheme):
    for value in (float("nan"), float("inf")):
        weight = torch.ones(40, 128)
        weight[3, 70] = value
        y = ops.linear(torch.ones(2, 128), ops.pack_linear([weight], None, scheme))
        assert not y[:, 3].isfinite().any()
        assert y[:, :3].isfinite().all()
        assert y[:, 4:].isfinite().all()


@pytest.mark.timeout(420)  # a compiler, on a busy machine
@pytest.mark.skipif(not shutil.which("g++") or not shutil.which("nm"), reason="needs g++ and nm")
def test_no_code_is_shared_between_instruction_sets(tmp_path):
    """A template of common types would be compiled once for each, and the linker would keep any one of them."""
    source = Path(api.__file__).parent / "native" / "csrc" / "isa_portable.cpp"
    flags = ["-O1", "-std=gnu++17", "-fno-math-errno", "-Wno-psabi", "-c", "-o", str(tmp_path / "isa.o")]
    subprocess.run(["g++", *flags, str(source)], check=True, timeout=400)
    listed = subprocess.run(["nm", "-C", str(tmp_path / "isa.o")], check=True, capture_output=True, text=True).stdout
    weak = [line.split(" ", 2)[2] for line in listed.splitlines() if line[17:18] in ("W", "V", "u")]
    assert not [name for name in weak if "portable" not in name]
