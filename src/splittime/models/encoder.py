"""An encoder of BERT's kind: embed, layers with a norm behind each part, each token's output.

It holds weights and nothing else. Texts come one behind the other, without padding: products are those of all tokens at
once, and attention is computed text by text, so that what a text becomes does not depend on whose texts are beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.layer import PackedWeight
from splittime.kernels.plain import gelu
from splittime.models.decoder_encoder import DecoderEncoder, read_decoder
from splittime.models.encoder_config import EncoderConfig
from splittime.models.encoder_parts import EncoderReader, JudgingHead, LayerNorm
from splittime.models.modern_encoder import ModernEncoder, ModernReader

UNREAD = ("embeddings.position_ids", "embeddings.token_type_ids")  # buffers that old exports carry


@dataclass(frozen=True)
class EncoderLayer:
    """projection: to queries, keys and values."""

    projection: PackedWeight
    output: PackedWeight
    attention_norm: LayerNorm
    up: PackedWeight
    down: PackedWeight
    norm: LayerNorm


@dataclass(frozen=True)
class TextEncoder:
    """Holds the weights. words, positions, types: tables of embeddings, as they are stored. head: None where it judges
    nothing."""

    config: EncoderConfig
    ops: Ops
    words: Tensor
    positions: Tensor
    types: Tensor
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    num_parameters: int
    unused_tensors: tuple[str, ...]
    head: JudgingHead | None = None

    def forward(self, texts: Sequence[Sequence[int]], *, are_pairs: bool = False) -> tuple[Tensor, ...]:
        """texts: token ids, at least one each -> for each text the last layer's outputs, float32 [tokens, hidden].
        are_pairs: each is two texts, and the separator that stands behind both tells the second from the first."""
        sizes = [len(text) for text in texts]
        hidden = torch.cat([self._embedded(torch.tensor(text), are_pairs) for text in texts])
        hidden = self.norm(hidden.to(self.ops.activation_dtype))
        for layer in self.layers:
            hidden = layer.attention_norm(self.ops.linear(self._attended(layer, hidden, sizes), layer.output, hidden))
            inner = gelu(self.ops.linear(hidden, layer.up), self.config.gelu)
            hidden = layer.norm(self.ops.linear(inner, layer.down, hidden))
        return hidden.float().split(sizes)

    def _embedded(self, token_ids: Tensor, is_pair: bool) -> Tensor:
        words = self.words.index_select(0, token_ids).float()
        places = self.positions.index_select(0, self._places(token_ids)).float()
        return words + places + self.types.index_select(0, self._kinds(token_ids, is_pair)).float()

    def _kinds(self, token_ids: Tensor, is_pair: bool) -> Tensor:
        """Returns 1 for tokens of a second text, where the model has that kind, else 0."""
        if not is_pair or self.config.padding is not None or self.config.num_types < 2:
            return torch.zeros_like(token_ids)
        ends = (token_ids == token_ids[-1]).long()
        return (ends.cumsum(0) - ends).clamp(max=1)

    def _places(self, token_ids: Tensor) -> Tensor:
        """Returns the number of each token's position; a token that is padding has that of padding."""
        padding = self.config.padding
        if padding is None:
            return torch.arange(len(token_ids))
        counts = token_ids != padding
        return counts.cumsum(0) * counts + padding

    def _attended(self, layer: EncoderLayer, hidden: Tensor, sizes: list[int]) -> Tensor:
        heads = self.ops.linear(hidden, layer.projection).unflatten(1, (3, self.config.num_heads, -1))
        made = [
            functional.scaled_dot_product_attention(*text.permute(1, 2, 0, 3).unsqueeze(1))
            for text in heads.split(sizes)
        ]
        return torch.cat([each[0].transpose(0, 1).flatten(1) for each in made]).contiguous()


AnyEncoder = TextEncoder | ModernEncoder | DecoderEncoder


def load_encoder(folder: Path, config: EncoderConfig, ops: Ops, scheme: WeightScheme) -> AnyEncoder:
    """Reads the weights. Raises `ConfigError` naming a tensor that does not fit."""
    if config.decoder is not None:
        return read_decoder(folder, config, ops, scheme)
    kind = ModernReader if config.modern else _Reader
    return kind(folder, config, ops, scheme).encoder()


class _Reader(EncoderReader):
    """Reads a checkpoint of BERT's names."""

    first = "embeddings.word_embeddings.weight"

    def encoder(self) -> TextEncoder:
        config, width = self.config, self.config.hidden_size
        layers = tuple(self._layer(number) for number in range(config.num_layers))
        tables = (
            self._table("word", config.vocab_size, width),
            self._table("position", config.num_positions, width),
            self._table("token_type", config.num_types, width),
        )
        norm = self.norm("embeddings.LayerNorm")
        for name in UNREAD:
            self.source.skip(self.prefix + name)
        head = self._head() if config.is_judge else None
        unused = tuple(self.source.not_taken())
        return TextEncoder(config, self.ops, *tables, norm, layers, self.source.num_parameters, unused, head)

    def _head(self) -> JudgingHead:
        width, is_bert = self.config.hidden_size, self.config.padding is None
        dense = f"{self.prefix}pooler.dense" if is_bert else "classifier.dense"
        output = "classifier" if is_bert else "classifier.out_proj"
        return JudgingHead(self._product(dense, width, width), self._product(output, 1, width))

    def _product(self, name: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        weight = self.source.take(f"{name}.weight", out_features, in_features)
        return weight.float().clone(), self.source.take(f"{name}.bias", out_features).float().clone()

    def _layer(self, number: int) -> EncoderLayer:
        place, width, inner = f"encoder.layer.{number}.", self.config.hidden_size, self.config.inner_size
        own = [f"{place}attention.self.{name}" for name in ("query", "key", "value")]
        return EncoderLayer(
            projection=self.linear(own, width, width),
            output=self.linear([f"{place}attention.output.dense"], width, width),
            attention_norm=self.norm(f"{place}attention.output.LayerNorm"),
            up=self.linear([f"{place}intermediate.dense"], inner, width),
            down=self.linear([f"{place}output.dense"], width, inner),
            norm=self.norm(f"{place}output.LayerNorm"),
        )

    def _table(self, name: str, num_rows: int, width: int) -> Tensor:
        return self.take(f"embeddings.{name}_embeddings.weight", num_rows, width)
