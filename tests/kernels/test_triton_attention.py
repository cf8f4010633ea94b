"""Attention over the paged store in Triton, against the reference: the same store, whose stale parts are NaN."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from splittime.core.errors import ConfigError
from splittime.kernels.api import AttentionBatch, KvShape, LayerKv
from splittime.kernels.layer import Weighing
from splittime.kernels.reference import rounding
from splittime.kernels.reference.ops import ReferenceOps
from splittime.kernels.triton import attention, attention_plan, attention_prefill, rotary
from splittime.kernels.triton.attention import DecodeTiles, PrefillTiles
from splittime.kernels.triton.device import device

pytestmark = pytest.mark.sample(5)

F32, F16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
TOLERANCE = {F32: 5e-6, F16: 3e-3, BF16: 2e-2}  # the interpreter cuts bfloat16 off where the card rounds
SMALL_PARTS = DecodeTiles(tokens=16, min_part_tokens=16, num_splits=3)
SMALL_CHUNKS = PrefillTiles(lines=16, tokens=16, num_warps=4, min_part_tokens=16, num_splits=2)


def randn(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def a_store(shape: KvShape, dtype: torch.dtype, plain: torch.Tensor) -> LayerKv:
    """plain: [num_blocks + 1, 2, Hkv, block_size, D]."""
    values, scales = rounding.quantize_kv(plain, dtype) if dtype in rounding.LARGEST else (plain.to(dtype), None)
    return LayerKv(values.flatten(-2), scales)


class Case:
    """Rows (query tokens, context), decode rows first, over blocks in random order. What no row holds is NaN, and with
    a window so is what no query token sees."""

    def __init__(self, rows, shape=None, group=2, window=None, dtype=F32, kv_dtype=None, num_decode_rows=None):
        lengths, contexts = [list(side) for side in zip(*rows, strict=True)]
        self.shape = shape or KvShape(0, 8, 2, 16)
        size = self.shape.block_size
        used = [-(-context // size) for context in contexts]
        self.shape = KvShape(sum(used) + 2, size, self.shape.num_kv_heads, self.shape.head_dim)
        self.window, self.dtype, self.group = window, dtype, group
        zero = self.shape.num_blocks
        order = np.random.default_rng(1).permutation(zero).tolist()
        tables = torch.full((len(rows), max(1, *used) + 1), zero)
        sides = (2, self.shape.num_kv_heads, size, self.shape.head_dim)
        plain = torch.full((zero + 1, *sides), float("nan"))
        for row, (length, context) in enumerate(rows):
            first = 0 if window is None else max(0, context - length - window + 1)
            for index in range(used[row]):
                block = tables[row, index] = order.pop()
                seen = slice(max(0, first - index * size), max(0, min(size, context - index * size)))
                plain[block, :, :, seen] = randn(*sides, seed=int(block))[:, :, seen]
        plain[zero] = 0
        self.store = a_store(self.shape, kv_dtype or dtype, plain)
        begins = np.cumsum([0, *lengths]).tolist()
        nowhere = torch.zeros(begins[-1], dtype=torch.int64)
        decode = sum(length == 1 for length in lengths) if num_decode_rows is None else num_decode_rows
        self.batch = AttentionBatch(begins, contexts, tables, nowhere, nowhere, decode)
        heads = self.shape.num_kv_heads * group
        wide = randn(begins[-1], heads + 2 * self.shape.num_kv_heads, self.shape.head_dim, seed=7).to(dtype)
        self.q = wide[:, :heads]  # as it comes from the product: beside keys and values

    def plan(self) -> attention.PagedPlan:
        return attention.plan(self.batch, self.shape, self.window, self.dtype, device())

    def attend(self, decode_tiles=None, prefill_tiles=None, plan=None):
        there = device()
        scales = None if self.store.scales is None else self.store.scales.to(there)
        store, q = LayerKv(self.store.data.to(there), scales), torch.empty_strided(
            self.q.shape, self.q.stride(), dtype=self.dtype, device=there
        ).copy_(self.q)  # fmt: skip
        return attention.attend(q, store, plan or self.plan(), 0.3, decode_tiles, prefill_tiles).cpu()

    def expected(self):
        ops = ReferenceOps(self.dtype)
        return ops.attention(self.q, self.store, ops.plan_attention(self.batch, self.shape, self.window), Weighing(0.3))

    def check(self, *tiles):
        got, want = self.attend(*tiles), self.expected()
        assert want.isfinite().all()
        torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


MIXED = [(1, 1), (1, 8), (1, 70), (2, 17), (5, 5), (19, 40)]


@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_mixed_batch(dtype, kv_dtype):
    Case(MIXED, dtype=dtype, kv_dtype=kv_dtype).check()


@pytest.mark.parametrize("window", [1, 3, 8, 21])
def test_a_sliding_window(window):
    rows, shape = [(1, 1), (1, 8), (1, 70), (3, 20), (19, 40)], KvShape(0, 8, 1, 16)
    Case(rows, shape, window=window).check()
    Case(rows[1:-1], shape, 1, window).check(SMALL_PARTS, SMALL_CHUNKS)


@pytest.mark.parametrize("kv_dtype", [F32, INT8, FP8], ids=str)
def test_many_parts(kv_dtype):
    rows = [(1, 1), (1, 33), (1, 70), (3, 70), (9, 20)]
    Case(rows, KvShape(0, 8, 1, 16), 1, kv_dtype=kv_dtype).check(SMALL_PARTS, SMALL_CHUNKS)


@pytest.mark.parametrize(
    ("group", "kv_heads", "block_size", "head_dim"),
    [(1, 3, 16, 16), (3, 2, 32, 80), (4, 1, 8, 96), (5, 1, 16, 24), (8, 1, 16, 64), (20, 1, 8, 16), (2, 1, 16, 256)],
)
def test_shapes(group, kv_heads, block_size, head_dim):
    rows = [(1, block_size), (1, 2 * block_size + 1), (7, 7 + block_size), (2, 2 * block_size)]
    Case(rows, KvShape(0, block_size, kv_heads, head_dim), group).check()


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=str)
def test_scales_that_float16_does_not_have(kv_dtype):
    """Of values from 1e-9 to 1e9 within a row, and of queries that are a million and more."""
    case = Case([(1, 40), (5, 40)], KvShape(0, 8, 1, 16), 2, None, BF16, kv_dtype)
    case.q.mul_(1e7)
    case.store.scales[:, 0] *= 1e-7
    sizes = case.store.scales[:, 1].shape
    case.store.scales[:, 1] *= 10.0 ** torch.randint(-9, 10, sizes, generator=torch.Generator().manual_seed(3))
    got, want = case.attend(DecodeTiles(tokens=16)), case.expected()
    size = want.abs().amax(-1, keepdim=True).float()
    torch.testing.assert_close(got / size, want / size, atol=2e-2, rtol=2e-2)
    assert size.min() > 1e6


def test_chunks_of_one_token_that_are_no_decode_rows():
    Case([(1, 9), (1, 33), (6, 6)], num_decode_rows=1).check()
    Case([(1, 1)], num_decode_rows=0).check()


def test_keys_past_what_tiles_need_no_masks_for():
    Case([(40, 100), (3, 131)], KvShape(0, 16, 1, 16), 1).check(None, PrefillTiles(lines=16, tokens=16))
    Case([(40, 100)], KvShape(0, 16, 1, 16), 1, 50).check(None, PrefillTiles(lines=16, tokens=16))


def test_a_row_without_query_tokens_is_nobody():
    case = Case([(1, 4), (0, 8), (3, 3)], num_decode_rows=1)
    torch.testing.assert_close(case.attend(), case.expected(), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dtype", [F32, INT8, FP8], ids=str)
def test_what_is_not_finite_shows_where_it_is_seen(dtype):
    shape = KvShape(0, 8, 1, 16)
    case = Case([(1, 20), (1, 12)], shape, kv_dtype=dtype)
    spoilt = case.store.data if case.store.scales is None else case.store.scales
    spoilt[case.batch.block_tables[0, 1], 1] = float("nan")  # values of row 0
    out = case.attend()
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_captured_plan_reads_what_is_in_its_buffers(splits):
    """Same tensors, other values; rows of no context give zeros, from blocks that hold NaN."""
    tiles = DecodeTiles(tokens=16, min_part_tokens=16, num_splits=splits)
    case = Case([(1, 3), (1, 41), (1, 16)])
    plan = case.plan()
    kept = attention.PagedPlan(
        case.shape,
        None,
        *(torch.zeros_like(one) for one in (plan.query_begins, plan.context_lens, plan.block_tables)),
        *(torch.full_like(one, -1) for one in (plan.token_blocks, plan.token_offsets)),
        num_decode_rows=3,
        max_context_tokens=64,
    )
    assert not case.attend(tiles, plan=kept).any()
    kept.block_tables.copy_(plan.block_tables)
    kept.context_lens.copy_(plan.context_lens)
    torch.testing.assert_close(case.attend(tiles, plan=kept), case.expected(), atol=5e-6, rtol=5e-6)
    kept.context_lens[1] = 0
    got = case.attend(tiles, plan=kept)
    assert not got[1].any()
    torch.testing.assert_close(got[::2], case.expected()[::2], atol=5e-6, rtol=5e-6)


def written(kv, dtype, blocks, offsets, shape):
    """The store after Triton's write, from a store of 1s, and after the reference's."""
    num_tokens = len(blocks)
    batch = AttentionBatch(
        list(range(num_tokens + 1)), [1] * num_tokens, torch.zeros(num_tokens, 1, dtype=torch.int64),
        torch.tensor(blocks), torch.tensor(offsets), num_tokens,
    )  # fmt: skip
    stores = [a_store(shape, dtype, torch.ones(shape.num_blocks + 1, 2, shape.num_kv_heads, 8, shape.head_dim))]
    stores.append(LayerKv(stores[0].data.clone(), None if stores[0].scales is None else stores[0].scales.clone()))
    there = device()
    guarded = [None if one is None else torch.cat((one[:1], one)).to(there) for one in vars(stores[0]).values()]
    mine = LayerKv(*(None if one is None else one[1:] for one in guarded))  # block -1 is there, and stays as it is
    rotary.write_kv(kv.to(there), mine, attention.plan(batch, shape, None, F32, there))
    assert (guarded[0][0].float() == stores[0].data[0].float().to(there)).all()
    assert guarded[1] is None or (guarded[1][0] == stores[0].scales[0].to(there)).all()
    for token, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        if block >= 0:
            heads = kv[token].reshape(2, shape.num_kv_heads, -1)
            is_rounded = dtype in rounding.LARGEST
            values, head_scales = rounding.quantize_kv(heads, dtype) if is_rounded else (heads.to(dtype), None)
            tiles = stores[1].data.view(-1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
            tiles[block, :, :, offset] = values
            if head_scales is not None:
                stores[1].scales[block, :, :, offset] = head_scales
    return mine, stores[1]


def same_bits(got, want):
    got, want = got.cpu(), want.cpu()
    both_nan = got.float().isnan() & want.float().isnan()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert ((got.view(integers) == want.view(integers)) | both_nan).all()


@pytest.mark.parametrize("kv_dtype", [None, INT8, FP8], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 16), (F16, 20), (BF16, 80)], ids=str)
def test_writing_rounds_to_the_bit(dtype, head_dim, kv_dtype):
    shape = KvShape(5, 8, 3, head_dim)
    kv = randn(6, 6, head_dim) * torch.logspace(-6, 4, 36).view(6, 6, 1)
    kv[1, 5, 3], kv[4, 5, 3], kv[4, 4, 0], kv[3, 0], kv[3, 1], kv[3, 2, 0] = (
        float("nan"),
        torch.inf,
        -torch.inf,
        0,
        1e-37,
        9,
    )
    kv = torch.cat((kv, kv), dim=1)[:, 6:].to(dtype)  # a view, as it comes from the product
    blocks, offsets = [4, 0, -1, 3, 3, 1], [0, 1, 2, 7, 0, 0]
    for got, want in zip(
        *(vars(one).values() for one in written(kv, kv_dtype or dtype, blocks, offsets, shape)), strict=True
    ):
        assert (got is None) == (want is None)
        if got is not None:
            same_bits(got, want)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_every_tie_goes_to_even(dtype):
    """Heads whose scale is 1: halves between neighbours, for float8 all of those, and what lies just beside them."""
    limit = rounding.LARGEST[dtype]
    if dtype == INT8:
        kept = torch.arange(-127, 128).float()
    else:
        kept = torch.arange(256, dtype=torch.uint8).view(FP8).float()
        kept = kept[kept.isfinite()].unique()
    middles = (kept[1:] + kept[:-1]) / 2
    beside = [middles, torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1), kept]
    steps = torch.cat(beside)
    heads = torch.zeros(-(-len(steps) // 15), 1, 16)
    heads[:, 0, :15] = torch.nn.functional.pad(steps, (0, 15 * len(heads) - len(steps))).view(-1, 15)
    heads[:, 0, 15] = limit
    kv = torch.cat((heads, -heads), dim=1)
    shape = KvShape(len(kv), 8, 1, 16)
    mine, want = written(kv, dtype, list(range(len(kv))), [1] * len(kv), shape)
    same_bits(mine.data, want.data)
    assert (mine.scales[:-1, :, :, 1] == 1).all()


def test_float8_keeps_half_a_step_and_shows_what_is_not_finite():
    x = randn(3, 5, 16) * torch.tensor([1e-3, 1.0, 1e6])[:, None, None]
    x[1, 1, 3], x[1, 2, 3], x[0, 0] = float("nan"), float("inf"), 0
    back = rounding.dequantize_kv(*rounding.quantize_kv(x, FP8))
    assert back[1, 1].isnan().all()
    assert not back[1, 2].isfinite().any()
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 1:3] = False
    least = x[others].abs().amax(-1, keepdim=True) / 448 * 2**-10  # half the least step, of subnormals
    assert ((back - x)[others].abs() <= 1.0001 * torch.maximum(x[others].abs() / 16, least)).all()


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5)


@given(ROWS, st.integers(1, 9))
def test_tiles_cover_each_query_token_once(rows, tile_tokens):
    lengths, starts = (np.array(side) for side in zip(*rows, strict=True))
    prefill = attention_plan.PrefillRows(np.arange(len(rows)) + 3, lengths, starts)
    table = attention_plan.tile_table(prefill, tile_tokens)
    found = [
        (row - 3, first + i)
        for row, first in table.tolist()
        for i in range(tile_tokens)
        if first + i < lengths[row - 3]
    ]
    assert sorted(found) == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    ends = [starts[row - 3] + min(first + tile_tokens, lengths[row - 3]) for row, first in table.tolist()]
    assert ends == sorted(ends, reverse=True)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 1 << 17), st.sampled_from([64, 256]))
def test_parts_fill_the_card_and_no_more(programs, slots, context, least):
    splits = attention.choose_splits(programs, slots, context, least)
    assert 1 <= splits <= max(1, -(-context // least))
    if context // least >= 4 * -(-slots // programs):  # else there is less to cut than would do
        assert programs * splits >= slots * 0.75
    assert attention_prefill.choose_splits(programs, slots, context, least) * programs <= max(slots, programs)


@pytest.mark.parametrize(("window", "positions"), [(None, 14), (2, 6)])
def test_bytes_of_what_is_looked_at(window, positions):
    batch = AttentionBatch(
        [0, 1, 4], [9, 5], torch.tensor([[0, 1, 2], [3, 4, 8]]), torch.zeros(4), torch.zeros(4), 1
    )  # fmt: skip
    shape = KvShape(8, 8, 2, 8)
    plan = attention.plan(batch, shape, window, F32, device())
    assert plan.positions_read == positions == attention.positions_read([9, 5], [1, 3], window)
    for dtype, position_bytes in ((F32, 2 * 2 * 8 * 4), (INT8, 2 * 2 * (8 + 4))):
        store = a_store(shape, dtype, torch.zeros(9, 2, 2, 8, 8))
        assert attention.kv_bytes(plan, store) == positions * position_bytes
        assert attention.kv_bytes(plan, store, 3) == 3 * position_bytes


def test_what_kernels_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="head_dim 288"):
        attention_plan.check(KvShape(1, 16, 1, 288), F32)
    with pytest.raises(ConfigError, match="block size 12"):
        attention_plan.check(KvShape(1, 12, 1, 64), F32)
