"""Weights in the kernels' layout: packed from floats or from integers, one blob each, and stacks of them.

A packed weight knows its `StLinear` (`struct`), which points into it. A stack is a chain of those: the library lets
each weight write its outputs to their place, so nothing is copied, and a fused layer takes a stack like any weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import rounded
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.native import library as native
from splittime.kernels.native import memory, torch_ops
from splittime.kernels.native.library import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, chain, library

SCHEMES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PANEL_ROWS = 16  # a part of a weight can be packed on its own if it begins at a multiple of these


@dataclass(frozen=True)
class PackedLinear:
    """blob: uint8, see csrc/splittime.h; bias: float32 [out] or None; columns: int32 [in] or None."""

    blob: Tensor
    scheme: WeightScheme
    out_features: int
    in_features: int
    bias: Tensor | None
    columns: Tensor | None = None

    def struct(self) -> native.Linear:
        """Valid while this object lives."""
        return native.Linear(
            SCHEMES[self.scheme.name],
            self.out_features,
            self.in_features,
            self.scheme.group,
            extras(self.scheme),
            self.blob.data_ptr(),
            torch_ops.address(self.bias),
            torch_ops.address(self.columns),
        )


class PackedStack:
    """Packed weights of the same columns, the outputs of each below those of the one before."""

    def __init__(self, parts: Sequence["PackedLinear | PackedStack"]) -> None:
        self.parts: list[PackedLinear] = []
        for part in parts:
            self.parts += part.parts if isinstance(part, PackedStack) else [part]
        widths = {part.in_features for part in self.parts}
        if len(widths) != 1:
            raise ConfigError(f"a stack of weights of {sorted(widths)} columns", param="weights", value=str(widths))
        self.in_features = self.parts[0].in_features
        self.out_features = sum(part.out_features for part in self.parts)
        self._structs = [part.struct() for part in self.parts]
        chain(self._structs)

        self.tensors = (
            [part.blob for part in self.parts],
            [part.bias for part in self.parts],
            [part.columns for part in self.parts],
        )  # these and the numbers: as `torch.ops.splittime.linear_stack` takes them
        self.numbers = (
            [one.scheme for one in self._structs],
            [one.out_features for one in self._structs],
            [one.group for one in self._structs],
            [one.extras for one in self._structs],
        )

    def struct(self) -> native.Linear:
        """Of the first part, with the others below; valid while this object lives."""
        return self._structs[0]


def extras(scheme: WeightScheme) -> int:
    """What the groups have besides scales; minima take up zero points (`rounded.as_packed`). Of bfloat16 weights,
    whether activations are rounded too."""
    if scheme.name == "bfloat16":
        return native.ROUNDED_ACTIVATIONS if scheme.rounds_activations else 0
    return native.MINIMA if scheme.has_minima else native.ZEROS if scheme.has_zeros else 0


def packed_bytes(out_features: int, in_features: int, scheme: WeightScheme) -> int:
    kind = SCHEMES[scheme.name]
    return int(library().st_packed_bytes(kind, out_features, in_features, scheme.group, extras(scheme)))


def pack_floats(parts: Sequence[Tensor], scheme: WeightScheme) -> Tensor:
    """The blob of these parts [out_i, in]."""
    if scheme.has_zeros or scheme.has_minima:
        raise ValueError(f"{scheme} is for weights that come as integers; rounding makes neither zeros nor minima")
    if any(len(part) % PANEL_ROWS for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    blob = memory.allocate(packed_bytes(out_features, in_features, scheme))
    sizes, begin = (SCHEMES[scheme.name], out_features, in_features, scheme.group), 0
    for part in parts:
        rows, end = part.contiguous(), begin + len(part)
        library().st_pack(*sizes, rows.data_ptr(), DTYPES[rows.dtype], begin, end, blob.data_ptr())
        begin = end
    return blob


def pack_integers(parts: Iterable[RoundedRows], out_features: int, in_features: int, scheme: WeightScheme) -> Tensor:
    """The blob of these rows. Raises `ConfigError` for what `kernels.rounded` refuses."""
    rounded.check_scheme(scheme)
    blob = memory.allocate(packed_bytes(out_features, in_features, scheme))
    sizes, begin = (SCHEMES[scheme.name], out_features, in_features, scheme.group, extras(scheme)), 0
    for part in rounded.in_panels(rounded.checked(parts, out_features, in_features, scheme), PANEL_ROWS):
        rows = rounded.as_packed(part, scheme)
        kept = [
            None if one is None else one.contiguous() for one in (rows.integers, rows.scales, rows.zeros, rows.minima)
        ]
        end = begin + len(part.integers)
        library().st_pack_rounded(*sizes, *map(torch_ops.address, kept), begin, end, blob.data_ptr())
        begin = end
    return blob
