"""The operations a model is made of: one signature each, carried out by one backend that is chosen once.

A backend is an object with the methods of `Ops`; `resolve` chooses it by name, the runner holds it and reports it.
Nothing here is global: a layer is given its `Ops` when it is built and its tensors when it is called.

KV store of one layer: `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`, keys then values.

    block b:  [ K head 0 | K head 1 | .. | V head 0 | V head 1 | .. ]     each tile [block_size, head_dim], contiguous

A *tile* (one block of one head of K or V) is contiguous, so that a kernel that walks a block table streams whole tiles
of the one head it works on, and the torch backend gathers a row's keys with one `index_select` of whole tiles, already
in the `[heads, tokens, head_dim]` order that matrix products want. The last block is never written and stays zero:
padding points at it, so that whatever another request has written (a NaN, say) cannot leak through a mask.

Rotary embedding turns *adjacent pairs* (2i, 2i + 1) of a head, as one complex product; checkpoints pair (i, i + D/2),
so the loader reorders the rows of the query and key weights once (`models.weights.load`): scores do not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from splittime.core.errors import ConfigError

BACKENDS = ("cpu", "reference")


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one step: R rows, T query tokens in all. Rows of one token (decode) come first.

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


class Ops(Protocol):
    """What a backend does. Packed weights and plans are opaque: made and read by the same backend."""

    name: str
    linear_name: str
    attention_name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Make `weight` [out, in] and `bias` [out] ready for `linear`."""

    def linear(self, x: Tensor, packed: Any, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + bias (+ residual [T, out]), a new tensor [T, out]."""

    def pack_norm(self, weight: Tensor, eps: float) -> Any:
        """Make the scale `weight` [..., D] ready for `rms_norm`."""

    def rms_norm(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, ..., D] over its root mean square along D, times the scale; a new tensor."""

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """Turn adjacent pairs of x [T, H, D] in place by `turns`, complex64 [T, D / 2]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]."""

    def plan_attention(self, batch: AttentionBatch, shape: KvShape, window_tokens: int | None, dtype: Any) -> Any:
        """Work out once a step what the layers with this sliding window share: indices and masks.

        window_tokens: a query at position p sees positions (p - window_tokens, p]; None for all of [0, p].
        """

    def write_kv(self, kv: Tensor, store: Tensor, plan: Any) -> None:
        """Put kv [T, 2 * num_kv_heads, head_dim] (keys then values) at its places in one layer's `store`."""

    def attention(self, q: Tensor, store: Tensor, plan: Any, scale: float) -> Tensor:
        """q [T, num_heads, head_dim] against one layer's `store` -> [T, num_heads * head_dim].

        Query head h reads KV head h // (num_heads // num_kv_heads).
        """


def resolve(name: str, dtype: Any) -> Ops:
    """The backend called `name` for weights of `dtype`. Raises `ConfigError` for a name that is not in `BACKENDS`."""
    if name == "cpu":
        from splittime.kernels.cpu.ops import CpuOps

        return CpuOps(dtype)
    if name == "reference":
        from splittime.kernels.reference.ops import ReferenceOps

        return ReferenceOps()
    raise ConfigError(f"kernel backend {name!r} is not one of {', '.join(BACKENDS)}", param="backend", value=name)
