"""The end of a softmax over keys that were walked by one program, or by several, each of them a part.

A part leaves its result as it would be if there were no others, and the logarithm of its denominator, in base 2;
`_merge` weighs the results by the denominators. Partial results are float32, and taken from torch's allocator for each
launch: in a captured launch they belong to the graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.triton.attention_tile import columns_of


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
