"""An encoder made of a decoder's layers, each of whose tokens attends to those before and behind it (EmbeddingGemma).

The layers are the decoder's own, part by part, on the backend's operations, but for attention: of whole texts, without
a cache. A window of `n` tokens is of the nearest: `n // 2` to each side, as transformers reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from splittime.kernels.api import AttentionPlan, LayerKv, Ops, WeightScheme, own
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import PackedNorm, PackedWeight, Weighing
from splittime.kernels.plain import turned
from splittime.models import rope
from splittime.models.decoder import Decoder, positions_of
from splittime.models.encoder_config import EncoderConfig
from splittime.models.encoder_parts import JudgingHead
from splittime.models.modern_encoder import mixed
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.layer import LayerBuilder
from splittime.models.weights.load import EMBEDDING, open_source, take_norm
from splittime.models.weights.packing import Packer

NOTHING = LayerKv(torch.empty(0), None)


@dataclass(frozen=True)
class HeadNorm(PackedNorm):
    """scale: [heads, head_dim]."""

    scale: Tensor
    eps: float


@dataclass
class Texts(AttentionPlan):
    """sizes: tokens of each text. reach: those to each side that a token attends to; None: all. keys_and_values: of the
    layer in hand, [tokens, 2 heads, head_dim]."""

    sizes: list[int]
    num_kv_heads: int
    reach: int | None
    keys_and_values: Tensor = field(default_factory=lambda: torch.empty(0))


class WholeTexts:
    """A backend's operations, but for attention: of whole texts, to all sides."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def pack_norm(self, weight: Tensor, eps: float) -> PackedNorm:
        return self._ops.pack_norm(weight, eps) if weight.dim() == 1 else HeadNorm(weight.float(), eps)

    def rope_write(
        self, qkv: Tensor, head_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        """Turns queries and keys in place; keys and values stay where they are until the layer's attention."""
        texts = own(plan, Texts)
        heads = qkv[:, : -texts.num_kv_heads].float()
        if head_norm is not None:
            norm = own(head_norm, HeadNorm)
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + norm.eps) * norm.scale
        qkv[:, : -texts.num_kv_heads] = turned(heads, turns)
        texts.keys_and_values = qkv[:, -2 * texts.num_kv_heads :]

    def attention(self, q: Tensor, kv: LayerKv, plan: AttentionPlan, weighing: Weighing) -> Tensor:
        texts = own(plan, Texts)
        keys, values = texts.keys_and_values.unflatten(1, (2, texts.num_kv_heads)).unbind(1)
        sharing, factor = q.shape[1] // texts.num_kv_heads, weighing.scale * q.shape[2] ** 0.5
        heads = torch.stack([q * factor, *(one.repeat_interleave(sharing, dim=1) for one in (keys, values))])
        made = [mixed(text.transpose(1, 2), texts.reach) for text in heads.split(texts.sizes, dim=1)]
        return torch.cat([each.transpose(0, 1).flatten(1) for each in made]).contiguous()


@dataclass(frozen=True)
class DecoderEncoder:
    """An encoder of a decoder's layers. It judges nothing."""

    config: EncoderConfig
    ops: Ops
    decoder: Decoder
    num_parameters: int
    unused_tensors: tuple[str, ...]
    head: JudgingHead | None = None

    @property
    def words(self) -> Tensor:
        """The table of embeddings, as it is stored."""
        return cast(Tensor, self.decoder.embedding)

    def forward(self, texts: Sequence[Sequence[int]], *, are_pairs: bool = False) -> tuple[Tensor, ...]:
        """texts: token ids, at least one each -> for each text the last layer's outputs, float32 [tokens, hidden].
        are_pairs: makes no difference here."""
        sizes = [len(text) for text in texts]
        hidden = self.decoder.embedded(torch.tensor([token for text in texts for token in text]))
        positions = torch.cat([torch.arange(size) for size in sizes])
        plans = [
            Texts(sizes, group.num_kv_heads, None if group.window_tokens is None else group.window_tokens // 2)
            for group in self.decoder.kv_groups
        ]
        stores = [NOTHING] * len(self.decoder.layers)
        return self.decoder.normed(self.decoder.through(hidden, positions, stores, plans)).float().split(sizes)


def read_decoder(folder: Path, config: EncoderConfig, ops: Ops, scheme: WeightScheme) -> DecoderEncoder:
    """Raises `ConfigError` naming a tensor that does not fit."""
    model = config.decoder
    assert model is not None
    packer = Packer(cast(Ops, WholeTexts(ops)), open_source(folder, model), None)
    plan = WeightPlan(scheme, scheme, scheme, scheme)
    words = packer.source.take_table(EMBEDDING, model.vocab_size, model.hidden_size)

    def layer(index: int) -> ComposedLayer:
        weights = LayerBuilder(packer, model, plan, index).build()
        return ComposedLayer(packer.ops, weights, "every token attends to every other")

    layers = tuple(layer(index) for index in range(model.num_layers))
    turns = {kind: rope.turns(*kind, config.num_positions) for kind in positions_of(model.layers)}
    norm = take_norm(packer, model, model.norm, "model.norm")
    decoder = Decoder(model, packer.ops, words, turns, layers, norm, PackedWeight())
    source = packer.source
    return DecoderEncoder(config, ops, decoder, source.num_parameters, tuple(source.not_taken()))
