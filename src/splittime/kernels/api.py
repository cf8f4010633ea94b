"""The operations a model is made of: one signature each, carried out by one backend that is chosen once.

A backend is an object with the methods of `Ops`; `resolve` chooses it by name, the runner holds it and reports it.
Nothing here is global: a layer is given its `Ops` when it is built and its tensors when it is called.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels import reads

BACKENDS = ("native", "torch", "reference", "triton")


@dataclass(frozen=True)
class WeightScheme:
    """How a weight is kept: "float32", "float16", "bfloat16", "int8", "int4", or "fp8" (e4m3).

    group: columns that share a scale; 0, one scale an output (of int8 and fp8 only). has_zeros, has_minima: what
    `RoundedRows` comes with; only checkpoints that are already quantised do. rounds_activations, of "fp8" and of "int8"
    without groups: each token of x may be rounded too, as it comes (of "fp8" in groups each group of it), so that the
    product is one of 8-bit numbers. The torch backend never does so, the native one always with integers, the others
    where it is set, and a card with fp8 unless it is an expert's. Of "bfloat16", native: x is rounded to bfloat16, on
    every processor alike; where it is not set x stays float32. `Ops.product_dtype` tells which.
    """

    name: str
    group: int = 0
    has_zeros: bool = False
    has_minima: bool = False
    rounds_activations: bool = False


@dataclass(frozen=True)
class RoundedRows:
    """Some rows of a weight that is already integers. For row i, column j and its group g:

        w[i, j] = scales[i, g] * (integers[i, j] - zeros[i, g]) - minima[i, g]

    integers: int8 [rows, in]: 0..15 for "int4", -128..127 for "int8"; of "fp8" float8_e4m3fn, which are none but take
    their place. scales: float32 [rows, groups].
    zeros: uint8 [rows, groups], zero points of "int4"; None: 8 for "int4", 0 for "int8".
    minima: float32 [rows, groups], what is taken off whatever the integer is; None: nothing.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one step: R rows, T query tokens in all. Decode rows, of one token each, come first.

    query_begins: R + 1 ints; row r's query tokens are [query_begins[r], query_begins[r + 1]).
    context_lens: R ints; tokens of row r up to and with its last query token. Row r's first query token is at position
        context_lens[r] - (query_begins[r + 1] - query_begins[r]).
    block_tables: int64 [R, max_blocks], padded with the zero block.
    token_blocks, token_offsets: int64 [T], where each token's K and V go.
    """

    query_begins: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    num_decode_rows: int


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


class Ops(Protocol):
    """What a backend does. Packed weights and plans are opaque: made and read by the same backend.

    activation_dtype: of every x and y below. device: where they are, and weights and KV stores.
    """

    name: str
    linear_name: str
    attention_name: str
    activation_dtype: torch.dtype
    device: torch.device

    def set_threads(self, num_threads: int) -> None:
        """Of this process, for all that the backend computes."""

    def product_dtype(self, scheme: WeightScheme) -> str:
        """What activations are rounded to before a product with such a weight."""

    def keeps(self, scheme: WeightScheme) -> bool:
        """Whether rounded rows can be packed in this scheme as they are: of fp8 the native kernels keep float32."""

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int | None:
        """Size of the one blob that a packed weight is, or None where this backend has no such thing."""

    def pack_linear(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: WeightScheme) -> Any:
        """Make the weight of these `parts` [out_i, in], one below the other, and `bias` [out] ready for `linear`.

        Parts may be of any float dtype and views of a file mapping; they are read here and not kept. What is returned
        has `.blob`, uint8 [packed_bytes], if `packed_bytes` is not None. (How a weight is rounded, and the product in
        plain torch for the backends that have no kernel, belongs in `kernels.reference.rounding`, which the torch and
        reference backends use and `models.quant` re-states with its error bounds: models import kernels, never back.)
        """

    def pack_rounded(
        self,
        parts: Iterable[RoundedRows],
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> Any:
        """The same of a weight that is integers already: these rows, one below the other, each part asked for when the
        one before is done with. columns: int64 [in], its product is with x[:, columns]; None: with x.

        `kernels.rounded` says which schemes there are, and raises `ConfigError` for others. `.blob` is there as above.
        """

    def linear_from_blob(
        self,
        blob: Tensor,
        out_features: int,
        in_features: int,
        bias: Tensor | None,
        scheme: WeightScheme,
        columns: Tensor | None = None,
    ) -> Any:
        """What `pack_linear` or `pack_rounded` made, from the blob that it had."""

    def stack_linear(self, packed: Sequence[Any]) -> Any:
        """These packed weights of the same columns as one, the outputs of each below those of the one before. They may
        differ in scheme and in `columns`, and keep their biases. The result has no blob: its parts have theirs."""

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + bias (+ residual [T, out], which may be overwritten) [T, out]."""

    def pack_norm(self, weight: Tensor, eps: float) -> Any:
        """Make the scale `weight` [..., D] ready for `rms_norm`."""

    def rms_norm(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, ..., D] over its root mean square along D, times the scale; a new tensor."""

    def linear_norm(self, x: Tensor, packed: Any, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """What `linear` gives with this residual, and that normed by `rms_norm`."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]."""

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: Any) -> Any:
        """Work out once a step what the layers with this sliding window share: indices and masks.

        window_tokens: a query at position p sees positions (p - window_tokens, p]; None for all of [0, p].
        """

    def rope_write(self, qkv: Tensor, qk_norm: Any | None, turns: Tensor, kv: LayerKv, plan: Any) -> None:
        """qkv [T, num_heads + 2 num_kv_heads, head_dim], in place: norm each query and key head (unless `qk_norm` is
        None), turn its adjacent pairs by `turns`, complex64 [T, D / 2], and put keys and values at their places."""

    def attention(self, q: Tensor, store: LayerKv, plan: Any, scale: float) -> Tensor:
        """q [T, num_heads, head_dim] against one layer's `store` -> [T, num_heads * head_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads).
        """

    def finite(self, x: Tensor) -> list[bool]:
        """Whether all of each row of x [N, D] is finite."""

    def argmax(self, logits: Tensor) -> list[int]:
        """The first of the largest of each row of logits [N, vocab]."""

    def draw(self, logits: Tensor, draws: np.ndarray) -> list[int] | None:
        """A token for each row of logits [N, vocab], float32, by its line of `draws` (`DRAW`); see `runner.sampler`,
        which does it when this is None."""

    def bytes_read(self) -> dict[str, int]:
        """Since this process began, by all of this backend: bytes of weights that products have read, by scheme
        ("weights.int4"), and of keys and values that attention has, by dtype ("kv.int8"). What is 0 may be left out.

        Counted where the reading is done, once a call: a product counts the whole of its weight, as it lies in memory,
        and nothing for no tokens; attention the positions that it looks at, with their scales.
        """

    def fuse_layer(self, layer: Any) -> Any | None:
        """One callable in the place of a `models.layers.DecoderLayer`, with its signature; None where there is none."""


