"""A dense decoder layer as one call into the library (`st_layer`): no tensor is made, nothing is dispatched by torch.

What it takes the place of is the composition in `kernels.compose`, which the equivalence tests hold it to.
"""

from ctypes import byref

from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerKv, NotFused
from splittime.kernels.layer_weights import LayerWeights, MlpWeights
from splittime.kernels.native import library as native
from splittime.kernels.native.library import library
from splittime.kernels.native.packed import kv_of, norm_of, plan_of, weight_of


class FusedLayer:
    """A `kernels.api.RunnableLayer` that changes `hidden` in place and returns it."""

    parts_reason, needs_host = "", False

    def __init__(self, weights: LayerWeights, mlp: MlpWeights) -> None:
        mixer, spec = weights.mixer, weights.mixer.spec
        head_norm = None if mixer.head_norm is None else norm_of(mixer.head_norm)
        self.weights = weights  # keeps alive what the structure points to
        self._layer = native.StLayer(
            weight_of(mixer.qkv).struct,
            weight_of(mixer.output).struct,
            weight_of(mlp.gate_up).struct,
            weight_of(mlp.down).struct,
            norm_of(weights.mixer_norm).weight.data_ptr(),
            norm_of(weights.feed_forward_norm).weight.data_ptr(),
            None if head_norm is None else head_norm.weight.data_ptr(),
            weights.spec.norm.eps,
            spec.scale,
            spec.num_heads,
            spec.window_tokens or 0,
        )
        self._reference = byref(self._layer)
        self._call = library().st_layer
        self._store: LayerKv | None = None
        self._kv = native.StKv()

    def __call__(self, hidden: Tensor, turns: Tensor, kv: LayerKv, plan: AttentionPlan) -> Tensor:
        own = plan_of(plan)
        if kv is not self._store:
            self._store, self._kv = kv, kv_of(kv, own.shape)
        own.batch.turns = turns.data_ptr()
        self._call(self._reference, byref(own.batch), byref(self._kv), hidden.data_ptr())
        return hidden


def fuse(layer: LayerWeights) -> FusedLayer | NotFused:
    """Fuses a layer with one MLP whose norms have the same epsilon."""
    spec = layer.spec
    if not isinstance(layer.feed_forward, MlpWeights):
        return NotFused("experts are chosen between two calls of the library")
    if spec.mixer.head_norm not in (None, spec.norm):
        return NotFused("the norm of the heads has another epsilon than the layer's")
    return FusedLayer(layer, layer.feed_forward)
