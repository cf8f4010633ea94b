"""Building a head (`models.head`) from a folder's tensors."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from splittime.core.errors import ConfigError
from splittime.kernels.layer import PackedNorm, PackedWeight
from splittime.models.config import ModelConfig
from splittime.models.decoder import Decoder, position_of
from splittime.models.head import PREFIX, HeadDecoder, HiddenFeatures
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.layer import LayerBuilder, take_norm
from splittime.models.weights.load import open_source, runnable
from splittime.models.weights.packing import Packer, WeightRows


def load_head(
    path: Path, config: ModelConfig, plan: WeightPlan, model: Callable[[], Decoder], features: HiddenFeatures
) -> HeadDecoder:
    """path, config: of the folder that has the head; model: returns the decoder that it is a head of. Raises
    `ConfigError` naming a tensor that is missing or does not fit."""
    whole, hidden_size = model(), config.hidden_size
    one, ops = head_config(config, whole.config), whole.ops
    if (position := position_of(one.layers[0].attention)) not in whole.turns:
        spec, dims = position
        kind = f"{spec.rope_type}, rope_theta {spec.theta:g}, heads of {dims}"
        said = f"no layer of the model has rotary positions as the head has them ({kind})"
        raise ConfigError(said, param="speculative_config", value=kind, hint="train a head for this model")
    packer = Packer(ops, open_source(path, config), None)
    source = packer.source

    def norm(name: str) -> PackedNorm:
        return take_norm(packer, config, config.norm, f"{PREFIX}{name}")

    joined = WeightRows(source.take_linear(f"{PREFIX}input_proj", hidden_size, 2 * hidden_size))
    return HeadDecoder(
        config=one,
        ops=ops,
        embedding=torch.empty(0),
        turns=whole.turns,
        layers=(runnable(ops, LayerBuilder(packer, one, plan, 0, PREFIX).build()),),
        final_norm=norm("final_layernorm"),
        head=PackedWeight(),
        model=model,
        features=features,
        feature_norm=norm("hidden_layernorm"),
        token_norm=norm("token_layernorm"),
        joined=packer.linear(f"{PREFIX}input_proj", [joined], [], plan.layers),
    )


def head_config(config: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Returns the config of a head: one layer, as the last of its folder's config. Raises `ConfigError` if it is no
    head of this model."""
    for name in ("hidden_size", "vocab_size"):
        found, wanted = getattr(config, name), getattr(model, name)
        if found != wanted:
            said = f"the head has {name} {found}, and the model {wanted}"
            raise ConfigError(said, param="speculative_config", value=found, limit=wanted, hint="train one for it")
    return msgspec.structs.replace(config, layers=config.layers[-1:])
