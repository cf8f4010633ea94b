"""The kernels as torch custom ops, `torch.ops.splittime.*`, with the shapes of their results for tracing.

This is how a layer that is composed in Python (a mixture of experts, the head) calls them. A dense layer does not come
by here: `fused` makes one call of it.
"""

from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from splittime.kernels.native.library import Batch, Kv, Linear, chain, library

_LIBRARY = torch.library.Library("splittime", "DEF")
_SCHEMAS = (
    "linear(Tensor x, Tensor blob, Tensor? bias, Tensor? columns, Tensor? residual, int scheme, int out_features,"
    " int group, int extras) -> Tensor",
    "linear_stack(Tensor x, Tensor[] blobs, Tensor?[] biases, Tensor?[] columns, Tensor? residual, int[] schemes,"
    " int[] out_features, int[] groups, int[] extras) -> Tensor",
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "silu_mul(Tensor gate_up) -> Tensor",
    "rope_write(Tensor(a!) qkv, Tensor(b!) data, Tensor(c!)? scales, Tensor? qk_norm, Tensor turns, Tensor[] batch,"
    " int decode_rows, int num_heads, int block_size, int head_dim, float eps) -> ()",
    "attention(Tensor q, Tensor data, Tensor? scales, Tensor[] batch, int decode_rows, int block_size, int head_dim,"
    " int window_tokens, float scale) -> Tensor",
)
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def linear(
    x: Tensor,
    blob: Tensor,
    bias: Tensor | None,
    columns: Tensor | None,
    residual: Tensor | None,
    scheme: int,
    out_features: int,
    group: int,
    extras: int,
) -> Tensor:
    """x float32 [T, in], rows contiguous; see `st_linear`."""
    sizes = (scheme, out_features, x.shape[1], group, extras)
    return _product(x, Linear(*sizes, blob.data_ptr(), address(bias), address(columns)), out_features, residual)


def linear_stack(
    x: Tensor,
    blobs: list[Tensor],
    biases: list[Tensor | None],
    columns: list[Tensor | None],
    residual: Tensor | None,
    schemes: list[int],
    out_features: list[int],
    groups: list[int],
    extras: list[int],
) -> Tensor:
    """The same of weights below one another."""
    arrays = ([blob.data_ptr() for blob in blobs], map(address, biases), map(address, columns))
    widths = [x.shape[1]] * len(blobs)
    weights = [Linear(*one) for one in zip(schemes, out_features, widths, groups, extras, *arrays, strict=True)]
    chain(weights)
    return _product(x, weights[0], sum(out_features), residual)


def _product(x: Tensor, weight: Linear, out_features: int, residual: Tensor | None) -> Tensor:
    y = x.new_empty((x.shape[0], out_features))
    lines = x if x.stride(1) == 1 else x.contiguous()
    added = None if residual is None else residual.contiguous()
    library().st_linear(
        byref(weight), len(lines), lines.data_ptr(), lines.stride(0), address(added), y.data_ptr(), out_features
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x float32 [T, D], rows contiguous; weight [D]."""
    y = torch.empty(x.shape)
    library().st_rms_norm(x.shape[0], x.shape[1], x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr())
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    inner = gate_up.shape[1] // 2
    y = gate_up.new_empty((gate_up.shape[0], inner))
    library().st_silu_mul(gate_up.shape[0], inner, gate_up.data_ptr(), y.data_ptr())
    return y


def rope_write(
    qkv: Tensor,
    data: Tensor,
    scales: Tensor | None,
    qk_norm: Tensor | None,
    turns: Tensor,
    batch: list[Tensor],
    decode_rows: int,
    num_heads: int,
    block_size: int,
    head_dim: int,
    eps: float,
) -> None:
    """qkv float32 [T, heads, D]; turns float32 [T, D]; batch: the five int32 arrays of `StBatch`, in its order."""
    kv, step = kv_of(data, scales, block_size, head_dim), batch_of(batch, decode_rows, turns)
    library().st_rope_write(byref(step), byref(kv), num_heads, address(qk_norm), eps, qkv.data_ptr())


def attention(
    q: Tensor,
    data: Tensor,
    scales: Tensor | None,
    batch: list[Tensor],
    decode_rows: int,
    block_size: int,
    head_dim: int,
    window_tokens: int,
    scale: float,
) -> Tensor:
    """q float32 [T, num_heads, D], heads of a token next to each other -> [T, num_heads * D]."""
    kv, step = kv_of(data, scales, block_size, head_dim), batch_of(batch, decode_rows, None)
    out = q.new_empty((q.shape[0], q.shape[1] * head_dim))
    library().st_attention(
        byref(step), byref(kv), q.shape[1], window_tokens, scale, q.data_ptr(), q.stride(0), out.data_ptr()
    )
    return out


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kv_of(data: Tensor, scales: Tensor | None, block_size: int, head_dim: int) -> Kv:
    """`StKv` of one layer's tensors; valid while they live."""
    kv_type = _KV_TYPES[data.dtype]
    return Kv(kv_type, data.shape[0] - 1, block_size, data.shape[2], head_dim, data.data_ptr(), address(scales))


def batch_of(batch: list[Tensor], decode_rows: int, turns: Tensor | None) -> Batch:
    """`StBatch` of a step's arrays: query_begins, context_lens, block_tables, token_blocks, token_offsets."""
    _, contexts, tables, blocks, _ = batch
    pointers = [array.data_ptr() for array in batch]
    return Batch(len(contexts), len(blocks), decode_rows, tables.shape[1], *pointers, address(turns))


def _register() -> None:
    for schema in _SCHEMAS:
        _LIBRARY.define(schema)
    for function in (linear, linear_stack, rms_norm, silu_mul, rope_write, attention):
        _LIBRARY.impl(function.__name__, function, "CPU")
    shapes: dict[str, Callable[..., Any]] = {
        "linear": lambda x, *rest: x.new_empty((x.shape[0], rest[5])),
        "linear_stack": lambda x, *rest: x.new_empty((x.shape[0], sum(rest[5]))),
        "rms_norm": lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
        "silu_mul": lambda gate_up: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)),
        "rope_write": lambda *_: None,
        "attention": lambda q, *_: q.new_empty((q.shape[0], q.shape[1] * q.shape[2])),
    }
    for name, shape in shapes.items():
        torch.library.register_fake(f"splittime::{name}", shape, lib=_LIBRARY)


_register()
