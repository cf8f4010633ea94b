"""What the kernels take: weights in their layout, packed from floats or from integers, one blob each; stacks of them;
norms; the plan of a step's attention.

A packed weight knows its `StLinear` (`struct`), which points into it. A stack is a chain of those: the library lets
each weight write its outputs to their place, so nothing is copied, and a fused layer takes a stack like any weight.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import rounded
from splittime.kernels.api import AttentionPlan, KvShape, LayerKv, LinearShape, RoundedRows, StatePlan, WeightScheme
from splittime.kernels.layer import LENGTH_EPS, DeltaSpec, DeltaWeights, PackedNorm, PackedWeight, Weighing
from splittime.kernels.low_rank import LayerUses, LowRank, ProductUses
from splittime.kernels.native import library as native
from splittime.kernels.native import memory
from splittime.kernels.native.library import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, chain, library

SCHEMES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
PANEL_ROWS = 16  # a part of a weight can be packed on its own if it begins at a multiple of these


@dataclass(frozen=True)
class NativeWeight(PackedWeight):
    """blob: uint8, see csrc/splittime.h; bias: float32 [out] or None; columns: int32 [in] or None."""

    blob: Tensor
    scheme: WeightScheme
    out_features: int
    in_features: int
    bias: Tensor | None
    columns: Tensor | None = None

    def new_struct(self) -> native.StLinear:
        """Valid while this object lives."""
        return native.StLinear(
            SCHEMES[self.scheme.name],
            self.out_features,
            self.in_features,
            self.scheme.group,
            extras(self.scheme),
            self.blob.data_ptr(),
            address(self.bias),
            address(self.columns),
        )

    @cached_property
    def struct(self) -> native.StLinear:
        return self.new_struct()


class NativeStack(PackedWeight):
    """Packed weights of the same columns, the outputs of each below those of the one before."""

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        self.parts: list[NativeWeight] = []
        for part in map(weight_of, parts):
            self.parts += part.parts if isinstance(part, NativeStack) else [part]
        widths = {part.in_features for part in self.parts}
        if len(widths) != 1:
            raise ConfigError(f"a stack of weights of {sorted(widths)} columns", param="weights", value=str(widths))
        self.in_features = self.parts[0].in_features
        self.out_features = sum(part.out_features for part in self.parts)
        self._structs = [part.new_struct() for part in self.parts]
        chain(self._structs)
        self.struct = self._structs[0]  # of the first part, with the others below; valid while this object lives


class NativeLowRank:
    """What the library reads of a `LowRank`, which is to live as long."""

    def __init__(self, low_rank: LowRank) -> None:
        ups = [weight_of(part.up).struct for part in low_rank.parts]
        self._parts = (native.StLinear * len(ups))(*ups)
        self._begins = (ctypes.c_int32 * len(ups))(*(part.begin for part in low_rank.parts))
        down = weight_of(low_rank.down).struct
        addresses = ctypes.addressof(self._parts), ctypes.addressof(self._begins)
        self._struct = native.StLowRank(down, len(ups), *addresses)
        self.address = ctypes.addressof(self._struct)


class NativeLowRanks:
    """What the library reads of adapters in a step; it is valid while the given lives. Each `LowRank` is made ready
    once."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[LowRank, NativeLowRank] = WeakKeyDictionary()

    def of_layer(self, uses: LayerUses) -> "ctypes.Array[native.StAdapted]":
        return _array([(self._addresses(one.qkv, one.output, one.gate_up, one.down), at) for one, at in uses])

    def of_product(self, uses: ProductUses) -> "ctypes.Array[native.StAdapted]":
        """As the first of a layer's products."""
        return _array([(self._addresses(low_rank), at) for low_rank, at in uses])

    def _addresses(self, *low_ranks: LowRank | None) -> tuple[int | None, ...]:
        return tuple(None if one is None else self._address_of(one) for one in low_ranks)

    def _address_of(self, low_rank: LowRank) -> int:
        made = self._made.get(low_rank)
        if made is None:
            made = self._made[low_rank] = NativeLowRank(low_rank)
        return made.address


def _array(uses: list[tuple[tuple[int | None, ...], Tensor]]) -> "ctypes.Array[native.StAdapted]":
    made = [native.StAdapted(products, tokens.data_ptr(), len(tokens)) for products, tokens in uses]
    return (native.StAdapted * len(made))(*made)


def weight_of(packed: PackedWeight) -> NativeWeight | NativeStack:
    assert isinstance(packed, NativeWeight | NativeStack), "a weight of another backend"
    return packed


