"""Building the decoder from a checkpoint: names, fused projections, and the order of rotary pairs.

Fused at load: q, k, v into one product, gate and up into one. The rows of each query and key head are reordered from
halves (i, i + D/2) to neighbours (2i, 2i + 1), the order in which `Ops.rotate` turns them; a dot product of a query and
a key does not change when both are reordered alike, and neither does the RMS norm of a head.
"""

from pathlib import Path

import torch
from torch import Tensor

from splittime.kernels.api import Ops
from splittime.models import registry, rope
from splittime.models.config import ModelConfig
from splittime.models.decoder import Decoder
from splittime.models.layers import Attention, DecoderLayer, MixtureOfExperts, Mlp
from splittime.models.weights.checkpoint import Checkpoint


def load_decoder(
    folder: Path, config: ModelConfig, ops: Ops, dtype: torch.dtype, num_positions: int
) -> tuple[Decoder, int]:
    """The decoder and its number of parameters (as stored: a tied head is not counted again).

    num_positions: how many positions to make rotary turns for. Raises `ConfigError` naming a tensor that does not fit.
    """
    checkpoint = Checkpoint(folder, dtype)
    embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_Layer(checkpoint, config, ops, index).build() for index in range(config.num_layers))
    final_norm = ops.pack_norm(checkpoint.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    head = _head(checkpoint, config, embedding)
    checkpoint.check_all_taken()
    turns = rope.turns(config.rope, config.head_dim, num_positions)
    decoder = Decoder(config, ops, embedding, turns, layers, final_norm, ops.pack_linear(head, None))
    return decoder, checkpoint.num_parameters


def _head(checkpoint: Checkpoint, config: ModelConfig, embedding: Tensor) -> Tensor:
    if config.tie_word_embeddings:
        checkpoint.skip("lm_head.weight")  # some exports store the tied tensor twice
        return embedding
    return checkpoint.take("lm_head.weight", config.vocab_size, config.hidden_size)


def pair_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the first dimension, [heads * head_dim, ...], within each head: halves become neighbouring pairs."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


class _Layer:
    """Takes the tensors of one layer and packs them."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, index: int) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.ops = ops
        self.index = index
        self.prefix = f"model.layers.{index}."

    def build(self) -> DecoderLayer:
        moe = self.config.moe
        mlp = self._experts() if moe is not None and moe.layers[self.index] else self._plain_mlp()
        return DecoderLayer(
            self.ops, self._norm("input_layernorm"), self._attention(), self._norm("post_attention_layernorm"), mlp
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(self.prefix + name, *shape)

    def _norm(self, name: str) -> object:
        return self.ops.pack_norm(self._take(f"{name}.weight", self.config.hidden_size), self.config.rms_norm_eps)

    def _projection(self, name: str, rows: int, columns: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        bias = self._take(f"{name}.bias", rows) if has_bias else None
        return self._take(f"{name}.weight", rows, columns), bias

    def _attention(self) -> Attention:
        config, dim = self.config, self.config.head_dim
        rows = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
        parts = {
            name: self._projection(f"self_attn.{name}_proj", size, config.hidden_size, config.qkv_bias)
            for name, size in rows.items()
        }
        for name in ("q", "k"):
            weight, bias = parts[name]
            parts[name] = pair_rows(weight, dim), None if bias is None else pair_rows(bias, dim)
        output = self._projection("self_attn.o_proj", config.hidden_size, rows["q"], config.output_bias)
        return Attention(
            ops=self.ops,
            qkv=self._pack_together(list(parts.values())),
            output=self.ops.pack_linear(*output),
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
            pair_rows(self._take(f"self_attn.{name}_norm.weight", config.head_dim), config.head_dim)
            for name in ("q", "k")
        )
        scales = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        return self.ops.pack_norm(scales, config.rms_norm_eps)

    def _pack_together(self, parts: list[tuple[Tensor, Tensor | None]]) -> object:
        biases = [bias for _, bias in parts if bias is not None]
        return self.ops.pack_linear(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)

    def _plain_mlp(self) -> Mlp:
        config = self.config
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return self._mlp(names, config.intermediate_size, config.mlp_bias)

    def _mlp(self, names: tuple[str, str, str], inner: int, has_bias: bool) -> Mlp:
        hidden = self.config.hidden_size
        gate, up = (self._projection(name, inner, hidden, has_bias) for name in names[:2])
        down = self._projection(names[2], hidden, inner, has_bias)
        return Mlp(self.ops, self._pack_together([gate, up]), self.ops.pack_linear(*down))

    def _experts(self) -> MixtureOfExperts:
        moe, names = self.config.moe, registry.find(self.config.architecture).moe
        assert moe is not None
        assert names is not None
        router = self._take(f"{names.block}.gate.weight", moe.num_experts, self.config.hidden_size)
        experts = []
        for number in range(moe.num_experts):
            place = f"{names.block}.experts.{number}."
            tensors = (place + names.gate, place + names.up, place + names.down)
            experts.append(self._mlp(tensors, moe.intermediate_size, False))
        packed = self.ops.pack_linear(router, None)
        return MixtureOfExperts(self.ops, packed, tuple(experts), moe.num_experts_per_tok, moe.normalises)
