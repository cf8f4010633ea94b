"""The contract of a backend: the operations a model is made of, one signature each (`Ops`), and what passes between.

`choose.make_backend` makes one by name; nothing here knows one. Nothing is global: a layer is given its `Ops` when it
is built and its tensors when it is called. A packed weight, a packed norm and an attention plan are opaque: made and
read by the same backend.

KV store of one layer (`LayerKv`): `[num_blocks + 1, 2, num_kv_heads, block_size * head_dim]`, keys then values.

    block b:  [ K head 0 | K head 1 | .. | V head 0 | V head 1 | .. ]     each a tile, contiguous

A *tile* (one block of one head of K or V) is contiguous, so that a kernel that walks a block table streams whole tiles
of the one head it works on. What is inside a tile is the backend's business, and a store belongs to one backend: here
[block_size, head_dim], so that the torch backend gathers a row's keys with one `index_select` of whole tiles, already
in the `[heads, tokens, head_dim]` order that matrix products want; the native kernels keep keys transposed. The last
block is never written and stays zero: padding points at it, so that whatever another request has written (a NaN, say)
cannot leak through a mask.

Rotary embedding turns *adjacent pairs* (2i, 2i + 1) of a head, as one complex product; checkpoints pair (i, i + D/2),
so the loader reorders the rows of the query and key weights once (`models.weights.load`): scores do not change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.layer import DeltaWeights, LayerWeights, PackedNorm, PackedWeight, Weighing
from splittime.kernels.low_rank import LayerUses, ProductUses


@dataclass(frozen=True)
class WeightScheme:
    """How a weight is kept: "float32", "float16", "bfloat16", "int8", "int4", or "fp8" (e4m3).

    group: columns that share a scale; 0, one scale an output (of int8 and fp8 only). has_zeros, has_minima: what
    `RoundedRows` comes with; only checkpoints that are already quantised do. rounds_activations, of "fp8" and of "int8"
    without groups: each token of x may be rounded too, as it comes (of "fp8" in groups each group of it), so that the
    product is one of 8-bit numbers. The torch backend always does so with such int8, the native one with all integers,
    the others where it is set, and a card with fp8 unless it is an expert's. Of "bfloat16", native: x is rounded to
    bfloat16, on every processor alike; where it is not set x stays float32. `Ops.product_dtype` tells which.
    is_turned, of integers that we round ourselves: a CPU's backend that rounds activations too turns both before
    (`kernels.reference.rounding.turned`). The product is that of the weight all the same, with smaller errors.
    bits, of GGUF's K types: of how many bits an integer is, where scales and minima are counted in `RoundedRows.steps`.
    """

    name: str
    group: int = 0
    has_zeros: bool = False
    has_minima: bool = False
    rounds_activations: bool = False
    is_turned: bool = False
    bits: int = 0


@dataclass(frozen=True)
class RoundedRows:
    """Some rows of a weight that is already integers. For row i, column j and its group g:

        w[i, j] = scales[i, g] * (integers[i, j] - zeros[i, g]) - minima[i, g]

    integers: int8 [rows, in]: 0..15 for "int4", -128..127 for "int8"; of "fp8" float8_e4m3fn, which are none but take
    their place. scales: float32 [rows, groups].
    zeros: uint8 [rows, groups], zero points of "int4"; None: 8 for "int4", 0 for "int8".
    minima: float32 [rows, groups], what is taken off whatever the integer is; None: nothing.
    steps, where the scheme has `bits`: float32 [rows, 1 or 2, in / 256 rounded up]. Scales are whole multiples of the
        first, and minima + scales * (8 for "int4", else 16) of the second.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    steps: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LinearShape:
    """What a packed weight is besides its numbers. bias: [out]. columns: int64 [in], its product is with x[:, columns];
    None: with x."""

    out_features: int
    in_features: int
    bias: Tensor | None
    scheme: WeightScheme
    columns: Tensor | None = None


