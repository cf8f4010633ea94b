"""`Ops` by the C++ kernels. Activations are float32 between products whatever the weights are (`product_dtype` says
what a product makes of them); packed weights are one blob each.

A dense decoder layer is one call into the library (`st_layer`, `st_delta_layer`): no tensor is made, nothing is
dispatched by torch. What it takes the place of is the composition in `kernels.compose`, which the equivalence tests
hold it to. What is composed in Python calls the library once an operation.
"""

import ctypes
import warnings
from collections.abc import Iterable, Sequence
from ctypes import byref
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from splittime.kernels import plain
from splittime.kernels.api import (
    CPU,
    AttentionBatch,
    AttentionPlan,
    KvShape,
    LayerKv,
    LayerStore,
    LinearShape,
    NotFused,
    RoundedRows,
    RunnableLayer,
    StatePlan,
    WeightScheme,
    own,
)
from splittime.kernels.layer import (
    AttentionSpec,
    AttentionWeights,
    DeltaWeights,
    LayerWeights,
    MlpWeights,
    NormSpec,
    PackedNorm,
    PackedWeight,
    Weighing,
)
from splittime.kernels.low_rank import LayerUses, ProductUses
from splittime.kernels.native import check, packed
from splittime.kernels.native import library as native
from splittime.kernels.native.check import choose_isa
from splittime.kernels.native.library import READ_KINDS, StBatch, library
from splittime.kernels.native.packed import (
    SCHEMES,
    NativeDelta,
    NativeLowRanks,
    NativeNorm,
    NativePlan,
    NativeStack,
    NativeStates,
    NativeWeight,
    address,
    kv_of,
    weighing_of,
    weight_of,
)
from splittime.kernels.rounded import check_columns, check_scheme


class FusedLayer:
    """Half of a `kernels.api.RunnableLayer` that changes `hidden` in place and returns it: all but its mixer."""

    parts_reason, needs_host = "", False

    def __init__(
        self, weights: LayerWeights, products: PackedWeight, mlp: MlpWeights, low_ranks: NativeLowRanks
    ) -> None:
        """products: the mixer's first."""
        norms = weights.mixer_norm, weights.feed_forward_norm, weights.norm_after_mixer, weights.norm_after_feed_forward
        self.weights = weights  # keeps alive what the structure points to
        self._layer = native.StLayer(
            weight_of(products).struct,
            weight_of(weights.mixer.output).struct,
            weight_of(mlp.gate_up).struct,
            weight_of(mlp.down).struct,
            *map(_address_of, norms),
            eps=weights.spec.norm.eps,
            activation=ACTIVATIONS[mlp.spec.activation],
        )
        self._reference, self._low_ranks = byref(self._layer), low_ranks

    def _added(self, uses: LayerUses) -> "ctypes.Array[native.StAdapted] | None":
        return self._low_ranks.of_layer(uses) if uses else None


class FusedDelta(FusedLayer):
    """With a gated delta net."""

    def __init__(self, weights: LayerWeights, mixer: DeltaWeights, mlp: MlpWeights, low_ranks: NativeLowRanks) -> None:
        super().__init__(weights, mixer.products, mlp, low_ranks)
        self._spec, self._net, self._call = mixer.spec, NativeDelta(mixer), library().st_delta_layer

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        mine = own(plan, NativeStates)
        assert isinstance(kv, Tensor), "a gated delta net has states"
        mine.check(kv, self._spec)
        step = byref(self._net.struct), byref(mine.struct), kv.data_ptr()
        self._call(self._reference, *step, len(uses), self._added(uses), hidden.data_ptr())
        return hidden


class FusedAttention(FusedLayer):
    """With attention."""

    def __init__(
        self, weights: LayerWeights, mixer: AttentionWeights, mlp: MlpWeights, low_ranks: NativeLowRanks
    ) -> None:
        super().__init__(weights, mixer.qkv, mlp, low_ranks)
        layer, spec = self._layer, mixer.spec
        layer.qk_norm, layer.scores = _address_of(mixer.head_norm), weighing_of(mixer.weighing)
        layer.num_heads, layer.window_tokens = spec.num_heads, spec.window_tokens or 0
        self._call = library().st_layer
        self._store: LayerKv | None = None
        self._kv = native.StKv()

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        mine = own(plan, NativePlan)
        assert isinstance(kv, LayerKv), "a fused layer has keys and values"
        if kv is not self._store:
            self._store, self._kv = kv, kv_of(kv, mine.shape)
        mine.batch.turns = turns.data_ptr()
        step = byref(mine.batch), byref(self._kv)
        self._call(self._reference, *step, len(uses), self._added(uses), hidden.data_ptr())
        return hidden


