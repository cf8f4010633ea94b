"""What the attention kernels share: a tile of keys and values from the paged store, and its part of the softmax.

Scores are kept in base 2 (`exp2` is one instruction): log2(e) is in the scale. A line of a tile is one query head of
one token; `sums` and `largest` are the running denominator and maximum of its softmax (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018; Dao, FlashAttention-2, 2023).

Nothing that is masked is loaded: a stale NaN times a probability of 0 would be NaN. A block is named by 32 bits,
but what lies in it is addressed by 64: a store may have more than 2^31 elements.

Where several programs walk the keys of a softmax, each of them a part, a part leaves its result as it would be if there
were no others, and the logarithm of its denominator, in base 2; `_merge` weighs the results by the denominators.
Partial results are float32, and taken from torch's allocator for each launch: in a captured launch they belong to the
graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.api import LayerKv
from splittime.kernels.triton.device import dot_dtype

LOG2_E = 1.4426950408889634

_INTEGER_BITS = tl.constexpr(0x6600)  # of float16 1536: adding an integer of 8 bits to the bits adds it to the float
_LEAST_UNIT = tl.constexpr(1e-37)
_LEAST_POWER, _LARGEST_POWER = tl.constexpr(0x0D800000), tl.constexpr(0x71800000)  # the bits of 2^-100 and of 2^100


@triton.jit
def to_dot(x, DOT: tl.constexpr):
    """Values of a store as what they are multiplied as; nothing is lost. int8 goes by way of a float16's bits, an
    addition of each kind, where the conversion instruction runs at a fraction of the rate."""
    if x.dtype == tl.int8:
        return ((x.to(tl.int16) + _INTEGER_BITS).to(tl.float16, bitcast=True) - 1536.0).to(DOT)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16).to(DOT)
    else:
        return x.to(DOT)


@triton.jit
def load_queries(sources, is_loaded, scale, DOT: tl.constexpr):
    """[M, C] as what they are multiplied as, and what each line's scores are to be multiplied by, [M].

    Stores of 8 bits are multiplied as float16, which has all their values, and all digits of a bfloat16 but not its
    range: a line goes over the power of two that its largest is near, which costs no digits, and its scale has it."""
    queries = tl.load(sources, mask=is_loaded, other=0.0)
    scales = tl.full([sources.shape[0]], 0.0, tl.float32) + scale
    if tl.float16 == DOT and queries.dtype != tl.float16:
        wide = queries.to(tl.float32)
        bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7F800000, axis=1)
        bits = tl.minimum(tl.maximum(bits, _LEAST_POWER), _LARGEST_POWER)
        powers = bits.to(tl.float32, bitcast=True)
        inverses = (0x7F000000 - bits).to(tl.float32, bitcast=True)  # 254 less the exponent: of powers of two, exact
        return (wide * inverses[:, None]).to(DOT), scales * powers
    else:
        return queries.to(DOT), scales


@triton.jit
def load_blocks(table, start, is_loaded, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The block of each position [start, start + TOKENS) of a row, start a multiple of BLOCK_SIZE."""
    sources = table + start // BLOCK_SIZE + tl.arange(0, TOKENS) // BLOCK_SIZE
    if is_loaded is None:
        return tl.load(sources)
    else:
        return tl.load(sources, mask=is_loaded, other=0)


@triton.jit
def load_tile(sources, is_loaded, is_column):
    """Zeros where masks say so; None: all are loaded."""
    if is_loaded is None and is_column is None:
        return tl.load(sources)
    elif is_loaded is None:
        return tl.load(sources, mask=is_column[None, :], other=0.0)
    elif is_column is None:
        return tl.load(sources, mask=is_loaded[:, None], other=0.0)
    else:
        return tl.load(sources, mask=is_loaded[:, None] & is_column[None, :], other=0.0)


@triton.jit
def load_line(sources, is_loaded):
    if is_loaded is None:
        return tl.load(sources)
    else:
        return tl.load(sources, mask=is_loaded, other=0.0)


