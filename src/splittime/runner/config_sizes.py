"""What a model takes of any machine, from its `config.json` alone: nothing is loaded, so the model need not be here.

Weights are counted as they are kept where no backend pads them (`models.quant.plan.kept_bytes`). KV bytes per token are
2 x layers x KV heads x head dimension x bytes of a number, with the scales that int8 has beside it.

What a step of this model needs of the machine at the least, from its shape and from its packed weights as they lie.

Left out, each well under a per cent of a step: norms, rotary turns, activations, the rows of the embedding that are
looked up, and the arithmetic of everything that is not a product. Of a mixture of experts one token's experts count:
a step of several tokens reads more, how many more depends on the text.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.kernels.api import WeightScheme
from splittime.kernels.layer import AttentionSpec, DeltaSpec, LayerSpec, MixtureSpec, kv_groups, mlps_of, state_floats
from splittime.models.config import ModelConfig, load_config, parse_config
from splittime.models.fields import read_json
from splittime.models.quant.plan import QUANTIZATIONS, WeightPlan, choose, kept_bytes
from splittime.runner.kv_store import bytes_per_block


class PackedSizes(Protocol):
    """What `Ops` says of the size of weights."""

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> int | None:
        """Returns the size of a packed weight, None where it is not known to differ from `kept_bytes`."""


def cost(
    model: ModelConfig, plan: WeightPlan, sizes: PackedSizes, weights_bytes: int, kv_bytes_per_token: int
) -> TokenCost:
    """weights_bytes: of all packed weights, the head's and every expert's among them."""
    products = [part for layer in model.layers for part in (layer.mixer, layer.feed_forward)]
    of_inputs = 3 * model.num_layers * model.layer_input_size * model.hidden_size
    routers = [layer.feed_forward.router for layer in model.layers if isinstance(layer.feed_forward, MixtureSpec)]
    idle_expert_bytes = sum(_idle_expert_bytes(layer, model.hidden_size, plan, sizes) for layer in model.layers)
    return TokenCost(
        weight_bytes=weights_bytes - idle_expert_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        operations_per_token=2 * (sum(part.num_weights(model.hidden_size) for part in products) + of_inputs),
        operations_per_context_token=4 * sum(mixer.query_width for mixer in model.attention),
        head_bytes=_bytes(sizes, model.vocab_size, model.hidden_size, plan.head),
        operations_per_sample=2 * model.vocab_size * model.hidden_size,
        window_tokens=max(model.windows, default=None),
        windowed_share=len(model.windows) / model.num_layers,
        idle_expert_bytes=idle_expert_bytes,
        num_experts=routers[0].num_experts if routers else 0,
        chosen_experts=routers[0].num_chosen if routers else 0,
        state_bytes=torch.float32.itemsize * sum(state_floats(model.layers)),
    )


def _idle_expert_bytes(layer: LayerSpec, hidden_size: int, plan: WeightPlan, sizes: PackedSizes) -> int:
    """Returns the bytes of the experts that one token does not choose."""
    part = layer.feed_forward
    if not isinstance(part, MixtureSpec):
        return 0
    gate_up = _bytes(sizes, part.expert.outputs, hidden_size, plan.layers)
    down = _bytes(sizes, hidden_size, part.expert.inner, plan.finer)
    return (part.router.num_experts - part.router.num_chosen) * (gate_up + down)


def _bytes(sizes: PackedSizes, out_features: int, in_features: int, scheme: WeightScheme) -> int:
    return sizes.packed_bytes(out_features, in_features, scheme) or kept_bytes(out_features, in_features, scheme)


PLAIN = ("bfloat16", "float16", "float32")
PRECISIONS = (*PLAIN, *QUANTIZATIONS)
KV_DTYPES = {**{name: getattr(torch, name) for name in PLAIN}, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class ModelSizes(NamedTuple):
    """weights_bytes: of memory, the embedding's and every expert's among them. max_model_len: that the model was made
    for. precision: of `PRECISIONS`."""

    cost: TokenCost
    weights_bytes: int
    max_model_len: int
    precision: str


class Unpadded:
    """`PackedSizes` of nobody's kernels."""

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> None:
        return None