def fuse(layer: LayerWeights, low_ranks: NativeLowRanks) -> RunnableLayer | NotFused:
    """Fuses a layer with one MLP, and norms of the same epsilon before its parts, after them, or both."""
    spec, mixer, mlp = layer.spec, layer.mixer, layer.feed_forward
    if not isinstance(mlp, MlpWeights):
        return NotFused("experts are chosen between two calls of the library")
    reasons = {} if isinstance(mixer, DeltaWeights) else _reasons_of(mixer.spec, spec.norm)
    reasons |= {
        "norms take off a mean": spec.norm.is_centred,
        "attention and MLP are given the same": spec.places == "shared",
        "the MLP has no gate": not mlp.spec.is_gated,
        "the activation is clamped": mlp.spec.clamped is not None,
        "the output is multiplied": layer.factor != 1.0,
    }
    if found := ", ".join(reason for reason, is_so in reasons.items() if is_so):
        return NotFused(found)
    if isinstance(mixer, DeltaWeights):
        return FusedDelta(layer, mixer, mlp, low_ranks)
    return FusedAttention(layer, mixer, mlp, low_ranks)


def _reasons_of(mixer: AttentionSpec, norm: NormSpec) -> dict[str, bool]:
    return {
        "the norm of the heads has another epsilon than the layer's": mixer.head_norm not in (None, norm),
        f"the norm of the heads is of {mixer.normed}": mixer.head_norm is not None and mixer.normed != "heads",
        "queries are multiplied by where they are": mixer.position.query_growth > 0,
        "values are normed": mixer.value_norm is not None,
        "the heads' outputs pass gates": mixer.is_gated,
    }


def _address_of(norm: PackedNorm | None) -> int | None:
    return None if norm is None else own(norm, NativeNorm).weight.data_ptr()


ACTIVATIONS = {"silu": native.SILU, "gelu_tanh": native.GELU}
READS = [*(f"weights.{scheme}" for scheme in SCHEMES), "kv.float32", "kv.bfloat16", "kv.int8"]  # `st_bytes_read`


def _gated(activation: int, gate_up: Tensor) -> Tensor:
    inner = gate_up.shape[1] // 2
    y = gate_up.new_empty((len(gate_up), inner))
    library().st_gate(len(gate_up), inner, activation, gate_up.data_ptr(), y.data_ptr())
    return y