@dataclass(frozen=True)
class NativeNorm(PackedNorm):
    weight: Tensor  # float32 [..., D]
    eps: float


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """arrays: the int32 arrays of `StBatch`, which points into them."""

    arrays: list[Tensor]
    batch: native.StBatch
    shape: KvShape
    window_tokens: int


class NativeDelta:
    """A gated delta net as the library reads it: the convolution's weights turned, the others in place."""

    def __init__(self, weights: DeltaWeights) -> None:
        spec = weights.spec
        sizes = (spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim, spec.conv_width)
        self._arrays = weights.conv.t().contiguous(), weights.decay, weights.dt_bias, weights.norm
        self.struct = native.StDelta(*sizes, LENGTH_EPS, spec.norm.eps, *map(address, self._arrays))


@dataclass(frozen=True)
class NativeStates(StatePlan):
    """struct: points into the tensors. num_slots: as many as it needs."""

    struct: native.StStates
    num_slots: int

    def check(self, states: Tensor, spec: DeltaSpec) -> None:
        """Asserts that the slots are those of a layer, and enough of them."""
        assert states.is_contiguous(), "slots lie one behind the other"
        assert states.shape[1] == spec.state_floats, "slots of another spec"
        assert len(states) >= self.num_slots, "fewer slots than the step uses"


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kv_of(kv: LayerKv, shape: KvShape) -> native.StKv:
    """Valid while its tensors live."""
    sizes = (KV_TYPES[kv.data.dtype], len(kv.data) - 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return native.StKv(*sizes, kv.data.data_ptr(), address(kv.scales))


def weighing_of(weighing: Weighing) -> native.StScores:
    """Valid while its tensor lives."""
    return native.StScores(weighing.scale, weighing.cap, address(weighing.sinks))


def extras(scheme: WeightScheme) -> int:
    """Returns what the groups have besides scales; minima take up zero points (`rounded.as_packed`). Of bfloat16
    weights, whether activations are rounded too."""
    if scheme.name == "bfloat16":
        return native.ROUNDED_ACTIVATIONS if scheme.rounds_activations else 0
    of_groups = native.MINIMA if scheme.has_minima else native.ZEROS if scheme.has_zeros else 0
    of_steps = native.STEPS | (native.FIVE if scheme.bits == 5 else 0) if scheme.bits else 0
    return of_groups | of_steps | (native.TURNED if scheme.is_turned else 0)


def packed_bytes(out_features: int, in_features: int, scheme: WeightScheme) -> int:
    kind = SCHEMES[scheme.name]
    return int(library().st_packed_bytes(kind, out_features, in_features, scheme.group, extras(scheme)))


def pack_floats(parts: Sequence[Tensor], scheme: WeightScheme) -> Tensor:
    """The blob of these parts [out_i, in]."""
    if scheme.has_zeros or scheme.has_minima or scheme.bits:
        raise ValueError(f"{scheme} is for weights that come as integers; rounding makes neither zeros nor minima")
    if any(len(part) % PANEL_ROWS for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    blob = memory.allocate(packed_bytes(out_features, in_features, scheme))
    sizes, begin = (SCHEMES[scheme.name], out_features, in_features, scheme.group, extras(scheme)), 0
    for part in parts:
        rows, end = part.contiguous(), begin + len(part)
        library().st_pack(*sizes, rows.data_ptr(), DTYPES[rows.dtype], begin, end, blob.data_ptr())
        begin = end
    return blob


def pack_integers(parts: Iterable[RoundedRows], shape: LinearShape) -> Tensor:
    """The blob of these rows. Raises `ConfigError` for what `kernels.rounded` refuses."""
    scheme, out_features, in_features = shape.scheme, shape.out_features, shape.in_features
    rounded.check_scheme(scheme)
    blob = memory.allocate(packed_bytes(out_features, in_features, scheme))
    sizes, begin = (SCHEMES[scheme.name], out_features, in_features, scheme.group, extras(scheme)), 0
    for part in rounded.in_panels(rounded.checked(parts, shape), PANEL_ROWS):
        rows = rounded.as_packed(part, scheme)
        kept = [
            None if one is None else one.contiguous()
            for one in (rows.integers, rows.scales, rows.zeros, rows.minima, rows.steps)
        ]
        end = begin + len(part.integers)
        library().st_pack_rounded(*sizes, *map(address, kept), begin, end, blob.data_ptr())
        begin = end
    return blob
