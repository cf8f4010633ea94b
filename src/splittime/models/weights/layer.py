"""One decoder layer from its tensors: their names, and which projections become one product.

The rows of each query and key head are reordered from halves to neighbouring pairs (`load` says why), unless the source
has them so.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from splittime.kernels import layer
from splittime.kernels.api import Ops, WeightScheme
from splittime.kernels.plain import LayerNorm
from splittime.models.architectures import layer_names
from splittime.models.config import ModelConfig
from splittime.models.names import LayerNames, MlpNames
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.packing import Packer, WeightRows
from splittime.models.weights.source import rows_of


def norm_scale(packer: Packer, names: LayerNames, module: str, *shape: int) -> Tensor:
    """Returns the scale of a norm, a copy."""
    scale = packer.source.take(f"{module}.weight", *shape)
    return (scale.float() + 1 if names.norms_less_one else scale).to(packer.ops.activation_dtype, copy=True)


def pack_norm(ops: Ops, spec: layer.NormSpec, scale: Tensor, bias: Tensor | None = None) -> layer.PackedNorm:
    if not spec.is_centred:
        return ops.pack_norm(scale, spec.eps)
    wide = None if bias is None else bias.to(ops.device, torch.float32, copy=True)
    return LayerNorm(scale.to(ops.device, torch.float32), wide, spec.eps)


def take_norm(packer: Packer, config: ModelConfig, spec: layer.NormSpec, module: str) -> layer.PackedNorm:
    """Returns a norm of the residual stream."""
    scale = norm_scale(packer, layer_names(config.architecture), module, config.hidden_size)
    bias = packer.source.take(f"{module}.bias", config.hidden_size) if spec.has_bias else None
    return pack_norm(packer.ops, spec, scale, bias)


BEFORE, AFTER = ("mixer_norm", "feed_forward_norm"), ("norm_after_mixer", "norm_after_feed_forward")
NORMS = {"before": BEFORE, "after": AFTER, "both": BEFORE + AFTER, "shared": BEFORE[:1]}
"""Of `LayerWeights`, by the places that a layer has them in."""


class HeadNorms(NamedTuple):
    """Norms of each head or of all together, and what turned queries are multiplied by: see `AttentionWeights`."""

    of_each: layer.PackedNorm | None = None
    of_all: tuple[layer.PackedNorm, layer.PackedNorm] | None = None
    query_factors: Tensor | None = None


class Rows(NamedTuple):
    """Rows of a product, and of its bias if it has one."""

    weight: WeightRows
    bias: WeightRows | None

    def part(self, begin: int, end: int, head_dim: int) -> "Rows":
        """head_dim: as `WeightRows` has it."""

        def cut(rows: WeightRows) -> WeightRows:
            return replace(rows, content=rows_of(rows.content, begin, end), head_dim=head_dim)

        return Rows(cut(self.weight), None if self.bias is None else cut(self.bias))

    def by_kind(self, sizes: Sequence[int], head_dims: Sequence[int] = ()) -> list[list["Rows"]]:
        """Returns the rows of each kind, head by head, of which a head has so many, one kind below the other."""
        begins, dims = range(0, self.weight.shape[0], sum(sizes)), head_dims or (0,) * len(sizes)
        kinds = zip(sizes, accumulate(sizes), dims, strict=True)
        return [[self.part(begin + end - size, begin + end, dim) for begin in begins] for size, end, dim in kinds]


class LayerBuilder:
    """Takes the tensors of one layer and packs them."""

    def __init__(self, packer: Packer, config: ModelConfig, plan: WeightPlan, index: int, prefix: str = "") -> None:
        """prefix: of its tensors' names, where it is no layer of the model's trunk."""
        self.packer = packer
        self.config, self.spec = config, config.layers[index]
        self.hidden_size = config.hidden_size
        self.names = layer_names(config.architecture)
        self.ops = packer.ops
        self.plan = plan
        self.index = index
        self.prefix = prefix or f"model.layers.{index}."

    def build(self) -> layer.LayerWeights:
        spec, mixer, names, norm = self.spec.feed_forward, self.spec.mixer, self.names, self.spec.norm
        has_factor = names.factor and not self.config.layer_input_size  # else it is behind the layer's own input
        modules = names.input_norm, names.mlp_norm, names.norm_after_mixer, names.norm_after_mlp
        norms = {
            key: take_norm(self.packer, self.config, norm, self.prefix + module)
            for key, module in zip(BEFORE + AFTER, modules, strict=True)
            if key in NORMS[self.spec.places]
        }
        return layer.LayerWeights(
            spec=self.spec,
            feed_forward=self._mlp(names.mlp, spec) if isinstance(spec, layer.MlpSpec) else self._mixture(spec),
            mixer=self._delta(mixer) if isinstance(mixer, layer.DeltaSpec) else self._attention(mixer),
            factor=self._take_small(names.factor, 1).item() if has_factor else 1.0,
            **{**dict.fromkeys(BEFORE), **norms},
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.packer.source.take(self.prefix + name, *shape)

    def _rows(self, name: str, rows: int, columns: int, head_dim: int = 0, *, has_bias: bool) -> Rows:
        module, source = self.prefix + name, self.packer.source
        dims = (0 if self.names.rows_are_paired or source.rows_are_paired(module) else head_dim, self._turned_dims)
        weight = WeightRows(source.take_linear(module, rows, columns), *dims)
        return Rows(weight, WeightRows(self._take(f"{name}.bias", rows), *dims) if has_bias else None)

    @property
    def _turned_dims(self) -> int:
        """Returns how many elements of a head are in pairs; where none are, their order does not matter."""
        mixer = self.spec.mixer
        return mixer.position.turned_dims(mixer.head_dim) if isinstance(mixer, layer.AttentionSpec) else 0

    def _pack(
        self,
        *projections: tuple[str, int, int],
        has_bias: bool,
        kind: str = "layers",
        is_expert: bool = False,
        is_finer: bool = False,
    ) -> layer.PackedWeight:
        """These projections (name, rows, columns) as one weight, one below the other. kind: of `packing.KINDS`.
        is_finer: in the finer scheme of the plan."""
        found = [self._rows(*each, has_bias=has_bias) for each in projections]
        schemes = [self.plan.finer if is_finer else getattr(self.plan, kind)] * len(found)
        return self._packed(projections[0][0], found, schemes, kind, is_expert)

    def _packed(
        self,
        name: str,
        rows: Sequence[Rows],
        schemes: Sequence[WeightScheme],
        kind: str = "layers",
        is_expert: bool = False,
    ) -> layer.PackedWeight:
        """schemes: of each of `rows`, where they are floats."""
        parts = [replace(one.weight, scheme=scheme) for one, scheme in zip(rows, schemes, strict=True)]
        biases = [one.bias for one in rows if one.bias is not None]
        return self.packer.linear(self.prefix + name, parts, biases, getattr(self.plan, kind), kind, is_expert)

    def _attention(self, spec: layer.AttentionSpec) -> layer.AttentionWeights:
        names, hidden, plan, width = self.names, self.hidden_size, self.plan, spec.query_width
        norms = HeadNorms() if spec.head_norm is None else self._head_norms(spec, spec.head_norm)
        value = names.key if spec.keys_are_values else names.value
        biased = {"has_bias": spec.qkv_bias}
        queries, gates = [self._rows(names.query, (1 + spec.is_gated) * width, hidden, spec.head_dim, **biased)], []
        if spec.is_gated:
            queries, gates = queries[0].by_kind((spec.head_dim,) * 2, (queries[0].weight.head_dim, 0))
        keys, values = [], []
        if spec.keys_of is None:
            keys = [self._rows(names.key, spec.kv_width, hidden, spec.head_dim, **biased)]
            values = [self._rows(value, spec.kv_width, hidden, **biased)]
        schemes = [plan.layers] * len(queries + keys) + [plan.finer] * len(values)
        return layer.AttentionWeights(
            spec=spec,
            qkv=self._packed(names.query, queries + keys + values, schemes),
            output=self._pack((names.output, hidden, width), has_bias=spec.output_bias),
            head_norm=norms.of_each,
            all_norms=norms.of_all,
            query_factors=norms.query_factors,
            value_norm=None if spec.value_norm is None else self._unscaled(spec.value_norm, spec.head_dim),
            sinks=self._take_small(names.sinks, spec.num_heads) if spec.has_sinks else None,
            gate=self._packed(f"{names.query}.gate", gates, [plan.layers] * len(gates)) if spec.is_gated else None,
        )

    def _delta(self, spec: layer.DeltaSpec) -> layer.DeltaWeights:
        """Strengths and decays stay floats, as a router does: they are a hundredth of the weights, and what they do to
        a state stays in it. Published 8-bit checkpoints of Qwen3-Next except them too."""
        names, heads, (wide, small) = self.names.delta, spec.num_value_heads, self._delta_rows(spec)
        schemes = [self.plan.layers] * len(wide) + [self.plan.router] * len(small)
        return layer.DeltaWeights(
            spec=spec,
            products=self._packed(names.qkv, wide + small, schemes),
            output=self._pack((names.output, self.hidden_size, spec.inner), has_bias=False),
            conv=self._take_small(f"{names.conv}.weight", spec.channels, 1, spec.conv_width).view(spec.channels, -1),
            decay=-self._take_small(names.log_decay, heads).exp(),
            dt_bias=self._take_small(names.dt_bias, heads),
            norm=self._take_small(f"{names.norm}.weight", spec.value_dim),
        )

    def _delta_rows(self, spec: layer.DeltaSpec) -> tuple[list[Rows], list[Rows]]:
        """Returns those of queries, keys, values and gate, and those of strengths and decays."""
        names, heads = self.names.delta, spec.num_value_heads
        if not names.by_head:
            sizes = {names.qkv: spec.channels, names.gate: spec.inner, names.strength: heads, names.decay: heads}
            rows = [self._rows(name, size, self.hidden_size, has_bias=False) for name, size in sizes.items()]
            return rows[:2], rows[2:]
        sharing = heads // spec.num_key_heads
        keys, values = [spec.key_dim] * 2, [sharing * spec.value_dim] * 2
        all_wide = self._rows(names.qkv, spec.channels + spec.inner, self.hidden_size, has_bias=False)
        all_small = self._rows(names.strength, 2 * heads, self.hidden_size, has_bias=False)
        kinds = all_wide.by_kind(keys + values), all_small.by_kind((sharing, sharing))
        wide, small = (list(chain.from_iterable(each)) for each in kinds)
        return wide, small

    def _unscaled(self, norm: layer.NormSpec, size: int) -> layer.PackedNorm:
        return pack_norm(self.ops, norm, torch.ones(size, dtype=self.ops.activation_dtype, device=self.ops.device))

    def _take_small(self, name: str, *shape: int) -> Tensor:
        """Returns a small tensor in one line, such as a number for each head or expert; a copy."""
        return self._take(name, *shape).flatten().to(self.ops.device, torch.float32, copy=True)

    def _head_norms(self, spec: layer.AttentionSpec, norm: layer.NormSpec) -> HeadNorms:
        """Returns what `AttentionWeights` has of them. Of each head: one scale for queries and keys together,
        [num_heads + num_kv_heads, head_dim]. Behind the position, the scales of keys are put on the queries: what is
        kept is the same for both, and so are the scores."""
        names = self.names
        if spec.keys_of is not None:
            query = norm_scale(self.packer, names, self.prefix + names.query_norm, spec.head_dim)
            return HeadNorms(self.ops.pack_norm(self._paired(query, spec), norm.eps))
        apart = (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        found = {"all": ((spec.query_width,), (spec.kv_width,)), "apart": apart}
        shapes = found.get(spec.normed, ((spec.head_dim,),) * 2)
        query, key = (
            self._paired(norm_scale(self.packer, names, self.prefix + name, *shape).flatten(), spec).view(shape)
            for name, shape in zip((names.query_norm, names.key_norm), shapes, strict=True)
        )
        if spec.normed in found:
            return HeadNorms(of_all=(pack_norm(self.ops, norm, query), pack_norm(self.ops, norm, key)))
        factors = None
        if spec.normed == "turned":
            factors = (query * key).to(self.ops.device)
            query, key = torch.ones_like(query), torch.ones_like(key)
        together = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
        return HeadNorms(self.ops.pack_norm(together, norm.eps), query_factors=factors)

    def _paired(self, scales: Tensor, spec: layer.AttentionSpec) -> Tensor:
        head_dim = 0 if self.names.rows_are_paired else spec.head_dim
        return WeightRows(scales, head_dim, self._turned_dims).arranged()

    def _mlp(self, names: MlpNames, spec: layer.MlpSpec, is_expert: bool = False) -> layer.MlpWeights:
        hidden, inner, has_bias = self.hidden_size, spec.inner, spec.has_bias
        into = [(name, inner, hidden) for name in (names.gate, names.up)[not spec.is_gated :]]
        gate_up = self._pack(*into, has_bias=has_bias, is_expert=is_expert)
        down = self._pack((names.down, hidden, inner), has_bias=has_bias, is_expert=is_expert, is_finer=True)
        return layer.MlpWeights(spec, gate_up, down)

    def _mixture(self, spec: layer.MixtureSpec) -> layer.MixtureWeights:
        names, router, hidden = self.names, spec.router, self.hidden_size
        gate, corrections = (names.shared_gate, 1, hidden), (*names.correction_dims, router.num_experts)
        return layer.MixtureWeights(
            spec=router,
            router=self._pack((names.router, router.num_experts, hidden), has_bias=router.has_bias, kind="router"),
            experts=tuple(self._mlp(one, spec.expert, True) for one in names.mlps(spec)),
            correction=self._take_small(names.correction, *corrections) if router.is_corrected else None,
            shared=None if spec.shared is None else self._mlp(names.shared, spec.shared),
            shared_gate=self._pack(gate, has_bias=False, kind="router") if spec.gates_shared else None,
            norms=self._apart_norms() if spec.is_apart else None,
            shares=self._take_small(names.shares, router.num_experts) if spec.is_apart else None,
        )

    def _apart_norms(self) -> layer.ApartNorms:
        """The router's scale is divided by the root of the width, and so may be stored: see `Gemma4TextRouter`."""
        names, norm, hidden = self.names, self.spec.norm, self.hidden_size
        scale = self._take_small(names.router_scale, hidden) * hidden**-0.5
        router = pack_norm(self.ops, norm, scale.to(self.ops.activation_dtype))
        others = (names.experts_norm, names.norm_after_shared, names.norm_after_experts)
        taken = (take_norm(self.packer, self.config, norm, self.prefix + module) for module in others)
        return layer.ApartNorms(router, *taken)
