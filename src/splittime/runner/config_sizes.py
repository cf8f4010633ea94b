"""What a model takes of any machine, from its `config.json` alone: nothing is loaded, so the model need not be here.

Weights are counted as they are kept where no backend pads them (`models.quant.plan.kept_bytes`). KV bytes per token are
2 x layers x KV heads x head dimension x bytes of a number, with the scales that int8 has beside it.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.kernels.api import WeightScheme
from splittime.kernels.layer import LayerSpec, MixtureSpec, kv_groups
from splittime.models.config import ModelConfig, load_config, parse_config
from splittime.models.fields import read_json
from splittime.models.quant.plan import QUANTIZATIONS, WeightPlan, choose, kept_bytes
from splittime.runner.cost import cost
from splittime.runner.kv_store import bytes_per_block

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


def sizes_of_config(path: Path, precision: str | None = None, kv_precision: str | None = None) -> ModelSizes:
    """Returns what the model of this folder or `config.json` takes. precision: of the weights, None: as the checkpoint
    has them. kv_precision: of keys and values, None: 16 bits, or 32 as the weights have. Raises ConfigError for a model
    that cannot be served, and for a precision that there is not."""
    model = load_config(path) if path.is_dir() else parse_config(read_json(path))
    name = precision or _own_precision(model)
    plain = name if name in PLAIN else "bfloat16"
    _require(name, PRECISIONS, "precision")
    _require(kv_precision or plain, tuple(KV_DTYPES), "kv_precision")
    plan = choose(None if name in PLAIN else name, plain)
    table_bytes = model.vocab_size * model.hidden_size * getattr(torch, plain).itemsize
    packed_bytes = _packed_bytes(model, plan)
    kv_bytes = bytes_per_block(kv_groups(model.layers), 1, KV_DTYPES[kv_precision or plain])
    shares_table = model.tie_word_embeddings and plan.head.name == plain
    return ModelSizes(
        cost(model, plan, Unpadded(), packed_bytes, kv_bytes),
        packed_bytes + (0 if shares_table else table_bytes),
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


def _packed_bytes(model: ModelConfig, plan: WeightPlan) -> int:
    """Returns the bytes of all that is multiplied: the layers' weights and the head's."""
    head = kept_bytes(model.vocab_size, model.hidden_size, plan.head)
    return head + sum(_layer_bytes(layer, model.hidden_size, plan) for layer in model.layers)


def _layer_bytes(layer: LayerSpec, hidden: int, plan: WeightPlan) -> int:
    mixer, part = layer.mixer, layer.feed_forward
    attention = kept_bytes(mixer.query_width + 2 * mixer.kv_width, hidden, plan.layers)
    attention += kept_bytes(hidden, mixer.query_width, plan.layers)
    mlp = part.expert if isinstance(part, MixtureSpec) else part
    mlp_bytes = kept_bytes(2 * mlp.inner, hidden, plan.layers) + kept_bytes(hidden, mlp.inner, plan.layers)
    if not isinstance(part, MixtureSpec):
        return attention + mlp_bytes
    return attention + part.router.num_experts * mlp_bytes + kept_bytes(part.router.num_experts, hidden, plan.router)
