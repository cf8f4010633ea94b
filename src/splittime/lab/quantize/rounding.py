"""Rounds weights to nearest on a grid of integers, with a scale for each row and group of columns, and stores them as
published checkpoints do.

    symmetric    s = 2 max|w| / (2^b - 1),            z = 2^(b-1)
    not          s = (max(w, 0) - min(w, 0)) / (2^b - 1),  z = round(-min(w, 0) / s)
    q = clamp(round(w / s) + z, 0, 2^b - 1),          w ~ s (q - z),   ties to even

These are the formulae of compressed-tensors' min-max observer, GPTQ and AWQ (Lin et al. 2023, equation 1); the range
always holds zero, so that zero stays zero. A scale is rounded to the type it will be stored in *before* integers are
chosen with it, so that what is read back is what was meant. A group of zeros gets the scale 1.

`round_to_e4m3` rounds to 8-bit floats instead (Micikevicius et al., arXiv:2209.05433), as compressed-tensors' FP8 with
dynamic activations has it, a scale for each row, rounded first as well:

    s = max|w| / 448,    q = e4m3(clamp(w / s, -448, 448)),    w ~ s q,    ties to even

GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1): round one column after the other, and let the columns that
follow make up for the error. With H = E[x x^T] + damping and U the upper Cholesky factor of its inverse, the error of
column j in units of U_jj is taken off the columns after it in proportion to U_j. Columns are taken in blocks: within
one the update is immediate, beyond it once a block.

Act-order takes the columns by falling diagonal of H; groups are then of columns that follow each other in that order
(`group_of`). Static groups stay of neighbouring columns, with scales fitted to the weights as they were. A column that
the text never touched has no error to pass on and is rounded to nearest.

From integers to the tensors of published checkpoints. b: bits, n = 32 / b integers in a word, lowest bits first.

    pack-quantized   weight_packed int32 [out, in / n], words along a row; weight_scale [out, groups];
                     weight_shape int64 [2] (compressed-tensors)
    int-quantized    weight int8 [out, in], integers less 2^(b-1); weight_scale [out, 1] (compressed-tensors)
    float-quantized  weight e4m3 [out, in]; weight_scale [out, 1] (compressed-tensors)
    gptq             qweight int32 [in / n, out], words down a column; qzeros int32 [groups, out / n], zero points less
                     one; scales float16 [groups, out]; g_idx int32 [in] (GPTQModel's "gptq", formerly AutoGPTQ's)
    awq              qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], nibble i of word k holding output
                     8 k + (0, 2, 4, 6, 1, 3, 5, 7)[i]; scales float16 [groups, out] (AutoAWQ's "gemm")

`models.weights.formats` reads them for the server; `unpack` here reads back what this process wrote.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError

LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Grid:
    """group: columns that share a scale, 0 for whole rows. scale_dtype: of the stored scales."""

    bits: int
    group: int
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def top(self) -> int:
        """The largest integer."""
        return 2**self.bits - 1

    def width(self, in_features: int) -> int:
        return self.group or in_features


@dataclass(frozen=True)
class Rounded:
    """integers: uint8 [out, in]; scales: float32 [out, groups]; zeros: uint8 [out, groups]; group_of: int64 [in]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def values(self) -> Tensor:
        """float32 [out, in]."""
        steps = self.integers.float().sub_(self.zeros.float()[:, self.group_of])
        return steps.mul_(self.scales[:, self.group_of])


def fit(values: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """values [..., group] -> scale and zero point of each group, float32 [...]."""
    low, high = values.amin(-1).clamp_(max=0), values.amax(-1).clamp_(min=0)
    if grid.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / grid.top).to(grid.scale_dtype).float()
    if not bool(scales.isfinite().all()):
        limit = torch.finfo(grid.scale_dtype).max
        raise ConfigError(f"a weight is too large for scales in {grid.scale_dtype}, at most {limit}", limit=limit)
    scales = torch.where(scales == 0, 1.0, scales)
    if grid.symmetric:
        return scales, torch.full_like(scales, 2 ** (grid.bits - 1))
    return scales, (-low / scales).round_().clamp_(0, grid.top)


