"""Native attention against the reference at odd shapes, on every instruction set; what must never reach a row; and that
a row's result is its own, to the last bit."""

import pytest
import torch

from splittime.kernels import api
from splittime.kernels.api import LayerKv
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import Weighing
from splittime.kernels.native import library

pytestmark = pytest.mark.sample(40)

WEIGHING = Weighing(0.3)
REFERENCE = make_backend("reference", torch.float32)
KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8]
NAN = float("nan")
BOUND = 2e-5  # float32 all through: both read the same stored values, whatever their type
INT8_BOUND = 5e-4  # a decode rounds queries and weights to 16 bits; the store's own rounding costs some 50 times that
AMX_BOUND = 2**-8 * 3.5  # of weighted means of normal values: their weights and the weights' sum, 2^-9 each
SHAPES = [  # head_dim, block_size, num_heads, num_kv_heads, window
    (8, 1, 2, 2, None),
    (8, 16, 8, 1, 19),
    (64, 5, 4, 2, 70),
    (64, 8, 6, 2, 1),
    (64, 16, 8, 2, None),
    (64, 16, 3, 3, 300),
    (80, 16, 4, 1, None),
    (80, 5, 2, 1, 19),
    (128, 32, 4, 2, 70),
    (128, 128, 7, 1, None),
    (64, 256, 4, 2, 300),
    (20, 48, 10, 1, None),
]
ROWS = {
    "first token": [(0, 1)],
    "decodes": [(3, 1), (16, 1), (17, 1), (130, 1)],
    "a long decode": [(700, 1)],
    "prefills": [(0, 2), (0, 16), (0, 33)],
    "chunks": [(7, 2), (16, 16), (120, 140)],
    "mixed": [(4, 1), (33, 1), (0, 21), (13, 3)],
}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(rows, block_size, seed=0):
    """rows: (tokens before the step, query tokens), decode rows first. -> batch, number of blocks (2 unowned)."""
    contexts = [start + count for start, count in rows]
    used = [-(-context // block_size) for context in contexts]
    num_blocks = sum(used) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(rows), max(used)), num_blocks, dtype=torch.int64)
    blocks, offsets, begins = [], [], [0]
    for row, (start, count) in enumerate(rows):
        tables[row, : used[row]] = torch.tensor([order.pop() for _ in range(used[row])])
        positions = torch.arange(start, start + count)
        blocks.append(tables[row, positions // block_size])
        offsets.append(positions % block_size)
        begins.append(begins[-1] + count)
    num_decode = sum(count == 1 for _, count in rows)
    batch = api.AttentionBatch(begins, contexts, tables, torch.cat(blocks), torch.cat(offsets), num_decode)
    return batch, num_blocks


def a_case(rows, dim, block_size, heads, kv_heads, seed=0):
    """-> batch, shape, plain store [N + 1, 2, H, block_size, D], queries (a slice of wider rows)."""
    batch, num_blocks = make_batch(rows, block_size, seed)
    shape = api.KvShape(num_blocks, block_size, kv_heads, dim)
    plain = randn(num_blocks + 1, 2, kv_heads, block_size, dim, seed=seed)
    plain[-1] = 0
    return batch, shape, plain, randn(batch.query_begins[-1], heads + 3, dim, seed=seed + 1)[:, :heads]


def wanted(batch, shape, plain, q, window, weighing=WEIGHING):
    plan = REFERENCE.plan_attention(batch, shape, window)
    return REFERENCE.attention(q.contiguous(), LayerKv(plain.flatten(-2), None), plan, weighing)


def unseen(batch, shape):
    """bool [N + 1, block_size]: places that no row may read."""
    hidden = torch.ones(shape.num_blocks + 1, shape.block_size, dtype=torch.bool)
    for row, context in enumerate(batch.context_lens):
        positions = torch.arange(context)
        hidden[batch.block_tables[row, positions // shape.block_size], positions % shape.block_size] = False
    return hidden


def as_tiles_take_it(batch, dim: int, dtype: torch.dtype, q):
    """The queries as the instruction set multiplies them, and what its results may differ by.

    Tiles round the scaled queries of prompts to bfloat16, and the weights: by half a unit in the last of 8 bits each.
    """
    if dtype == torch.int8:
        return q, INT8_BOUND
    if not library.selected_isa().startswith("amx") or dtype != torch.bfloat16 or dim % 32:
        return q, BOUND
    factor = torch.tensor(0.3 * 1.44269504)
    rounded = (q * factor).bfloat16().float() / factor
    return torch.cat([q[: batch.num_decode_rows], rounded[batch.num_decode_rows :]]), AMX_BOUND


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_as_the_reference_whatever_the_store_is_made_of(isa, sizes, name):
    dim, block_size, heads, kv_heads, window = sizes
    batch, shape, plain, q = a_case(ROWS[name], dim, block_size, heads, kv_heads)
    for dtype in KV_DTYPES:
        store = isa.from_plain(shape, plain, dtype)
        seen_q, bound = as_tiles_take_it(batch, dim, dtype, q)
        want = wanted(batch, shape, isa.to_plain(shape, store), seen_q, window)
        torch.testing.assert_close(isa.attention(batch, shape, store, q, window), want, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sizes", SHAPES[1::2], ids=str)
@pytest.mark.sample(20)
def test_scores_are_capped_and_sinks_take_their_share(isa, sizes, name):
    dim, block_size, heads, kv_heads, window = sizes
    batch, shape, plain, q = a_case(ROWS[name], dim, block_size, heads, kv_heads)
    sinks = randn(heads, seed=7) * 4
    for dtype in KV_DTYPES:
        store = isa.from_plain(shape, plain, dtype)
        seen_q, bound = as_tiles_take_it(batch, dim, dtype, q)
        for scores in (Weighing(0.3, sinks=sinks), Weighing(0.3, 2.0), Weighing(0.3, 0.5, sinks)):
            want = wanted(batch, shape, isa.to_plain(shape, store), seen_q, window, scores)
            got = isa.attention(batch, shape, store, q, window, scores)
            torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    unseen = Weighing(0.3, sinks=torch.full((heads,), 200.0))
    assert isa.attention(batch, shape, store, q, window, unseen).abs().max() < 1e-6


def test_a_cap_far_away_changes_nothing_and_a_near_one_bounds_what_is_extreme(isa):
    """Near 0 a tanh is what it is given: a share that would be lost there shows. Of scores that are all capped, those
    on either side have the same weights."""
    batch, shape, plain, q = a_case(ROWS["mixed"], 64, 16, 4, 2)
    store = isa.from_plain(shape, plain, torch.float32)
    got = isa.attention(batch, shape, store, q, None, Weighing(0.01, 1e4))
    torch.testing.assert_close(got, isa.attention(batch, shape, store, q, None, Weighing(0.01)), atol=1e-6, rtol=1e-5)
    got = isa.attention(batch, shape, store, q, None, Weighing(1e6, 2.0))
    torch.testing.assert_close(got, wanted(batch, shape, plain, q, None, Weighing(1e6, 2.0)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.int8, 0.02)], ids=str)
def test_what_a_smaller_store_costs(native, dtype, bound):
    """Against the unrounded store. bfloat16 keeps 2^-9 of each element, int8 1/254 of a head's largest (about 3 here):
    with scores spread over about 1, results of size 0.3 move by no more than these."""
    batch, shape, plain, q = a_case(ROWS["mixed"], 64, 16, 8, 2)
    want = wanted(batch, shape, plain, q, None, Weighing(0.125))
    got = native.attention(batch, shape, native.from_plain(shape, plain, dtype), q, None, Weighing(0.125))
    assert 0 < (got - want).abs().max() < bound


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 16, 4, 2), (20, 5, 3, 1), (8, 32, 2, 2)], ids=str)
def test_what_others_wrote_never_reaches_a_row(isa, sizes, dtype):
    """NaN in blocks of others, and past the context in the last block of one's own."""
    dim, block_size, heads, kv_heads = sizes
    rows = [(3, 1), (33, 1), (130, 1), (0, 21), (13, 3), (100, 30)]
    batch, shape, plain, q = a_case(rows, dim, block_size, heads, kv_heads)
    clean = isa.from_plain(shape, plain, dtype)
    hidden = unseen(batch, shape)[:, None, None, :].expand(-1, 2, kv_heads, -1)
    plain[hidden] = NAN
    data, scales = isa.from_plain(shape, plain.nan_to_num(1.0), dtype)
    if dtype == torch.int8:
        scales[hidden] = NAN
    else:
        data = isa.from_plain(shape, plain, dtype)[0]
    for window in (None, 7):
        want = isa.attention(batch, shape, clean, q, window)
        assert want.isfinite().all()
        assert torch.equal(isa.attention(batch, shape, (data, scales), q, window), want)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_is_not_finite_shows_in_its_own_row_only(isa, value):
    for rows in ([(40, 1), (41, 1), (600, 1)], [(0, 40), (0, 41), (500, 100)]):
        batch, shape, plain, q = a_case(rows, 64, 16, 4, 2)
        plain[batch.block_tables[1, 0], :, :, 3] = value
        got = isa.attention(batch, shape, isa.from_plain(shape, plain, torch.float32), q)
        begins = batch.query_begins
        assert not got[begins[2] - 1].isfinite().any()
        assert got[: begins[1]].isfinite().all()
        assert got[begins[2] :].isfinite().all()


@pytest.mark.parametrize(("part", "value"), [(0, NAN), (1, NAN), (1, float("inf"))])  # keys' inf may be a score of -inf
def test_a_scale_that_is_not_finite_shows_in_its_own_row_only(isa, part, value):
    batch, shape, plain, q = a_case([(40, 1), (41, 1), (600, 1)], 64, 16, 4, 2)
    data, scales = isa.from_plain(shape, plain, torch.int8)
    scales[batch.block_tables[1, 0], part, :, 3] = value
    got = isa.attention(batch, shape, (data, scales), q)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_a_query_that_is_not_finite_shows_in_any_store(isa):
    for dtype in KV_DTYPES:
        batch, shape, plain, q = a_case([(40, 1), (600, 1)], 64, 16, 4, 2)
        q[0, :, 5] = NAN
        got = isa.attention(batch, shape, isa.from_plain(shape, plain, dtype), q)
        assert not got[0].isfinite().any()
        assert got[1].isfinite().all()


def test_extreme_scores_stay_within_range(isa):
    batch, shape, plain, q = a_case(ROWS["mixed"], 64, 16, 4, 2)
    store = isa.from_plain(shape, plain, torch.float32)
    for scale in (0.0, 1e3, 1e6):
        got = isa.attention(batch, shape, store, q, None, Weighing(scale))
        torch.testing.assert_close(got, wanted(batch, shape, plain, q, None, Weighing(scale)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_row_has_the_same_result_in_any_company_and_on_any_number_of_threads(isa, dtype, block_size):
    contexts = [0, 15, 16, 40, 255, 256, 600, 1500]
    rows = [(start, 1) for start in contexts] + [(30, 50)]
    batch, shape, plain, q = a_case(rows, 64, block_size, 4, 2)
    store = isa.from_plain(shape, plain, dtype)
    isa.lib.st_set_threads(1)
    want = isa.attention(batch, shape, store, q, 1000)
    for threads in (2, 3, 8):
        isa.lib.st_set_threads(threads)
        assert torch.equal(isa.attention(batch, shape, store, q, 1000), want)
    for row, start in enumerate(contexts):
        empty = torch.zeros(1, dtype=torch.int64)
        alone = api.AttentionBatch([0, 1], [start + 1], batch.block_tables[row : row + 1], empty, empty, 1)
        assert torch.equal(isa.attention(alone, shape, store, q[row : row + 1], 1000)[0], want[row])


def test_a_prompt_has_the_same_result_in_one_piece_and_in_chunks(isa):
    """Not promised by the interface, but it is so: key tiles lie at fixed positions, and a masked key adds nothing."""
    batch, shape, plain, q = a_case([(0, 300)], 64, 16, 4, 2)
    store = isa.from_plain(shape, plain, torch.float32)
    whole = isa.attention(batch, shape, store, q, 200)
    for start, stop in ((0, 2), (2, 130), (130, 300)):
        places = torch.zeros(stop - start, dtype=torch.int64)
        piece = api.AttentionBatch([0, stop - start], [stop], batch.block_tables, places, places, 0)
        assert torch.equal(isa.attention(piece, shape, store, q[start:stop], 200), whole[start:stop])


def test_a_batch_of_nothing(isa):
    batch, shape, plain, q = a_case([(5, 1)], 64, 16, 4, 2)
    nobody = api.AttentionBatch([0], [], batch.block_tables[:0], batch.token_blocks[:0], batch.token_offsets[:0], 0)
    assert isa.attention(nobody, shape, isa.from_plain(shape, plain, torch.float32), q[:0]).shape == (0, 256)
