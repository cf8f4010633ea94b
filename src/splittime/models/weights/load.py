"""Building the decoder from a checkpoint: names, fused projections, and the order of rotary pairs.

Fused at load: q, k, v into one product, gate and up into one. The rows of each query and key head are reordered from
halves (i, i + D/2) to neighbours (2i, 2i + 1), the order in which `Ops.rope_write` turns them; a dot product of a query
and a key does not change when both are reordered alike, and neither does the RMS norm of a head.

The checkpoint stays mapped; what is packed comes through `packing`, norms and biases are copied, and the embedding
table remains a view of the file, of which only the rows that are looked up are ever read. What a checkpoint's files are
and which of its weights are integers already is the `source`'s business.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splittime.kernels.api import NotFused, Ops, RunnableLayer
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import LayerWeights, PackedWeight
from splittime.models import rope
from splittime.models.architectures import layer_names
from splittime.models.config import ModelConfig, load_config
from splittime.models.decoder import Decoder, positions_of
from splittime.models.gguf.checkpoint import GgufCheckpoint
from splittime.models.gguf.config import load_gguf_config
from splittime.models.layer_inputs import LayerInput, LayerInputs
from splittime.models.quant.plan import INTEGERS, WeightPlan
from splittime.models.ranks import Ranks, SharedLayer
from splittime.models.weights.cache import PackedCache, open_cache
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.layer import LayerBuilder, norm_scale, pack_norm, take_norm
from splittime.models.weights.packed_file import PackedFileBroken
from splittime.models.weights.packing import Packer, WeightRows
from splittime.models.weights.shards import CutSource, own_config
from splittime.models.weights.source import PLAIN, DummySource, JoinedSource, Source, StoredWeight, Table

GGUF_SUFFIX = ".gguf"


def open_source(path: Path, config: ModelConfig) -> Source:
    """Opens a folder with safetensors, or a .gguf file. Cheap: no weight is read."""
    names = layer_names(config.architecture)
    if is_gguf(path):
        return joined(GgufCheckpoint(path, names), config)
    return joined(Checkpoint(path, config.quantization, names.place_of), config)


def joined(source: Source, config: ModelConfig) -> Source:
    names = layer_names(config.architecture)
    return JoinedSource(source, names, config.layers) if names.qkv or names.gate_up else source


def read_config(path: Path, generation: str = "auto") -> ModelConfig:
    """Reads the config of either: `config.json`, or the file's own metadata. generation: what to take of
    what its makers advise, see `models.config`."""
    return load_gguf_config(path, generation) if is_gguf(path) else load_config(path, generation)


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


log = logging.getLogger("splittime.weights")

EMBEDDING = "model.embed_tokens"
SHOWN_TENSORS = 5
OnLayer = Callable[[int, int, int], None]  # layers done, of how many, bytes of packed weights so far


@dataclass(frozen=True)
class Loaded:
    """num_parameters: as stored, a tied head is not counted again. weights_bytes: of packed weights, in memory;
    embedding_bytes: of the table, in the file. cache_story: what became of the cache of packed weights. layers: whether
    each is one call of the backend. weights: in which schemes they are, told in one line; plan: the same as a plan, of
    which layers in several schemes have the one that most bytes are in. unused_tensors: what the checkpoint holds and
    this architecture has no place for."""

    decoder: Decoder
    num_parameters: int
    weights_bytes: int
    embedding_bytes: int
    cache_story: str
    layers: str
    weights: str
    plan: WeightPlan
    unused_tensors: tuple[str, ...]


def load_decoder(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    plan: WeightPlan,
    num_positions: int,
    cache_folder: Path | None = None,
    on_layer: OnLayer = lambda done, total, num_bytes: None,
    ranks: Ranks | None = None,
    is_dummy: bool = False,
) -> Loaded:
    """path: what `open_source` takes. num_positions: how many positions to make rotary turns for. ranks: those that
    share the model, of which this one's part is made. is_dummy: random weights, none are read. Raises `ConfigError`
    naming a tensor that does not fit."""
    own = config if ranks is None else own_config(config, ranks)

    def opened() -> Source:
        dtype = getattr(torch, config.checkpoint_dtype)
        whole = joined(DummySource(dtype, ops.device), config) if is_dummy else open_source(path, config)
        return whole if ranks is None else CutSource(whole, config, ranks)

    cache, story = (None, "not of random weights") if is_dummy else _cache(opened(), own, ops, plan, cache_folder)

    def build(packer: Packer) -> Decoder:
        return _Model(packer, own, plan, on_layer, ranks).build(num_positions)

    decoder, packer = _read(opened, ops, cache, build)
    source = packer.source
    if cache is not None:
        cache.close()
        story = cache.story
    found = packer.found
    told = plan.describe(config.has_routers) if source.format == PLAIN else found.describe(source.format)
    return Loaded(
        decoder=decoder,
        num_parameters=source.num_parameters,
        weights_bytes=found.num_bytes,
        embedding_bytes=decoder.embedding.nbytes + (decoder.inputs.table.nbytes if decoder.inputs else 0),
        cache_story=story,
        layers=_told_layers(decoder.layers),
        weights=told,
        plan=found.plan(plan),
        unused_tensors=_not_taken(source),
    )


def runnable(ops: Ops, weights: LayerWeights) -> RunnableLayer:
    """Returns the layer as one call of the backend, or part by part."""
    fused = ops.fuse(weights)
    return ComposedLayer(ops, weights, fused.reason) if isinstance(fused, NotFused) else fused


def _told_layers(layers: Sequence[RunnableLayer]) -> str:
    """As in "fused", or "4 fused, 12 as parts: " and why."""
    reasons = Counter(layer.parts_reason for layer in layers)
    whole = reasons.pop("", 0)
    told = [f"{count} as parts: {reason}" for reason, count in reasons.items()]
    return ", ".join([f"{whole} fused"] * bool(whole) + told) if told else "fused"


def _not_taken(source: Source) -> tuple[str, ...]:
    """The first few by name, with a warning: most are another tool's leavings, but one may belong to the arithmetic."""
    left = source.not_taken()
    if not left:
        return ()
    told = (*left[:SHOWN_TENSORS], *([f"and {len(left) - SHOWN_TENSORS} more"] if len(left) > SHOWN_TENSORS else []))
    said = "%d tensors of the checkpoint are unknown to this architecture and not used: %s"
    log.warning(said, len(left), ", ".join(told))
    return told