def integers_of(values: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """The nearest integers, as float32, of the shape of `values`; scales and zeros broadcast to it."""
    return (values / scales).round_().add_(zeros).clamp_(0, grid.top)


def round_values(values: Tensor, grid: Grid) -> Tensor:
    """Returns what rounding to nearest makes of weight [out, in]: float32, the same shape."""
    grouped = values.unflatten(1, (-1, grid.width(values.shape[1])))
    scales, zeros = (found.unsqueeze(-1) for found in fit(grouped, grid))
    return integers_of(grouped, scales, zeros, grid).sub_(zeros).mul_(scales).flatten(1)


def round_to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """weight: float32 [out, in], its columns a multiple of the group."""
    width = grid.width(weight.shape[1])
    grouped = weight.unflatten(1, (-1, width))
    scales, zeros = fit(grouped, grid)
    integers = integers_of(grouped, scales.unsqueeze(-1), zeros.unsqueeze(-1), grid).flatten(1)
    group_of = torch.arange(weight.shape[1]) // width
    return Rounded(integers.to(torch.uint8), scales, zeros.to(torch.uint8), group_of)


@dataclass(frozen=True)
class RoundedFloats:
    """floats: float8_e4m3fn [out, in]; scales: float32 [out, 1]."""

    floats: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """float32 [out, in]."""
        return self.floats.float().mul_(self.scales)


def round_to_e4m3(weight: Tensor, scale_dtype: torch.dtype) -> RoundedFloats:
    """weight: float32 [out, in]. scale_dtype: of the stored scales."""
    scales = (weight.abs().amax(1, keepdim=True) / LARGEST_E4M3).to(scale_dtype).float()
    if not bool((scales * LARGEST_E4M3).isfinite().all()):
        raise ConfigError("a weight is not finite, or too large for float32", limit=torch.finfo(torch.float32).max)
    scales = torch.where(scales == 0, 1.0, scales)
    return RoundedFloats((weight / scales).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn), scales)


DAMPING = 0.01  # of the mean diagonal, as in the paper
BLOCK_COLUMNS = 128
DOUBLE_COLUMNS = 4096  # up to here the factor is worked out in float64: 128 MiB a matrix


def gptq(weight: Tensor, gram: Tensor, grid: Grid, act_order: bool, static_groups: bool = False) -> Rounded:
    """weight: float32 [out, in], not changed; gram: float32 [in, in]."""
    importance = gram.diagonal()
    count = weight.shape[1]
    order = importance.argsort(descending=True, stable=True) if act_order else torch.arange(count)
    factor = inverse_factor(gram[order][:, order])
    group_of, place = torch.arange(count) // grid.width(count), order.argsort()
    state = _State(weight[:, order], factor, grid, group_of[order] if static_groups else group_of)
    if static_groups:
        state.fix_groups(*fit(weight.unflatten(1, (-1, grid.width(count))), grid))
    for begin in range(0, count, BLOCK_COLUMNS):
        state.take(begin, min(begin + BLOCK_COLUMNS, count))
    scales, zeros = torch.stack(state.scales, 1), torch.stack(state.zeros, 1)
    return Rounded(
        state.integers[:, place], scales, zeros.to(torch.uint8), group_of if static_groups else group_of[place]
    )


class _State:
    """Columns in the order in which they are taken; group_of: their groups. left: what is still to be rounded, with the
    errors so far. scales, zeros: of the groups that have them."""

    def __init__(self, weight: Tensor, factor: Tensor, grid: Grid, group_of: Tensor) -> None:
        self.left = weight.contiguous()
        self.factor = factor
        self.grid = grid
        self.group_of: list[int] = group_of.tolist()
        self.integers = torch.empty(weight.shape, dtype=torch.uint8)
        self.scales: list[Tensor] = []
        self.zeros: list[Tensor] = []

    def fix_groups(self, scales: Tensor, zeros: Tensor) -> None:
        """[out, groups], of all groups."""
        self.scales, self.zeros = list(scales.unbind(1)), list(zeros.unbind(1))

    def take(self, begin: int, end: int) -> None:
        """Round columns [begin, end), then correct those after them."""
        errors = torch.empty(len(self.left), end - begin)
        width = self.grid.width(self.left.shape[1])
        for column in range(begin, end):
            if self.group_of[column] == len(self.scales):
                self._start_group(column, column + width, end, errors[:, : column - begin], begin)
            errors[:, column - begin] = self._take_column(column, end)
        self.left[:, end:] -= errors @ self.factor[begin:end, end:]

    def _start_group(self, begin: int, end: int, corrected: int, errors: Tensor, first: int) -> None:
        """Fit the group's scale to its columns as they are now, all errors so far taken off."""
        columns = self.left[:, begin:end]
        if end > corrected:  # the tail lies beyond the block and has not been told of this block's errors
            late = errors @ self.factor[first:begin, corrected:end]
            columns = torch.cat((columns[:, : corrected - begin], columns[:, corrected - begin :] - late), 1)
        scales, zeros = fit(columns, self.grid)
        self.scales.append(scales)
        self.zeros.append(zeros)

    def _take_column(self, column: int, end: int) -> Tensor:
        group = self.group_of[column]
        values, scales, zeros = self.left[:, column], self.scales[group], self.zeros[group]
        integers = integers_of(values, scales, zeros, self.grid)
        self.integers[:, column] = integers.to(torch.uint8)
        error = (values - (integers - zeros) * scales) / self.factor[column, column]
        self.left[:, column + 1 : end] -= torch.outer(error, self.factor[column, column + 1 : end])
        return error