def sizes_of_config(
    path: Path, precision: str | None = None, kv_precision: str | None = None, *, is_card: bool = False
) -> ModelSizes:
    """Returns what the model of this folder or `config.json` takes. precision: of the weights, None: as the checkpoint
    has them. kv_precision: of keys and values, None: 16 bits, or 32 as the weights have. is_card: on a
    card. Raises ConfigError for a model that cannot be served, and for a precision that there is not."""
    model = load_config(path) if path.is_dir() else parse_config(read_json(path))
    name = precision or _own_precision(model)
    plain = name if name in PLAIN else "bfloat16"
    _require(name, PRECISIONS, "precision")
    _require(kv_precision or plain, tuple(KV_DTYPES), "kv_precision")
    plan = choose(None if name in PLAIN else name, plain, has_finer=not is_card)
    each_bytes, hidden = model.vocab_size * getattr(torch, plain).itemsize, model.hidden_size
    size, num_layers = model.layer_input_size, model.num_layers
    table_bytes, inputs_bytes = each_bytes * hidden, each_bytes * num_layers * size
    packed_bytes = kept_bytes(model.vocab_size, hidden, plan.head)
    packed_bytes += sum(_layer_bytes(layer, hidden, plan) for layer in model.layers)
    if size:
        packed_bytes += kept_bytes(size * num_layers, hidden, plan.layers)
        packed_bytes += num_layers * (kept_bytes(size, hidden, plan.layers) + kept_bytes(hidden, size, plan.layers))
    kv_bytes = bytes_per_block(kv_groups(model.layers), 1, KV_DTYPES[kv_precision or plain])
    shares_table = model.tie_word_embeddings and plan.head.name == plain
    return ModelSizes(
        cost(model, plan, Unpadded(), packed_bytes, kv_bytes),
        packed_bytes + inputs_bytes + (0 if shares_table else table_bytes),
        model.max_position_embeddings,
        name,
    )


def _own_precision(model: ModelConfig) -> str:
    if model.quantization is not None:
        hint = f"Name its precision: {', '.join(QUANTIZATIONS)}."
        raise ConfigError("the checkpoint is quantised in a format of its own", param="precision", hint=hint)
    return model.checkpoint_dtype


def _require(name: str, known: tuple[str, ...], param: str) -> None:
    if name not in known:
        hint = f"Known: {', '.join(known)}."
        raise ConfigError(f"{param} {name!r} is not known", param=param, value=name, hint=hint)


def _layer_bytes(layer: LayerSpec, hidden: int, plan: WeightPlan) -> int:
    mixer, part = layer.mixer, layer.feed_forward
    mixed = _mixer_bytes(mixer, hidden, plan)
    each, *shared = (
        kept_bytes(mlp.outputs, hidden, plan.layers) + kept_bytes(hidden, mlp.inner, plan.finer)
        for mlp in mlps_of(part)
    )
    if not isinstance(part, MixtureSpec):
        return mixed + each
    routed = kept_bytes(part.router.num_experts + part.gates_shared, hidden, plan.router)
    return mixed + part.router.num_experts * each + sum(shared) + routed


def _mixer_bytes(mixer: AttentionSpec | DeltaSpec, hidden: int, plan: WeightPlan) -> int:
    if isinstance(mixer, DeltaSpec):
        num_bytes = kept_bytes(mixer.channels + mixer.inner, hidden, plan.layers)
        num_bytes += kept_bytes(2 * mixer.num_value_heads, hidden, plan.router)
        return num_bytes + kept_bytes(hidden, mixer.inner, plan.layers)
    queries = mixer.query_width * (1 + mixer.is_gated)
    num_bytes = kept_bytes(queries + mixer.own_kv_width, hidden, plan.layers)
    num_bytes += kept_bytes(mixer.own_kv_width, hidden, plan.finer)
    return num_bytes + kept_bytes(hidden, mixer.query_width, plan.layers)
