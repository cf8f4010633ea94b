"""Building the decoder from a checkpoint: names, fused projections, and the order of rotary pairs.

Fused at load: q, k, v into one product, gate and up into one. The rows of each query and key head are reordered from
halves (i, i + D/2) to neighbours (2i, 2i + 1), the order in which `Ops.rope_write` turns them; a dot product of a query
and a key does not change when both are reordered alike, and neither does the RMS norm of a head.

The checkpoint stays mapped; what is packed comes through `packing`, norms and biases are copied, and the embedding
table remains a view of the file, of which only the rows that are looked up are ever read. What a checkpoint's files are
and which of its weights are integers already is the `source`'s business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splittime.kernels.api import Ops
from splittime.models import registry, rope
from splittime.models.config import ModelConfig
from splittime.models.decoder import Decoder
from splittime.models.layers import Attention, DecoderLayer, MixtureOfExperts, Mlp
from splittime.models.quant.plan import INTEGERS, WeightPlan
from splittime.models.weights.cache import PackedCache, open_cache
from splittime.models.weights.packed_file import PackedFileBroken
from splittime.models.weights.packing import Packer, Rows, pair_rows
from splittime.models.weights.source import PLAIN, Source, open_source
from splittime.models.weights.stored import StoredWeight

EMBEDDING = "model.embed_tokens"
OnLayer = Callable[[int, int, int], None]  # layers done, of how many, bytes of packed weights so far


@dataclass(frozen=True)
class Loaded:
    """num_parameters: as stored, a tied head is not counted again. weights_bytes: of packed weights, in memory;
    embedding_bytes: of the table, in the file. cache_story: what became of the cache of packed weights. weights: in
    which schemes they are, told in one line; plan: the same as a plan, of which layers in several schemes have the one
    that most bytes are in."""

    decoder: Decoder
    num_parameters: int
    weights_bytes: int
    embedding_bytes: int
    cache_story: str
    weights: str
    plan: WeightPlan


def load_decoder(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    plan: WeightPlan,
    num_positions: int,
    cache_folder: Path | None = None,
    on_layer: OnLayer = lambda done, total, num_bytes: None,
) -> Loaded:
    """path: what `open_source` takes. num_positions: how many positions to make rotary turns for. Raises `ConfigError`
    naming a tensor that does not fit."""
    cache, story = _cache(open_source(path, config), config, ops, plan, cache_folder)
    while True:
        source = open_source(path, config)
        try:
            packer = Packer(ops, source, cache)
            decoder = _Model(packer, config, plan, on_layer).build(num_positions)
            source.check_all_taken()
            break
        except PackedFileBroken as error:
            assert cache is not None
            cache.remake(str(error))
        except BaseException:
            if cache is not None:
                cache.abandon()
            raise
    if cache is not None:
        cache.close()
        story = cache.story
    found = packer.found
    told = plan.describe(config.moe is not None) if source.format == PLAIN else found.describe(source.format)
    return Loaded(
        decoder=decoder,
        num_parameters=source.num_parameters,
        weights_bytes=found.num_bytes,
        embedding_bytes=decoder.embedding.nbytes,
        cache_story=story,
        weights=told,
        plan=found.plan(plan),
    )


def _cache(
    source: Source, config: ModelConfig, ops: Ops, plan: WeightPlan, folder: Path | None
) -> tuple[PackedCache | None, str]:
    """The cache, or why there is none."""
    if folder is None:
        return None, "off"
    if source.format == PLAIN and plan.layers.name not in INTEGERS:
        return None, f"not for {plan.layers.name}, which is packed as fast as it is read"
    if ops.packed_bytes(16, 64, plan.layers) is None:
        return None, f"not with {ops.name} kernels"
    cache = open_cache(folder, source, config, plan)
    return cache, "failed"


class _Model:
    """Takes the tensors of the whole decoder, the largest first: nothing else is in memory yet when the head passes."""

    def __init__(self, packer: Packer, config: ModelConfig, plan: WeightPlan, on_layer: OnLayer) -> None:
        self.packer = packer
        self.config = config
        self.plan = plan
        self.on_layer = on_layer

    def build(self, num_positions: int) -> Decoder:
        config, ops, source = self.config, self.packer.ops, self.packer.source
        embedding = source.take_table(EMBEDDING, config.vocab_size, config.hidden_size)
        head = self.packer.linear("lm_head", [Rows(self._head())], [], self.plan.head, "head")
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = source.take("model.norm.weight", config.hidden_size).to(ops.activation_dtype, copy=True)
        turns = rope.turns(config.rope, config.head_dim, num_positions)
        return Decoder(config, ops, embedding, turns, layers, ops.pack_norm(norm, config.rms_norm_eps), head)

    def _layer(self, index: int) -> DecoderLayer:
        layer = _Layer(self.packer, self.config, self.plan, index).build()
        self.on_layer(index + 1, self.config.num_layers, self.packer.found.num_bytes)
        return self.packer.ops.fuse_layer(layer) or layer

    def _head(self) -> Tensor | StoredWeight:
        source, config = self.packer.source, self.config
        if config.tie_word_embeddings:
            source.skip("lm_head.weight")  # some exports store the tied tensor twice
        module = EMBEDDING if config.tie_word_embeddings else "lm_head"
        return source.take_linear(module, config.vocab_size, config.hidden_size)


class _Layer:
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

    def _pack(self, *projections: tuple[str, int, int], has_bias: bool, head_dims: tuple[int, ...] = ()) -> object:
        """These projections (name, rows, columns) as one weight, one below the other."""
        dims = head_dims or (0,) * len(projections)
        parts = [self._take_linear(*projection, dim) for projection, dim in zip(projections, dims, strict=True)]
        biases = [
            Rows(self._take(f"{name}.bias", rows), part.head_dim)
            for (name, rows, _), part in zip(projections, parts, strict=True)
            if has_bias
        ]
        return self.packer.linear(self.prefix + projections[0][0], parts, biases, self.plan.layers)

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

    def _mlp(self, names: tuple[str, str, str], inner: int, has_bias: bool) -> Mlp:
        hidden, (gate, up, down) = self.config.hidden_size, names
        gate_up = self._pack((gate, inner, hidden), (up, inner, hidden), has_bias=has_bias)
        return Mlp(self.ops, gate_up, self._pack((down, hidden, inner), has_bias=has_bias))

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
                self._mlp((own + names.gate, own + names.up, own + names.down), moe.intermediate_size, False)
            )
        packed = self.packer.linear(self.prefix + place, [router], [], self.plan.router, "router")
        return MixtureOfExperts(self.ops, packed, tuple(experts), moe.num_experts_per_tok, moe.normalises)