@dataclass(frozen=True)
class StateBatch:
    """States that the rows of a step go on from, and where they leave them, of models whose layers have some.

    reads: R ints, the slot whose state a row goes on from; -1: of zeros, where a sequence begins. writes: R ints, the
        slot that has the state behind the row's last token; often the one that was read. No slot is written by two
        rows, nor read by one and written by another.
    keeps: (row, count, slot): the state behind `count` of a row's tokens is left in that slot too, which nobody else
        reads or writes in this step.
    """

    reads: Sequence[int]
    writes: Sequence[int]
    keeps: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one step: R rows, T query tokens in all. Decode rows, of one token each, come first.

    query_begins: R + 1 ints; row r's query tokens are [query_begins[r], query_begins[r + 1]).
    context_lens: R ints; tokens of row r up to and with its last query token. Row r's first query token is at position
        context_lens[r] - (query_begins[r + 1] - query_begins[r]).
    block_tables: int64 [R, max_blocks], padded with the zero block.
    token_blocks, token_offsets: int64 [T], where each token's K and V go.
    states: of layers that keep some; None: there are none.
    """

    query_begins: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    num_decode_rows: int
    states: StateBatch | None = None


@dataclass(frozen=True)
class KvShape:
    """The geometry of a KV store. num_blocks does not count the zero block."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class LayerKv:
    """One layer's KV store: `data` [num_blocks + 1, 2, num_kv_heads, block_size * head_dim], what is inside a tile is
    the backend's business; for int8 `scales` float32 [num_blocks + 1, 2, num_kv_heads, block_size], else None."""

    data: Tensor
    scales: Tensor | None


class KvPools(Protocol):
    """The KV cache as a decoder sees it: a store for each layer with keys and values of its own, and the shape of each
    of the model's `KvGroup`s. states: of each layer that keeps one, float32 [num_slots, state_floats]; what is inside
    a slot is the backend's business."""

    @property
    def layers(self) -> Sequence[LayerKv]: ...

    @property
    def states(self) -> Sequence[Tensor]: ...

    @property
    def shapes(self) -> Sequence[KvShape]: ...


LayerStore = LayerKv | Tensor
"""A layer's store for all sequences: keys and values, or of a gated delta net its states."""


class AttentionPlan:
    """What the layers of a `KvGroup` share in one step: indices, masks, places."""


@dataclass(frozen=True)
class StatePlan(AttentionPlan):
    """The step of all layers that keep states: a `StateBatch` as int64 tensors on the backend's device.

    begins: [R + 1], of each row's query tokens. reads, writes: [R]. keeps: [K, 3].
    """

    begins: Tensor
    reads: Tensor
    writes: Tensor
    keeps: Tensor


Own = TypeVar("Own", bound=AttentionPlan | PackedNorm | PackedWeight)


def own(given: AttentionPlan | PackedNorm | PackedWeight, kind: type[Own]) -> Own:
    """Returns what a backend is given, which it must have made itself."""
    assert isinstance(given, kind), f"{type(given).__name__} is of another backend"
    return given


class RunnableLayer(Protocol):
    """A layer that can be run: a backend's own in one, or its parts (`kernels.compose`).

    parts_reason: why it is run part by part; "" for a backend's own. needs_host: whether the host must look at numbers
    in the middle of it, so that it cannot be captured.
    """

    @property
    def weights(self) -> LayerWeights: ...

    @property
    def parts_reason(self) -> str: ...

    @property
    def needs_host(self) -> bool: ...

    def __call__(
        self, hidden: Tensor, turns: Tensor, kv: LayerStore, plan: AttentionPlan, uses: LayerUses = ()
    ) -> Tensor:
        """hidden [T, hidden], which may be overwritten; turns: complex64 [T, head_dim / 2], see `models.rope`; kv: this
        layer's; plan: of its kind; uses: of adapters, in this layer -> [T, hidden], one layer on."""


@dataclass(frozen=True)
class NotFused:
    """Why a backend has no layer of its own for some weights."""

    reason: str