DRAW = np.dtype(
    [("top_p", "f8"), ("uniform", "f8"), ("temperature", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("unused", "i4")]
)
"""How one token is drawn, `StDraw` of csrc/splittime.h: top_k and min_p are off at 0, top_p at 1; uniform in [0, 1)."""


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stack:
    """Packed weights, the outputs of each beside those of the one before; of backends that compose."""

    parts: tuple[Any, ...]

    def product(self, linear: Callable[[Tensor, Any], Tensor], x: Tensor, residual: Tensor | None) -> Tensor:
        y = torch.cat([linear(x, part) for part in self.parts], dim=1)
        return y if residual is None else y.add_(residual)


class PlainOps:
    """What the backends that have no kernels of their own share: they hold no blobs and compose small operations."""

    device = CPU

    def set_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def product_dtype(self: Any, scheme: WeightScheme) -> str:
        return str(self.activation_dtype).removeprefix("torch.")

    def keeps(self, scheme: WeightScheme) -> bool:
        return True

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> None:
        return None

    def linear_from_blob(self, *_: Any) -> Any:
        raise NotImplementedError("this backend has no blobs")

    def stack_linear(self, packed: Sequence[Any]) -> "Stack":
        return Stack(tuple(packed))

    def bytes_read(self) -> dict[str, int]:
        return reads.total()

    def fuse_layer(self, layer: Any) -> None:
        return None

    def finite(self, x: Tensor) -> list[bool]:
        return x.sum(-1).isfinite().tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    def draw(self, logits: Tensor, draws: np.ndarray) -> list[int] | None:
        return None

    def linear_norm(self: Any, x: Tensor, packed: Any, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        total = self.linear(x, packed, residual)
        return total, self.rms_norm(total, norm)

    def rope_write(self: Any, qkv: Tensor, qk_norm: Any | None, turns: Tensor, kv: LayerKv, plan: Any) -> None:
        num_kv_heads = kv.data.shape[2]
        turned = qkv[:, :-num_kv_heads]
        if qk_norm is not None:
            turned.copy_(self.rms_norm(turned, qk_norm))
        self.rotate(turned, turns)
        self.write_kv(qkv[:, -2 * num_kv_heads :], kv, plan)


def resolve(name: str, dtype: torch.dtype) -> Ops:
    """The backend called `name` for weights of `dtype`. Raises `ConfigError` for a name that is not in `BACKENDS`, for
    "native" where its library is missing, and for "triton" where there is no card."""
    if name == "native":
        return _resolve_native()
    if name == "torch":
        from splittime.kernels.cpu.ops import CpuOps

        return CpuOps(dtype)
    if name == "triton":
        return _resolve_triton(dtype)
    if name == "reference":
        from splittime.kernels.reference.ops import ReferenceOps

        return ReferenceOps(dtype)
    raise ConfigError(f"kernel backend {name!r} is not one of {', '.join(BACKENDS)}", param="kernels", value=name)


def _resolve_triton(dtype: torch.dtype) -> Ops:
    try:
        from splittime.kernels.triton.ops import TritonOps
    except ImportError as error:
        message = f"kernels=triton: {error}"
        raise ConfigError(message, param="kernels", value="triton", hint="pip install triton") from error
    return TritonOps(dtype)


def _resolve_native() -> Ops:
    from splittime.kernels.native.library import LibraryMissing
    from splittime.kernels.native.ops import NativeOps

    try:
        return NativeOps()
    except LibraryMissing as error:
        raise ConfigError(f"kernels=native: {error}", param="kernels", value="native", hint="kernels=torch") from error
