"""What the weight products share: how the output is cut into tiles, and what is done with a tile of sums.

A product y = x W^T is computed as y^T = W x^T: rows of the weight are the rows of the matrix instruction, so that a
weight that was integers in memory becomes its register operand, and the few tokens of a decode step its narrow side.

    program (i, j, s)   tokens [i * tokens, ..), outputs [j * outputs, ..), the s-th share of the columns

With `splits` > 1 each program keeps its sums in float32 and a second kernel adds them in the order of s; there are no
atomic additions, so a call repeated gives the same bytes.

*A row and its batch.* A row's result depends on the columns' order of summing alone, which `Tiles` fixes, and other
rows never enter it. So a row is the same to the last bit in all batches for which a weight's table gives one line
(`few`, `some`, `many` tokens, and more), and may differ by rounding between lines.

*Compiling.* Nothing is compiled anew for a number of tokens, only for a line of the table: one product with each number
of tokens in `LINES` compiles all that a weight will need.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_TOKENS, SOME_TOKENS, WIDE_TOKENS = 16, 64, 256
LINES = (1, FEW_TOKENS + 1, SOME_TOKENS + 1, WIDE_TOKENS + 1)
PROCESSORS = 132  # of an H200. A constant, so that results do not depend on which card was asked
REDUCE_OUTPUTS = 1024


@dataclass(frozen=True)
class Tiles:
    """tokens, outputs: of a tile, each a power of two, at least 16. splits: programs that share a tile's columns."""

    tokens: int
    outputs: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def grid(self, num_tokens: int, out_features: int) -> tuple[int, int, int]:
        return triton.cdiv(num_tokens, self.tokens), triton.cdiv(out_features, self.outputs), self.splits


def splits_for(num_programs: int, num_steps: int) -> int:
    """Shares of a loop of `num_steps` so that there are about two programs for each processor: one that waits for
    memory leaves another that computes. Each share keeps four steps, below which starting it costs more than it saves;
    and where the tiles alone are nearly one for each processor the second kernel would cost more than it saves."""
    splits = 1
    while num_programs * splits < PROCESSORS * 3 // 4 or num_programs * splits * 2 <= PROCESSORS * 2:
        if splits == 8 or num_steps // (splits * 2) < 4:
            break
        splits *= 2
    return splits


@triton.jit
def finish(
    sums, y_ptr, bias_ptr, residual_ptr, tokens, outs, num_tokens, out_features, split,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Store float32 sums [outputs, tokens], rounded once, after bias and residual; or as they are for `add_parts`."""
    places = tokens[None, :].to(tl.int64) * out_features + outs[:, None]
    is_there = (outs < out_features)[:, None] & (tokens < num_tokens)[None, :]
    if IS_PART:
        tl.store(y_ptr + split.to(tl.int64) * num_tokens * out_features + places, sums, mask=is_there)
    else:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + outs, mask=outs < out_features, other=0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            sums += tl.load(residual_ptr + places, mask=is_there, other=0).to(tl.float32)
        tl.store(y_ptr + places, sums.to(y_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _add_parts(
    parts_ptr, y_ptr, bias_ptr, residual_ptr, out_features, size,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, outs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = outs < out_features
    places = token * out_features + outs
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(parts_ptr + split * size + places, mask=is_there, other=0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outs, mask=is_there, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + places, mask=is_there, other=0).to(tl.float32)
    tl.store(y_ptr + places, sums.to(y_ptr.dtype.element_ty), mask=is_there)


End = Callable[[Tensor, Tensor | None, Tensor | None, Tensor], None]
"""What is done with sums that several programs shared: `add_parts`, or more in the same kernel (`linear_norm`)."""


def add_parts(parts: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
    """parts: float32 [splits, T, out], added in their order, then bias and residual -> y [T, out]."""
    splits, num_tokens, out_features = parts.shape
    grid = num_tokens, triton.cdiv(out_features, REDUCE_OUTPUTS)
    _add_parts[grid](
        parts, y, bias, residual, out_features, num_tokens * out_features,
        splits, bias is not None, residual is not None, REDUCE_OUTPUTS,
    )  # fmt: skip


def sums_target(y: Tensor, splits: int) -> Tensor:
    """Returns where the programs store: y itself, or float32 [splits, T, out]."""
    return y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)
