"""The binding: weights and blobs, the fused layer beside its composition, the choice of instruction set."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from splittime.core.errors import ConfigError
from splittime.kernels import api
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv, LinearShape, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import (
    AttentionSpec,
    AttentionWeights,
    LayerSpec,
    LayerWeights,
    MlpSpec,
    MlpWeights,
    NormSpec,
    RopeSpec,
)
from splittime.kernels.low_rank import LowRank, LowRankPart
from splittime.kernels.plain import PlainOps

SHAPE = KvShape(num_blocks=12, block_size=16, num_kv_heads=2, head_dim=16)
HEADS, HIDDEN, INNER, EPS = 4, 48, 80, 1e-5
GEMMA = {"places": "both", "activation": "gelu_tanh", "cap": 1.0}
SCHEMES = [WeightScheme("float32"), WeightScheme("bfloat16"), WeightScheme("int8"), WeightScheme("int4", 32)]


@pytest.fixture(scope="module")
def ops():
    try:
        native = make_backend("native", torch.float32)
    except ConfigError as error:
        pytest.skip(str(error))
    native.set_threads(2)
    return native


def weights(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def layer_of(ops, scheme, with_norm, with_bias, places="before", activation="silu", cap=0.0, inner=INNER):
    heads = HEADS + 2 * SHAPE.num_kv_heads
    bias = torch.linspace(-1, 1, heads * SHAPE.head_dim) if with_bias else None
    head_norm = ops.pack_norm(torch.rand(HEADS + SHAPE.num_kv_heads, SHAPE.head_dim) + 0.5, EPS) if with_norm else None
    norms = NormSpec(EPS), NormSpec(EPS) if with_norm else None
    sizes, more = (HEADS, SHAPE.num_kv_heads, SHAPE.head_dim), {"qkv_bias": with_bias, "score_cap": cap}
    heads_spec = AttentionSpec(*sizes, RopeSpec("default", 1e4), head_norm=norms[1], has_sinks=cap > 0, **more)
    mixer = AttentionWeights(
        spec=heads_spec,
        qkv=ops.pack_linear([weights(heads * SHAPE.head_dim, HIDDEN, 1)], bias, scheme),
        output=ops.pack_linear([weights(HIDDEN, HEADS * SHAPE.head_dim, 2)], None, scheme),
        head_norm=head_norm,
        sinks=torch.linspace(-1, 2, HEADS) if cap else None,
    )
    gate_up = ops.pack_linear([weights(inner, HIDDEN, 3), weights(inner, HIDDEN, 4)], None, scheme)
    down = ops.pack_linear([weights(HIDDEN, inner, 5)], None, scheme)
    mlp = MlpWeights(MlpSpec(inner, activation=activation), gate_up, down)
    before, after = ([ops.pack_norm(torch.rand(HIDDEN) + 0.5, EPS) for _ in range(2)] for _ in range(2))
    before, after = (
        kept if places in (place, "both") else (None, None)
        for place, kept in zip(("before", "after"), (before, after), strict=True)
    )
    spec = LayerSpec(norms[0], heads_spec, mlp.spec, places)
    return LayerWeights(spec, before[0], mixer, before[1], mlp, *after)


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
@pytest.mark.parametrize(
    "more",
    [{}, {"with_bias": True}, GEMMA, {"places": "after"}, {"cap": 0.5, "activation": "gelu_tanh", "inner": 64}],
    ids=str,
)
def test_the_fused_layer_is_its_composition_to_the_last_bit(ops, scheme, with_norm, more):
    weights_of_layer = layer_of(ops, scheme, with_norm, **{"with_bias": False, **more})
    layer, fused = ComposedLayer(ops, weights_of_layer, "to compare"), ops.fuse(weights_of_layer)
    plan = ops.plan_attention(a_batch(), SHAPE, None)
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
        again = ops.linear_from_blob(packed.blob.clone(), LinearShape(40, 64, torch.ones(40), scheme))
        x = weights(3, 64, 9)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, again))


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


def test_what_a_thread_that_works_alone_calls_wakes_no_other(ops):
    """A thread of the kernels that is woken sleeps again, which the system counts."""
    from splittime.kernels.native.library import library

    threads = Path("/proc/self/task")
    if not threads.exists():
        pytest.skip("the system does not count that here")
    before = set(threads.iterdir())
    ops.set_threads(2)
    packed, x = ops.pack_linear([weights(512, 256, 14)], None, WeightScheme("bfloat16")), weights(3, 256, 1)
    (thread,) = set(threads.iterdir()) - before

    def num_sleeps():
        return int((thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def is_woken_within(seconds, alone):
        wait_s, begin = time.monotonic() + seconds, num_sleeps()
        while num_sleeps() == begin and time.monotonic() < wait_s:
            runner = threading.Thread(target=lambda: (alone and library().st_work_alone(), ops.linear(x, packed)))
            runner.start()
            runner.join()
        return num_sleeps() > begin

    assert is_woken_within(20, alone=False)
    time.sleep(0.2)  # it sleeps again by now
    assert not is_woken_within(0.2, alone=True)
    ops.set_threads(1)


@pytest.fixture
def choosing(ops, monkeypatch):
    """Nobody asked for an instruction set; the one that is selected is selected again afterwards."""
    from splittime.kernels.native import check, library

    monkeypatch.delenv(check.ASKED, raising=False)
    selected = library.selected_isa()
    yield
    library.select_isa(selected)


def test_a_wrong_instruction_set_is_not_used(choosing, monkeypatch):
    from splittime.kernels.native import check, library

    good = check._product
    best = library.isa_names()[-1]
    if best == "portable":
        pytest.skip("this CPU has no other")
    monkeypatch.setattr(check, "_product", lambda *case: good(*case) * (2 if library.selected_isa() == best else 1))
    with pytest.warns(UserWarning, match=f"the {best} kernels give wrong results"):
        assert check.choose_isa.__wrapped__()[0] != best


def test_kernels_that_compute_nothing_are_not_held_to_be_right(choosing, monkeypatch):
    from splittime.kernels.native import check

    good = check._product
    monkeypatch.setattr(check, "_product", lambda *case: good(*case) * 0)
    with pytest.raises(RuntimeError, match="compute nothing"):
        check.choose_isa.__wrapped__()


def test_the_numbers_of_the_check_are_as_good_as_drawn():
    from splittime.kernels.native import check

    first, second = check._drawn(1, 48, 704), check._drawn(2, 48, 704)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
    for drawn in (first, second):
        counts, _ = np.histogram(drawn, bins=16, range=(-2, 2))
        assert counts.sum() == drawn.size
        assert counts.min() > 0.9 * drawn.size / 16
        assert abs(np.corrcoef(drawn[:, 1:].ravel(), drawn[:, :-1].ravel())[0, 1]) < 0.02


def test_the_instruction_set_is_chosen_by_its_rate(choosing, monkeypatch):
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
        with monkeypatch.context() as patch:
            patch.setattr(check, "_product_times", lambda tried, *_, taken=taken: {name: taken[name] for name in tried})
            assert check.fastest(names)[0] == want
    assert check.fastest(["portable"])[0] == "portable"
    name, reason = check.choose_isa.__wrapped__()
    assert name in reason
    assert name != "portable" or len(check.native.isa_names()) == 1


def test_a_forked_child_can_end(ops):
    """It has none of the pool's threads; it must neither wait for them nor need them."""
    script = (
        "import os, sys, torch\n"
        "from splittime.kernels import api\n"
        "from splittime.kernels.choose import make_backend\n"
        "ops = make_backend('native', torch.float32)\n"
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


def test_as_many_threads_as_were_asked_for_are_nothing_to_warn_of(ops, recwarn):
    ops.set_threads(2)
    assert not recwarn


@pytest.mark.timeout(420)  # a compiler, on a busy machine
@pytest.mark.skipif(not shutil.which("g++") or not shutil.which("nm"), reason="needs g++ and nm")
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["linear_float", "linear_int", "attention", "table"])
def test_no_code_is_shared_between_instruction_sets(tmp_path, part):
    """A template of common types would be compiled once for each, and the linker would keep any one of them."""
    source = Path(api.__file__).parent / "native" / "csrc" / "isa_portable.cpp"
    flags = ["-O1", "-std=gnu++17", "-fno-math-errno", "-Wno-psabi", f"-DST_PART={part}"]
    subprocess.run(["g++", *flags, "-c", "-o", str(tmp_path / "isa.o"), str(source)], check=True, timeout=400)
    listed = subprocess.run(["nm", "-C", str(tmp_path / "isa.o")], check=True, capture_output=True, text=True).stdout
    weak = [line.split(" ", 2)[2] for line in listed.splitlines() if line[17:18] in ("W", "V", "u")]
    assert not [name for name in weak if "portable" not in name]


