"""Inputs that each layer has of its own, beside the residual stream (Gemma 4's per-layer embeddings).

    given     [T, layers, size]: of each token a row of a second table plus a normed product of its embedding, both over
              the root of two
    a layer   adds norm(projection(gelu(gate(hidden)) * given)) to what it made, and its factor then multiplies all

The table is the largest tensor of a small model, and of it only the rows that are looked up come into memory.
"""

from dataclasses import dataclass

from torch import Tensor

from splittime.kernels.api import Ops
from splittime.kernels.layer import PackedNorm, PackedWeight
from splittime.kernels.plain import gelu
from splittime.models.weights.source import Table


@dataclass(frozen=True)
class LayerInput:
    """What one layer does with its input. gate: [size, hidden]; projection: [hidden, size]."""

    gate: PackedWeight
    projection: PackedWeight
    norm: PackedNorm
    factor: float


@dataclass(frozen=True)
class LayerInputs:
    """table: [vocab, layers * size]; projection: [layers * size, hidden]; norm: of size. table_factor: on its rows,
    rounded as the checkpoint's numbers are."""

    ops: Ops
    size: int
    table: Tensor | Table
    table_factor: float
    projection: PackedWeight
    norm: PackedNorm
    layers: tuple[LayerInput, ...]

    def given(self, rows: Tensor, embedded: Tensor) -> Tensor:
        """rows: of the table [T, layers * size]; embedded: the first layer's input [T, hidden] -> [T, layers, size]."""
        products = self.ops.linear(embedded, self.projection) * embedded.shape[1] ** -0.5
        normed = self.ops.rms_norm(products.view(-1, self.size), self.norm).view_as(products)
        return ((normed + rows * self.table_factor) * 0.5**0.5).unflatten(1, (-1, self.size))

    def added(self, layer: int, hidden: Tensor, given: Tensor) -> Tensor:
        """hidden: what the layer made [T, hidden]; given: its input [T, size] -> the next layer's [T, hidden]."""
        one = self.layers[layer]
        inner = gelu(self.ops.linear(hidden, one.gate), "tanh") * given
        made = self.ops.rms_norm(self.ops.linear(inner, one.projection), one.norm)
        return (hidden + made) * one.factor
