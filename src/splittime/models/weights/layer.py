"""One decoder layer from its tensors: their names, and which projections become one product.

The rows of each query and key head are reordered from halves to neighbouring pairs (`load` says why), unless the source
has them so.
"""

import torch
from torch import Tensor

from splittime.kernels.layer import (
    AttentionWeights,
    LayerWeights,
    MixtureSpec,
    MixtureWeights,
    MlpSpec,
    MlpWeights,
    NormSpec,
    PackedNorm,
    PackedWeight,
)
from splittime.models.architectures import MlpNames, layer_names
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.packing import Packer, WeightRows, pair_rows


class LayerBuilder:
    """Takes the tensors of one layer and packs them."""

    def __init__(self, packer: Packer, config: ModelConfig, plan: WeightPlan, index: int, prefix: str = "") -> None:
        """prefix: of its tensors' names, where it is no layer of the model's trunk."""
        self.packer = packer
        self.spec = config.layers[index]
        self.hidden_size = config.hidden_size
        self.names = layer_names(config.architecture)
        self.ops = packer.ops
        self.plan = plan
        self.index = index
        self.prefix = prefix or f"model.layers.{index}."

    def build(self) -> LayerWeights:
        spec, names = self.spec.feed_forward, self.names
        return LayerWeights(
            spec=self.spec,
            feed_forward=self._mlp(names.mlp, spec) if isinstance(spec, MlpSpec) else self._mixture(spec),
            mixer_norm=self._norm(names.input_norm),
            mixer=self._attention(),
            feed_forward_norm=self._norm(names.mlp_norm),
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.packer.source.take(self.prefix + name, *shape)

    def _take_linear(self, name: str, rows: int, columns: int, head_dim: int = 0) -> WeightRows:
        module, source = self.prefix + name, self.packer.source
        return WeightRows(source.take_linear(module, rows, columns), 0 if source.rows_are_paired(module) else head_dim)

    def _take_norm(self, name: str, width: int) -> Tensor:
        return self._take(f"{name}.weight", width).to(self.ops.activation_dtype, copy=True)

    def _norm(self, name: str) -> PackedNorm:
        return self.ops.pack_norm(self._take_norm(name, self.hidden_size), self.spec.norm.eps)

    def _pack(
        self,
        *projections: tuple[str, int, int],
        has_bias: bool,
        head_dims: tuple[int, ...] = (),
        is_expert: bool = False,
    ) -> PackedWeight:
        """These projections (name, rows, columns) as one weight, one below the other."""
        dims = head_dims or (0,) * len(projections)
        parts = [self._take_linear(*projection, dim) for projection, dim in zip(projections, dims, strict=True)]
        biases = [
            WeightRows(self._take(f"{name}.bias", rows), part.head_dim)
            for (name, rows, _), part in zip(projections, parts, strict=True)
            if has_bias
        ]
        return self.packer.linear(self.prefix + projections[0][0], parts, biases, self.plan.layers, is_expert=is_expert)

    def _attention(self) -> AttentionWeights:
        spec, names, hidden = self.spec.mixer, self.names, self.hidden_size
        return AttentionWeights(
            spec=spec,
            qkv=self._pack(
                (names.query, spec.query_width, hidden),
                (names.key, spec.kv_width, hidden),
                (names.value, spec.kv_width, hidden),
                has_bias=spec.qkv_bias,
                head_dims=(spec.head_dim, spec.head_dim, 0),
            ),
            output=self._pack((names.output, hidden, spec.query_width), has_bias=spec.output_bias),
            head_norm=None if spec.head_norm is None else self._head_norm(spec.head_norm),
        )

    def _head_norm(self, norm: NormSpec) -> PackedNorm:
        """One scale for queries and keys together, [num_heads + num_kv_heads, head_dim]."""
        spec = self.spec.mixer
        query, key = (
            pair_rows(self._take_norm(name, spec.head_dim), spec.head_dim)
            for name in (self.names.query_norm, self.names.key_norm)
        )
        scales = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
        return self.ops.pack_norm(scales, norm.eps)

    def _mlp(self, names: MlpNames, spec: MlpSpec, is_expert: bool = False) -> MlpWeights:
        hidden, inner, has_bias = self.hidden_size, spec.inner, spec.has_bias
        gate_up = self._pack(
            (names.gate, inner, hidden), (names.up, inner, hidden), has_bias=has_bias, is_expert=is_expert
        )
        down = self._pack((names.down, hidden, inner), has_bias=has_bias, is_expert=is_expert)
        return MlpWeights(spec, gate_up, down)

    def _mixture(self, spec: MixtureSpec) -> MixtureWeights:
        router = self._take_linear(self.names.router, spec.router.num_experts, self.hidden_size)
        experts = tuple(self._mlp(names, spec.expert, True) for names in self.names.mlps(spec))
        packed = self.packer.linear(self.prefix + self.names.router, [router], [], self.plan.router, "router")
        return MixtureWeights(spec.router, packed, experts)