class NativeOps:
    name = "native"
    attention_name = "native, paged in place"
    activation_dtype = torch.float32
    device = CPU
    tells_finite = True

    def __init__(self) -> None:
        """Raises `LibraryMissing`."""
        isa, self.isa_reason = choose_isa()
        self.linear_name = f"native {isa}"
        self._low_ranks = NativeLowRanks()
        self._deltas: WeakKeyDictionary[DeltaWeights, NativeDelta] = WeakKeyDictionary()
        check.bytes_read()  # now, before there are weights

    def set_threads(self, num_threads: int) -> None:
        """torch keeps one: what it still does is small, and two pools would fight for the same cores."""
        torch.set_num_threads(1)
        started = library().st_set_threads(num_threads)
        if started < num_threads:
            warnings.warn(f"the system gives {started} of {num_threads} threads", stacklevel=2)

    def product_dtype(self, scheme: WeightScheme) -> str:
        if scheme.name in ("int8", "int4"):
            return "int8"
        return "bfloat16" if scheme.name == "bfloat16" and scheme.rounds_activations else "float32"

    def keeps(self, scheme: WeightScheme) -> bool:
        return scheme.name in SCHEMES

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int:
        return packed.packed_bytes(out_features, in_features, scheme)

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> NativeWeight:
        shape = LinearShape(sum(len(part) for part in parts), parts[0].shape[1], bias, scheme)
        return self.linear_from_blob(packed.pack_floats(parts, scheme), shape)

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> NativeWeight:
        return self.linear_from_blob(packed.pack_integers(parts, shape), shape)

    def linear_from_blob(self, blob: Tensor, shape: LinearShape) -> NativeWeight:
        columns = shape.columns
        if columns is not None:
            check_scheme(shape.scheme)
            check_columns(columns, shape.in_features)
        wide = None if shape.bias is None else shape.bias.float().contiguous()
        order = None if columns is None else columns.to(torch.int32).contiguous()
        return NativeWeight(blob, shape.scheme, shape.out_features, shape.in_features, wide, order)

    def stack_linear(self, packed: Sequence[PackedWeight]) -> NativeStack:
        return NativeStack(packed)

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        weight = weight_of(packed)
        y = x.new_empty((len(x), weight.out_features))
        lines = x if x.stride(1) == 1 else x.contiguous()
        added = None if residual is None else residual.contiguous()
        arrays = (lines.data_ptr(), lines.stride(0), address(added), y.data_ptr(), weight.out_features)
        library().st_linear(byref(weight.struct), len(lines), *arrays)
        return y

    def add_low_rank(self, y: Tensor, x: Tensor, uses: ProductUses) -> None:
        """x, y: of contiguous rows."""
        if any(low_rank for low_rank, _ in uses):
            arrays = (x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
            library().st_add_low_rank(len(uses), self._low_ranks.of_product(uses), 0, *arrays)

    def pack_norm(self, weight: Tensor, eps: float) -> NativeNorm:
        return NativeNorm(weight.float().contiguous(), eps)

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        norm, y = own(packed, NativeNorm), torch.empty(x.shape)
        arrays = (x.data_ptr(), x.stride(0), norm.weight.data_ptr(), norm.eps, y.data_ptr())
        library().st_rms_norm(len(x), x.shape[1], *arrays)
        return y

    def linear_norm(self, x: Tensor, packed: PackedWeight, residual: Tensor, norm: PackedNorm) -> tuple[Tensor, Tensor]:
        total = self.linear(x, packed, residual)
        return total, self.rms_norm(total, norm)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(native.SILU, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(native.GELU, gate_up)

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> NativePlan:
        arrays = [
            torch.tensor(batch.query_begins, dtype=torch.int32),
            torch.tensor(batch.context_lens, dtype=torch.int32),
            batch.block_tables.int(),
            batch.token_blocks.int(),
            batch.token_offsets.int(),
        ]
        _, contexts, tables, blocks, _ = arrays
        sizes = (len(contexts), len(blocks), batch.num_decode_rows, tables.shape[1])
        step = StBatch(*sizes, *(array.data_ptr() for array in arrays))
        return NativePlan(arrays, step, shape, window_tokens or 0)

    def rope_write(
        self, qkv: Tensor, head_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        mine, norm = own(plan, NativePlan), None if head_norm is None else own(head_norm, NativeNorm)
        mine.batch.turns = turns.data_ptr()
        scale, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        num_heads = qkv.shape[1] - 2 * mine.shape.num_kv_heads
        store = byref(kv_of(kv, mine.shape))
        library().st_rope_write(byref(mine.batch), store, num_heads, scale, eps, qkv.data_ptr())

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        """q: heads of a token next to each other."""
        mine, out = own(plan, NativePlan), q.new_empty((len(q), q.shape[1] * q.shape[2]))
        given = byref(kv_of(kv, mine.shape)), q.shape[1], mine.window_tokens, byref(weighing_of(weighing))
        library().st_attention(byref(mine.batch), *given, q.data_ptr(), q.stride(0), out.data_ptr())
        return out

    def plan_states(self, batch: AttentionBatch) -> StatePlan:
        plan, states, begins = plain.plan_states(batch), batch.states, batch.query_begins
        assert states is not None, "`plain.plan_states` has looked"
        assert len(begins) - 1 == len(states.reads) == len(states.writes), "a row has a slot to read and one to write"
        assert min(states.writes) >= 0, "a row leaves its state in no slot"
        for row, count, slot in states.keeps:
            assert 0 <= count <= begins[row + 1] - begins[row], "a state is left behind tokens that are not there"
            assert slot >= 0, "a state is left in no slot"
        arrays = plan.begins, plan.reads, plan.writes, plan.keeps
        struct = native.StStates(len(states.reads), begins[-1], len(states.keeps), *map(address, arrays))
        last = max(*states.reads, *states.writes, *(slot for _, _, slot in states.keeps))
        return NativeStates(*arrays, struct, last + 1)

    def delta(self, products: Tensor, weights: DeltaWeights, states: Tensor, plan: StatePlan) -> Tensor:
        mine, spec, tokens = own(plan, NativeStates), weights.spec, len(products)
        assert products.shape == (mine.struct.tokens, spec.widest), "products of another step or spec"
        mine.check(states, spec)
        net = self._deltas.get(weights)
        if net is None:
            net = self._deltas[weights] = NativeDelta(weights)
        lines = products if products.stride(1) == 1 else products.contiguous()
        out = products.new_empty(tokens, spec.inner)
        given = lines.data_ptr(), lines.stride(0), states.data_ptr(), out.data_ptr()
        library().st_delta(byref(net.struct), byref(mine.struct), *given)
        return out

    def finite(self, x: Tensor) -> list[bool]:
        lines, flags = x.contiguous(), np.empty(len(x), dtype=np.bool_)
        library().st_finite(len(lines), lines.shape[1], lines.data_ptr(), flags.ctypes.data)
        return flags.tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        lines, tokens = logits.contiguous(), np.empty(len(logits), dtype=np.int32)
        library().st_argmax(len(lines), lines.shape[1], lines.data_ptr(), tokens.ctypes.data)
        return tokens.tolist()

    def draw(self, logits: Tensor, draws: np.ndarray, bits: np.ndarray | None = None) -> list[int]:
        lines, tokens, vocab = logits.contiguous(), np.empty(len(logits), dtype=np.int32), logits.shape[1]
        assert bits is None or (bits.shape[1], bits.dtype) == (-(-vocab // 32), np.uint32), "of another vocabulary"
        at = None if bits is None else bits.ctypes.data
        library().st_draw(len(lines), vocab, lines.data_ptr(), draws.ctypes.data, at, tokens.ctypes.data)
        return tokens.tolist()

    def bytes_read(self) -> dict[str, int]:
        counts = np.zeros(READ_KINDS, dtype=np.int64)
        library().st_bytes_read(counts.ctypes.data)
        counts -= check.bytes_read()
        return {kind: int(count) for kind, count in zip(READS, counts, strict=True) if count}

    def fuse(self, layer: LayerWeights) -> RunnableLayer | NotFused:
        return fuse(layer, self._low_ranks)