@pytest.mark.parametrize("scheme", SCHEMES[:2])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_what_adapters_add_is_their_products_each_on_its_own_tokens(ops, scheme, threads):
    """Fewer adapters than threads, and more; in parallel or not, the bits are those of one product after the other."""
    ops.set_threads(threads)

    def part(begin, end, rank, seed):
        return LowRankPart(begin, end, rank, ops.pack_linear([weights(end - begin, rank, seed)], None, scheme))

    def low_rank(seed, *parts):
        rank = sum(one.rank for one in parts)
        return LowRank(ops.pack_linear([weights(rank, HIDDEN, seed)], None, scheme), parts)

    x, y = weights(9, HIDDEN, 1), weights(9, INNER, 2)
    made = [low_rank(3, part(0, 32, 4, 4), part(48, 80, 7, 5)), low_rank(6, part(16, 48, 1, 7)), None]
    tokens = [torch.tensor(mine, dtype=torch.int32) for mine in ([0, 4, 8], [2], [1, 3])]
    uses = list(zip(made, tokens, strict=True))
    found, wanted = y.clone(), y.clone()
    ops.add_low_rank(found, x, uses)
    PlainOps.add_low_rank(ops, wanted, x, uses)
    ops.set_threads(2)
    assert torch.equal(found, wanted)
    assert [row for row in range(9) if not torch.equal(found[row], y[row])] == [0, 2, 4, 8]
    alone = y.clone()
    ops.add_low_rank(alone, x, [(made[0], tokens[0][1:2])])
    assert torch.equal(alone[4], found[4])