@triton.jit
def step(
    q, weighted, sums, largest, unit, data, scales, blocks, kv_head, is_loaded, is_seen, line_scales,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One tile of keys that lie in `blocks` [N], for all lines of `q` [M, COLUMNS]; -> (weighted, sums, largest, unit).

    is_loaded: int1 [N] or None (all). is_seen: int1 [M or 1, N] or None (all): what each line sees of what is loaded.
    weighted: values times weights so far, over `unit`: 1, or the largest scale of a value so far. So no weight times a
    scale is more than 1, and float16 holds it, whatever the scales are.
    """
    # What a tile starts with is the same in each pass of the loop; what is added to it is one product a position.
    offsets = tl.arange(0, blocks.shape[0]) % BLOCK_SIZE
    columns = tl.arange(0, COLUMNS)
    is_column = None if HEAD_DIM == COLUMNS else columns < HEAD_DIM
    strides = blocks.to(tl.int64) * (2 * NUM_KV_HEADS * BLOCK_SIZE)
    sources = data + ((kv_head * BLOCK_SIZE + offsets) * HEAD_DIM)[:, None] + columns[None, :]
    sources += (strides * HEAD_DIM)[:, None]
    keys = load_tile(sources, is_loaded, is_column)
    scores = tl.dot(q, tl.trans(to_dot(keys, DOT)), input_precision="ieee")
    if scales is not None:
        scale_sources = scales + (kv_head * BLOCK_SIZE + offsets) + strides
        scores *= load_line(scale_sources, is_loaded)[None, :]
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, axis=1) * line_scales)
    # A line that has seen nothing yet has -inf, and -inf - -inf is NaN.
    base = now_largest if is_seen is None else tl.where(now_largest == float("-inf"), 0.0, now_largest)
    weights = tl.math.exp2(scores * line_scales[:, None] - base[:, None])
    fade = tl.math.exp2(largest - base)
    sums = sums * fade + tl.sum(weights, axis=1)
    if scales is not None:
        value_scales = load_line(scale_sources + NUM_KV_HEADS * BLOCK_SIZE, is_loaded)
        now_unit = tl.maximum(unit, tl.max(value_scales, axis=0))
        fade *= unit / now_unit
        weights *= (value_scales * (1.0 / now_unit))[None, :]
        unit = now_unit
    values = load_tile(sources + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, is_loaded, is_column)
    weighted = weighted * fade[:, None]
    weighted = tl.dot(weights.to(DOT), to_dot(values, DOT), weighted, input_precision="ieee")
    return weighted, sums, now_largest, unit


@triton.jit
def first_unit(scales):
    """Returns 1 for a store without scales, for another less than any scale."""
    return 1.0 if scales is None else _LEAST_UNIT


def dot_of(q: Tensor, store: LayerKv) -> object:
    """Returns what queries and keys are multiplied as: as they are, or as float16 where keys are of 8 bits."""
    is_rounded = store.scales is not None and q.dtype != torch.float32
    return tl.float16 if is_rounded else dot_dtype(q.dtype)


def columns_of(head_dim: int) -> int:
    """Columns of a tile: a power of two that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def store_lines(
    weighted, sums, largest, unit, out, part_sums, lines, is_line, split, num_splits,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The end of a softmax: what it is, or, of one part of it, what `_merge` puts together.

    lines: int64 [M], the place of each line among all of a launch's (token * query heads + head).
    out: [all lines, HEAD_DIM], or [all lines, num_splits, HEAD_DIM] with part_sums [all lines, num_splits].
    """
    columns = tl.arange(0, COLUMNS)
    is_empty = sums == 0.0
    result = weighted * (unit / tl.where(is_empty, 1.0, sums))[:, None]
    slots = lines if IS_WHOLE else lines * num_splits + split
    targets = out + slots[:, None] * HEAD_DIM + columns[None, :]
    tl.store(targets, result.to(out.dtype.element_ty), mask=is_line[:, None] & (columns < HEAD_DIM)[None, :])
    if not IS_WHOLE:
        parts = tl.where(is_empty, float("-inf"), largest + tl.math.log2(tl.where(is_empty, 1.0, sums)))
        tl.store(part_sums + slots, parts, mask=is_line)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    parts, part_sums, out, num_splits,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program i: line i of `out` from its parts, each weighted by its share of the denominator. A part whose log-sum is
    -inf was never written and is not read; a line of such parts alone is 0."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    weighted = tl.zeros([COLUMNS], tl.float32)
    total = 0.0
    largest = float("-inf")
    for begin in range(0, num_splits, SPLITS):
        splits = begin + tl.arange(0, SPLITS)
        logs = tl.load(part_sums + line * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        is_part = logs != float("-inf")
        sources = parts + (line * num_splits + splits)[:, None] * HEAD_DIM + columns[None, :]
        part = tl.load(sources, mask=is_part[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        now_largest = tl.maximum(largest, tl.max(logs, axis=0))
        base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        weights = tl.math.exp2(logs - base)
        fade = tl.math.exp2(largest - base)
        total = total * fade + tl.sum(weights, axis=0)
        weighted = weighted * fade + tl.sum(part * weights[:, None], axis=0)
        largest = now_largest
    result = weighted / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


class SoftmaxParts:
    """Where a launch that cuts contexts into `num_splits` parts leaves what it finds: in `out` itself if there is one,
    else in partial results, `target` with `sums`, until `merge` puts them into `out` [tokens, Hq * D]."""

    def __init__(self, out: Tensor, head_dim: int, num_splits: int) -> None:
        self.target, self.sums = out, None
        self._out, self._head_dim, self._num_splits = out, head_dim, num_splits
        if num_splits > 1:
            lines = out.numel() // head_dim
            self.target = torch.empty((lines, num_splits, head_dim), dtype=torch.float32, device=out.device)
            self.sums = torch.empty((lines, num_splits), dtype=torch.float32, device=out.device)

    def merge(self) -> None:
        if self._num_splits > 1:
            columns = columns_of(self._head_dim)
            _merge[(self._out.numel() // self._head_dim,)](
                self.target, self.sums, self._out, self._num_splits,
                HEAD_DIM=self._head_dim, COLUMNS=columns, SPLITS=max(2, 2048 // columns), num_warps=4,
            )  # fmt: skip
