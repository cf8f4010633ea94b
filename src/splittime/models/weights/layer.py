"""One decoder layer from its tensors: their names, and which projections become one product.

The rows of each query and key head are reordered from halves to neighbouring pairs (`load` says why), unless the source
has them so.
"""

import torch
from torch import Tensor

from splittime.models import registry
from splittime.models.config import ModelConfig
from splittime.models.layers import Attention, DecoderLayer, MixtureOfExperts, Mlp
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.packing import Packer, Rows, pair_rows


class LayerBuilder:
    """Takes the tensors of one layer and packs them."""

    def __init__(self, packer: Packer, config: ModelConfig, plan: WeightPlan, index: int) -> None:
        self.packer = packer
        self.config = config
        self.ops = packer.ops
        self.plan = plan
        self.index = index
        self.prefix = f"model.layers.{index}."

    def build(self) -> DecoderLayer:
        moe = self.config.moe
        mlp = self._experts() if moe is not None and moe.layers[self.index] else self._plain_mlp()
        return DecoderLayer(
            self.ops, self._norm("input_layernorm"), self._attention(), self._norm("post_attention_layernorm"), mlp
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.packer.source.take(self.prefix + name, *shape)

    def _take_linear(self, name: str, rows: int, columns: int, head_dim: int = 0) -> Rows:
        module, source = self.prefix + name, self.packer.source
        return Rows(source.take_linear(module, rows, columns), 0 if source.rows_are_paired(module) else head_dim)

    def _take_norm(self, name: str, width: int) -> Tensor:
        return self._take(f"{name}.weight", width).to(self.ops.activation_dtype, copy=True)

    def _norm(self, name: str) -> object:
        return self.ops.pack_norm(self._take_norm(name, self.config.hidden_size), self.config.rms_norm_eps)

    def _pack(
        self,
        *projections: tuple[str, int, int],
        has_bias: bool,
        head_dims: tuple[int, ...] = (),
        is_expert: bool = False,
    ) -> object:
        """These projections (name, rows, columns) as one weight, one below the other."""
        dims = head_dims or (0,) * len(projections)
        parts = [self._take_linear(*projection, dim) for projection, dim in zip(projections, dims, strict=True)]
        biases = [
            Rows(self._take(f"{name}.bias", rows), part.head_dim)
            for (name, rows, _), part in zip(projections, parts, strict=True)
            if has_bias
        ]
        return self.packer.linear(self.prefix + projections[0][0], parts, biases, self.plan.layers, is_expert=is_expert)

    def _attention(self) -> Attention:
        config, dim, hidden = self.config, self.config.head_dim, self.config.hidden_size
        query, key = config.num_heads * dim, config.num_kv_heads * dim
        return Attention(
            ops=self.ops,
            qkv=self._pack(
                ("self_attn.q_proj", query, hidden),
                ("self_attn.k_proj", key, hidden),
                ("self_attn.v_proj", key, hidden),
                has_bias=config.qkv_bias,
                head_dims=(dim, dim, 0),
            ),
            output=self._pack(("self_attn.o_proj", hidden, query), has_bias=config.output_bias),
            qk_norm=self._qk_norm() if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            window_tokens=config.layer_windows[self.index],
        )

    def _qk_norm(self) -> object:
        """One scale for queries and keys together, [num_heads + num_kv_heads, head_dim]."""
        config = self.config
        query, key = (
            pair_rows(self._take_norm(f"self_attn.{name}_norm", config.head_dim), config.head_dim)
            for name in ("q", "k")
        )
        scales = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        return self.ops.pack_norm(scales, config.rms_norm_eps)

    def _plain_mlp(self) -> Mlp:
        config = self.config
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return self._mlp(names, config.intermediate_size, config.mlp_bias)

    def _mlp(self, names: tuple[str, str, str], inner: int, has_bias: bool, is_expert: bool = False) -> Mlp:
        hidden, (gate, up, down) = self.config.hidden_size, names
        gate_up = self._pack((gate, inner, hidden), (up, inner, hidden), has_bias=has_bias, is_expert=is_expert)
        return Mlp(self.ops, gate_up, self._pack((down, hidden, inner), has_bias=has_bias, is_expert=is_expert))

    def _experts(self) -> MixtureOfExperts:
        moe, names = self.config.moe, registry.find(self.config.architecture).moe
        assert moe is not None
        assert names is not None
        place = f"{names.block}.gate"
        router = self._take_linear(place, moe.num_experts, self.config.hidden_size)
        experts = []
        for number in range(moe.num_experts):
            own = f"{names.block}.experts.{number}."
            experts.append(
                self._mlp((own + names.gate, own + names.up, own + names.down), moe.intermediate_size, False, True)
            )
        packed = self.packer.linear(self.prefix + place, [router], [], self.plan.router, "router")
        return MixtureOfExperts(self.ops, packed, tuple(experts), moe.num_experts_per_tok, moe.normalises)
