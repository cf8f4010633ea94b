"""GPTQ: round one column after the other, and let the columns that follow make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, arXiv:2210.17323, algorithm 1. With H = E[x x^T] + damping and U the upper Cholesky factor of its
inverse, the error of column j in units of U_jj is taken off the columns after it in proportion to U_j. Columns are
taken in blocks: within one the update is immediate, beyond it once a block.

Act-order takes the columns by falling diagonal of H, the ones that matter first; groups are then of columns that follow
each other in that order, and `group_of` says which is in which. With static groups they stay of neighbouring columns:
their scales are fitted to the weights as they were, before any column is taken. A column that the text never touched
has no error to pass on and is rounded to nearest.
"""

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.lab.quantize.grid import Grid, Rounded, fit, integers_of

DAMPING = 0.01  # of the mean diagonal, as in the paper
BLOCK_COLUMNS = 128
DOUBLE_COLUMNS = 4096  # up to here the factor is worked out in float64: 128 MiB a matrix


def quantize(weight: Tensor, gram: Tensor, grid: Grid, act_order: bool, static_groups: bool = False) -> Rounded:
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