def _read(
    opened: Callable[[], Source], ops: Ops, cache: PackedCache | None, build: Callable[[Packer], Decoder]
) -> tuple[Decoder, Packer]:
    """Once, or again where the cache turns out to be broken."""
    while True:
        packer = Packer(ops, opened(), cache)
        try:
            decoder = build(packer)
            return decoder, packer
        except PackedFileBroken as error:
            assert cache is not None
            cache.remake(str(error))
        except BaseException:
            if cache is not None:
                cache.abandon()
            raise


def _cache(
    source: Source, config: ModelConfig, ops: Ops, plan: WeightPlan, folder: Path | None
) -> tuple[PackedCache | None, str]:
    """The cache, or why there is none."""
    if folder is None:
        return None, "off"
    if source.format == PLAIN and plan.layers.name not in INTEGERS:
        return None, f"not for {plan.layers.name}, which is packed as fast as it is read"
    if config.quantization is not None and config.quantization.scales:
        return None, "not for fp8, which is packed as fast as it is read"
    if ops.packed_bytes(16, 64, plan.layers) is None:
        return None, f"not with {ops.name} kernels"
    cache = open_cache(folder, source, config, plan)
    return cache, "failed"


def _on_device(table: Tensor | Table, config: ModelConfig, ops: Ops) -> Tensor | Table:
    """On the CPU it stays in the file's mapping, of which only the rows that are looked up come into memory."""
    if ops.device.type == "cpu":
        return table
    rows = table if isinstance(table, Tensor) else table.look_up(torch.arange(config.vocab_size))
    return rows.to(ops.device, ops.activation_dtype)


@dataclass(frozen=True)
class _Model:
    """Takes the tensors of the whole decoder, the largest first: nothing else is in memory yet when the head passes."""

    packer: Packer
    config: ModelConfig
    plan: WeightPlan
    on_layer: OnLayer
    ranks: Ranks | None

    def build(self, num_positions: int) -> Decoder:
        config, ops, source = self.config, self.packer.ops, self.packer.source
        embedding = _on_device(source.take_table(EMBEDDING, config.vocab_size, config.hidden_size), config, ops)
        head = self.packer.linear("lm_head", [WeightRows(self._head())], [], self.plan.head, "head")
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        turns = {kind: rope.turns(*kind, num_positions).to(ops.device) for kind in positions_of(config.layers)}
        final_norm = take_norm(self.packer, config, config.norm, "model.norm")
        inputs = self._inputs() if config.layer_input_size else None
        return Decoder(config, ops, embedding, turns, layers, final_norm, head, self.ranks, inputs)

    def _inputs(self) -> LayerInputs:
        config, packer, size, norm = self.config, self.packer, self.config.layer_input_size, self.config.norm
        width, hidden, names = size * config.num_layers, config.hidden_size, layer_names(config.architecture)

        def product(name: str, *shape: int) -> PackedWeight:
            rows = WeightRows(packer.source.take_linear(name, *shape))
            return packer.linear(name, [rows], [], self.plan.layers, "layers")

        def one(prefix: str) -> LayerInput:
            return LayerInput(
                product(f"{prefix}per_layer_input_gate", size, hidden),
                product(f"{prefix}per_layer_projection", hidden, size),
                take_norm(packer, config, norm, f"{prefix}post_per_layer_input_norm"),
                packer.source.take(prefix + names.factor, 1).item(),
            )

        table = packer.source.take_table("model.embed_tokens_per_layer", config.vocab_size, width)
        scale = norm_scale(packer, names, "model.per_layer_projection_norm", size)
        return LayerInputs(
            ops=packer.ops,
            size=size,
            table=_on_device(table, config, packer.ops),
            table_factor=torch.tensor(size**0.5).to(getattr(torch, config.checkpoint_dtype)).item(),
            projection=product("model.per_layer_model_projection", width, hidden),
            norm=pack_norm(packer.ops, norm, scale),
            layers=tuple(one(f"model.layers.{layer}.") for layer in range(config.num_layers)),
        )

    def _layer(self, index: int) -> RunnableLayer:
        ops, weights = self.packer.ops, LayerBuilder(self.packer, self.config, self.plan, index).build()
        self.on_layer(index + 1, self.config.num_layers, self.packer.found.num_bytes)
        return SharedLayer(ops, weights, self.ranks) if self.ranks is not None else runnable(ops, weights)

    def _head(self) -> Tensor | StoredWeight:
        source, config = self.packer.source, self.config
        if config.tie_word_embeddings:
            source.skip("lm_head.weight")  # some exports store the tied tensor twice
        module = EMBEDDING if config.tie_word_embeddings else "lm_head"
        return source.take_linear(module, config.vocab_size, config.hidden_size)
