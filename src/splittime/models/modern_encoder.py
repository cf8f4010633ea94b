"""An encoder of ModernBERT's kind: a norm before each part, gated feed-forward parts, positions as turns of queries and
keys, and layers that attend to all tokens between layers that attend to those nearby."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from splittime.kernels.api import Ops
from splittime.kernels.layer import PackedWeight
from splittime.kernels.plain import gelu
from splittime.models.encoder_config import EncoderConfig, ModernLayer
from splittime.models.encoder_parts import EncoderReader, JudgingHead, LayerNorm

LEAST_CHUNK = 64  # queries of a text at once, where they attend to what is nearby
Turns = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GatedLayer:
    """projection: to queries, keys and values. attention_norm: None in the first layer. up: to what is activated, and
    to its gate."""

    kind: ModernLayer
    attention_norm: LayerNorm | None
    projection: PackedWeight
    output: PackedWeight
    norm: LayerNorm
    up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True)
class ModernEncoder:
    """words: the table of embeddings, as it is stored. It judges nothing."""

    config: EncoderConfig
    ops: Ops
    words: Tensor
    norm: LayerNorm
    layers: tuple[GatedLayer, ...]
    last_norm: LayerNorm
    num_parameters: int
    unused_tensors: tuple[str, ...]
    head: JudgingHead | None = None

    def forward(self, texts: Sequence[Sequence[int]], *, are_pairs: bool = False) -> tuple[Tensor, ...]:
        """texts: token ids, at least one each -> for each text the last layer's outputs, float32 [tokens, hidden].
        are_pairs: makes no difference here."""
        sizes = [len(text) for text in texts]
        hidden = self.norm(self.words[torch.tensor([token for text in texts for token in text])].float())
        hidden = hidden.to(self.ops.activation_dtype)
        places = torch.cat([torch.arange(size) for size in sizes]).float()
        head_size = self.config.hidden_size // self.config.num_heads
        turns = {theta: _turns(places, theta, head_size) for theta in {layer.kind.theta for layer in self.layers}}
        for layer in self.layers:
            inner = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
            attended = self._attended(layer, inner, sizes, turns[layer.kind.theta])
            hidden = self.ops.linear(attended, layer.output, hidden)
            given, gate = self.ops.linear(layer.norm(hidden), layer.up).chunk(2, dim=-1)
            gated = gelu(given, self.config.gelu) * gate
            hidden = self.ops.linear(gated, layer.down, hidden)
        return self.last_norm(hidden).float().split(sizes)

    def _attended(self, layer: GatedLayer, hidden: Tensor, sizes: list[int], turns: Turns) -> Tensor:
        heads = self.ops.linear(hidden, layer.projection).unflatten(1, (3, self.config.num_heads, -1))
        heads = torch.cat([_turned(heads[:, :2], turns), heads[:, 2:]], dim=1)
        made = [mixed(text.permute(1, 2, 0, 3), layer.kind.window) for text in heads.split(sizes)]
        return torch.cat([each.transpose(0, 1).flatten(1) for each in made]).contiguous()


def _turns(places: Tensor, theta: float, head_size: int) -> Turns:
    """Returns cosine and sine of each token's turns, [tokens, 1, 1, head_size]."""
    angles = places[:, None] / theta ** (torch.arange(0, head_size, 2).float() / head_size)
    return angles.cos().repeat(1, 2)[:, None, None], angles.sin().repeat(1, 2)[:, None, None]


def _turned(heads: Tensor, turns: Turns) -> Tensor:
    """heads: [tokens, any, heads, size]; the halves of each head are the two coordinates of its turns."""
    cosine, sine = turns
    first, second = heads.float().chunk(2, dim=-1)
    return (heads.float() * cosine + torch.cat([-second, first], dim=-1) * sine).to(heads.dtype)


def mixed(text: Tensor, window: int | None) -> Tensor:
    """text: [3, heads, tokens, size], queries, keys and values -> [heads, tokens, size]. window: tokens to each side
    that a token attends to; None: all. What lies beyond is not computed, whatever the text's length."""
    queries, keys, values = text.unsqueeze(1)
    num_tokens = text.shape[2]
    if window is None or num_tokens <= window + 1:
        return functional.scaled_dot_product_attention(queries, keys, values)[0]
    chunk, parts = max(window, LEAST_CHUNK), []
    for begin in range(0, num_tokens, chunk):
        end = min(begin + chunk, num_tokens)
        near = slice(max(0, begin - window), min(num_tokens, end + window))
        is_near = (torch.arange(begin, end)[:, None] - torch.arange(near.start, near.stop)).abs() <= window
        of = queries[:, :, begin:end], keys[:, :, near], values[:, :, near]
        parts.append(functional.scaled_dot_product_attention(*of, attn_mask=is_near)[0])
    return torch.cat(parts, dim=1)


class ModernReader(EncoderReader):
    """Reads a checkpoint of ModernBERT's names."""

    first = "embeddings.tok_embeddings.weight"

    def encoder(self) -> ModernEncoder:
        config = self.config
        layers = tuple(self._layer(number, kind) for number, kind in enumerate(config.modern))
        words = self.take("embeddings.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        norms = self.norm("embeddings.norm"), self.norm("final_norm")
        counted = self.source.num_parameters, tuple(self.source.not_taken())
        return ModernEncoder(config, self.ops, words, norms[0], layers, norms[1], *counted)

    def _layer(self, number: int, kind: ModernLayer) -> GatedLayer:
        place, width, inner = f"layers.{number}.", self.config.hidden_size, self.config.inner_size
        return GatedLayer(
            kind=kind,
            attention_norm=self.norm(f"{place}attn_norm") if number else None,
            projection=self.linear([f"{place}attn.Wqkv"], 3 * width, width),
            output=self.linear([f"{place}attn.Wo"], width, width),
            norm=self.norm(f"{place}mlp_norm"),
            up=self.linear([f"{place}mlp.Wi"], 2 * inner, width),
            down=self.linear([f"{place}mlp.Wo"], width, inner),
        )