def inverse_factor(gram: Tensor) -> Tensor:
    """Upper triangular U with U^T U = (gram + damping)^-1, float32. Damps more where the matrix is not definite."""
    exact = torch.float64 if len(gram) <= DOUBLE_COLUMNS else torch.float32
    matrix = gram.to(exact, copy=True)
    diagonal = matrix.diagonal()
    mean = float(diagonal.mean())
    diagonal[diagonal == 0] = mean or 1.0
    for damping in (DAMPING, 9 * DAMPING, 90 * DAMPING):  # each on top of those before: 0.01, 0.1, 1
        diagonal += damping * (mean or 1.0)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper.float()
    raise ConfigError(
        "the calibration text gives a Hessian that cannot be inverted, even damped by its mean diagonal",
        param="calibrate",
        hint="give more text (--samples, --length), or round to nearest with --scheme w4a16",
    )


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LAYOUTS = {
    "int8": "pack-quantized",
    "fp8": "float-quantized",
    "w4a16": "pack-quantized",
    "w8a8": "int-quantized",
    "awq": "awq",
    "gptq": "gptq",
}
SUFFIXES = {
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
    "int-quantized": ("weight", "weight_scale"),
    "float-quantized": ("weight", "weight_scale"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
Tensors = dict[str, Tensor]  # by suffix


def pack(layout: str, rounded: Rounded | RoundedFloats, grid: Grid) -> Tensors:
    """The tensors of one weight, by the last part of their names."""
    scales = rounded.scales.to(grid.scale_dtype)
    if isinstance(rounded, RoundedFloats):
        return {"weight": rounded.floats, "weight_scale": scales}
    integers, bits = rounded.integers, grid.bits
    if layout == "pack-quantized":
        shape = torch.tensor(integers.shape, dtype=torch.int64)
        return {"weight_packed": to_words(integers, bits), "weight_scale": scales, "weight_shape": shape}
    if layout == "int-quantized":
        signed = (integers.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return {"weight": signed, "weight_scale": scales}
    zeros = rounded.zeros.t().contiguous()
    by_group = scales.t().contiguous()
    if layout == "gptq":
        words = to_words(integers, bits).t().contiguous()
        zero_words = to_words((zeros.to(torch.int16) - 1).bitwise_and_(grid.top).to(torch.uint8), bits)
        groups = rounded.group_of.to(torch.int32)
        return {"qweight": words, "qzeros": zero_words, "scales": by_group, "g_idx": groups}
    order = torch.tensor(AWQ_ORDER)
    words, zero_words = (
        to_words(rows.unflatten(1, (-1, 8))[..., order].flatten(1), bits) for rows in (integers.t(), zeros)
    )
    return {"qweight": words, "qzeros": zero_words, "scales": by_group}


def unpack(layout: str, tensors: Tensors, grid: Grid) -> Rounded | RoundedFloats:
    """Returns what `pack` was given."""
    if layout == "float-quantized":
        return RoundedFloats(tensors["weight"], tensors["weight_scale"].float())
    bits, half = grid.bits, 2 ** (grid.bits - 1)
    if layout in ("pack-quantized", "int-quantized"):
        scales = tensors["weight_scale"].float()
        if layout == "int-quantized":
            integers = (tensors["weight"].to(torch.int16) + half).to(torch.uint8)
        else:
            integers = from_words(tensors["weight_packed"], bits)[:, : int(tensors["weight_shape"][1])]
        zeros = torch.full_like(scales, half, dtype=torch.uint8)
        return Rounded(integers, scales, zeros, _groups(integers.shape[1], grid))
    scales = tensors["scales"].t().float().contiguous()
    if layout == "gptq":
        integers = from_words(tensors["qweight"].t().contiguous(), bits)
        zeros = from_words(tensors["qzeros"], bits).add_(1).bitwise_and_(grid.top)
        return Rounded(integers, scales, zeros.t().contiguous(), tensors["g_idx"].long())
    place = torch.tensor(AWQ_ORDER).argsort()
    integers, zeros = (
        from_words(tensors[name], bits).unflatten(1, (-1, 8))[..., place].flatten(1).t().contiguous()
        for name in ("qweight", "qzeros")
    )
    return Rounded(integers, scales, zeros, _groups(integers.shape[1], grid))


def _groups(in_features: int, grid: Grid) -> Tensor:
    return torch.arange(in_features) // grid.width(in_features)


def to_words(integers: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n] -> int32 [rows, words], the last word filled up with zeros."""
    values = integers.contiguous().numpy()
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % (32 // bits))))
    if bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(values).view("<i4").astype(np.int32, copy=False))


def from_words(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]."""
    values = words.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        values = np.stack((values & 15, values >> 4), axis=-1).reshape(len(values), -1)
    return torch.from_numpy(values.copy())
