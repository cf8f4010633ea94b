"""A dense decoder layer as one call into the library (`st_layer`): no tensor is made, nothing is dispatched by torch.

What it takes the place of is the composition in `models.layers`, which the equivalence tests hold it to.
"""

from ctypes import byref
from typing import Any

from torch import Tensor

from splittime.kernels.api import LayerKv
from splittime.kernels.native import library as native
from splittime.kernels.native import torch_ops
from splittime.kernels.native.library import library
from splittime.kernels.native.ops import Plan


class FusedLayer:
    """Has the signature of `models.layers.DecoderLayer`; changes `hidden` in place and returns it."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.attention, layer.mlp
        qk_norm = attention.qk_norm
        self.attention = attention
        self._owners = layer  # keeps alive what the structure points to
        self._layer = native.Layer(
            attention.qkv.struct(),
            attention.output.struct(),
            mlp.gate_up.struct(),
            mlp.down.struct(),
            layer.input_norm.weight.data_ptr(),
            layer.mlp_norm.weight.data_ptr(),
            None if qk_norm is None else qk_norm.weight.data_ptr(),
            layer.input_norm.eps,
            attention.head_dim**-0.5,
            attention.num_heads,
            attention.window_tokens or 0,
        )
        self._reference = byref(self._layer)
        self._call = library().st_layer
        self._store: LayerKv | None = None
        self._kv: Any = None

    def __call__(self, hidden: Tensor, turns: Tensor, store: LayerKv, plan: Plan) -> Tensor:
        if store is not self._store:
            shape = plan.shape
            self._store, self._kv = store, torch_ops.kv_of(store.data, store.scales, shape.block_size, shape.head_dim)
        plan.batch.turns = turns.data_ptr()
        self._call(self._reference, byref(plan.batch), byref(self._kv), hidden.data_ptr())
        return hidden


def fuse(layer: Any) -> FusedLayer | None:
    """None for a layer that is not dense (its experts are chosen in Python), or whose norms differ in their epsilon."""
    norms = (layer.input_norm, layer.mlp_norm, layer.attention.qk_norm)
    if not hasattr(layer.mlp, "gate_up") or len({norm.eps for norm in norms if norm is not None}) > 1:
        return None
    return FusedLayer(layer)