class Ops(Protocol):
    """What a backend does.

    isa_reason: why with these instructions, "" where there is no choice. activation_dtype: of every x and y below.
    tells_finite: `argmax` and `draw` give -1 - token for a row in which something is not finite, -inf too.
    device: where they are, and weights and KV stores.
    """

    name: str
    linear_name: str
    attention_name: str
    isa_reason: str
    tells_finite: bool
    activation_dtype: torch.dtype
    device: torch.device

    def set_threads(self, num_threads: int) -> None:
        """Sets the threads of this process, for all that the backend computes."""

    def product_dtype(self, scheme: WeightScheme) -> str:
        """Returns what activations are rounded to before a product with such a weight."""

    def keeps(self, scheme: WeightScheme) -> bool:
        """Returns whether rounded rows can be packed in this scheme as they are: of fp8 the native kernels keep
        float32."""

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int | None:
        """Size of the one blob that a packed weight is, or None where this backend has no such thing."""

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> PackedWeight:
        """Make the weight of these `parts` [out_i, in], one below the other, and `bias` [out] ready for `linear`.

        Parts may be of any float dtype and views of a file mapping; they are read here and not kept. What is returned
        has `.blob`, uint8 [packed_bytes], if `packed_bytes` is not None. (How a weight is rounded, and the product in
        plain torch for the backends that have no kernel, belongs in `kernels.reference.rounding`, which the torch and
        reference backends use and `models.quant` re-states with its error bounds: models import kernels, never back.)
        """

    def pack_rounded(self, parts: Iterable[RoundedRows], shape: LinearShape) -> PackedWeight:
        """Pack a weight that is integers already: these rows, one below the other, each part asked for when the one
        before is done with.

        `kernels.rounded` says which schemes there are, and raises `ConfigError` for others. `.blob` is there as above.
        """

    def linear_from_blob(self, blob: Tensor, shape: LinearShape) -> PackedWeight:
        """Returns what `pack_linear` or `pack_rounded` made, from the blob that it had."""

    def stack_linear(self, packed: Sequence[PackedWeight]) -> PackedWeight:
        """These packed weights of the same columns as one, the outputs of each below those of the one before. They may
        differ in scheme and in `columns`, and keep their biases. The result has no blob: its parts have theirs."""

    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + bias (+ residual [T, out], which may be overwritten) [T, out]."""

    def add_low_rank(self, y: Tensor, x: Tensor, uses: ProductUses) -> None:
        """x [T, in], y [T, out]: in place, what each adapter adds on its tokens, which are no other's."""

    def pack_norm(self, weight: Tensor, eps: float) -> PackedNorm:
        """Make the scale `weight` [..., D] ready for `rms_norm`."""

    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor:
        """x [T, ..., D] over its root mean square along D, times the scale; a new tensor."""

    def linear_norm(self, x: Tensor, packed: PackedWeight, residual: Tensor, norm: PackedNorm) -> tuple[Tensor, Tensor]:
        """Returns what `linear` gives with this residual, and that normed by `rms_norm`."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> gelu(gate) * up, [T, I], by the approximation with a tanh."""

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None) -> AttentionPlan:
        """Work out once a step what the layers with this sliding window share: indices and masks.

        window_tokens: a query at position p sees positions (p - window_tokens, p]; None for all of [0, p].
        """

    def rope_write(
        self, qkv: Tensor, head_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        """qkv [T, num_heads + 2 num_kv_heads, head_dim], in place: norm each query and key head (unless `head_norm` is
        None), turn its adjacent pairs by `turns`, complex64 [T, D / 2], and put keys and values at their places."""

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        """q [T, num_heads, head_dim] against one layer's `kv` -> [T, num_heads * head_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads)."""

    def plan_states(self, batch: AttentionBatch) -> StatePlan:
        """Work out once a step what the layers that keep states share."""

    def delta(self, products: Tensor, weights: DeltaWeights, states: Tensor, plan: StatePlan) -> Tensor:
        """products [T, channels + inner + 2 num_value_heads], a gated delta net's queries, keys, values, gate z, then
        of each head b and a -> [T, inner], normed and times silu(z). states: float32 [num_slots, state_floats], this
        layer's, which are read and written as the plan says.

        b and a stand for the strength sigmoid(b) and the decay weights.decay * softplus(a + dt_bias). All of it is
        float32, one token after the other in one order of summation: to the last bit the same however a prompt is cut
        into steps, and whoever else is in the batch.
        """

    def finite(self, x: Tensor) -> list[bool]:
        """Returns whether all of each row of x [N, D] is finite."""

    def argmax(self, logits: Tensor) -> list[int]:
        """The first of the largest of each row of logits [N, vocab]."""

    def draw(self, logits: Tensor, draws: np.ndarray, bits: np.ndarray | None = None) -> list[int] | None:
        """A token for each row of logits [N, vocab], float32, by its line of `draws`, of `kernels.draw.DRAW`, where the
        temperature is 0 as `argmax`; see `runner.sampler`, which does it when this is None. bits: what a line's
        `allowed` refers to, uint32 [lines, vocab / 32], the lowest first; a row of which it leaves out something is
        finite all the same."""

    def bytes_read(self) -> dict[str, int]:
        """Since this process began, by all of this backend: bytes of weights that products have read, by scheme
        ("weights.int4"), and of keys and values that attention has, by dtype ("kv.int8"). What is 0 may be left out.

        Counted where the reading is done, once a call: a product counts the whole of its weight, as it lies in memory,
        and nothing for no tokens; attention the positions that it looks at, with their scales.
        """

    def fuse(self, layer: LayerWeights) -> RunnableLayer | NotFused:
        """This layer in one, which computes what its parts would (`kernels.compose`), or why there is none."""


CPU = torch.device("cpu")
