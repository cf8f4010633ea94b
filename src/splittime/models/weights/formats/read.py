"""The formats under one door: what a config says, and one weight by its module's name."""

from collections.abc import Iterable
from typing import Any

from splittime.core.errors import ConfigError
from splittime.models.weights.formats import awq, compressed, fp8, gptq, mxfp4
from splittime.models.weights.formats.awq import AwqWeight
from splittime.models.weights.formats.compressed import CompressedWeight
from splittime.models.weights.formats.floats import FloatWeight
from splittime.models.weights.formats.gptq import GptqWeight
from splittime.models.weights.formats.mxfp4 import Mxfp4Weight
from splittime.models.weights.formats.recipe import KEY, Recipe, Tensors, refuse
from splittime.models.weights.formats.stored import GroupedWeight

FORMATS: dict[str, Any] = {module.METHOD: module for module in (awq, gptq, fp8, compressed, mxfp4)}
WEIGHTS: dict[str, type[Any]] = {
    **{awq.METHOD: AwqWeight, gptq.METHOD: GptqWeight},
    **{compressed.METHOD: CompressedWeight, mxfp4.METHOD: Mxfp4Weight},
}
FileWeight = GroupedWeight | FloatWeight | Mxfp4Weight
LAYERS = "model.layers."
OLD_KEY, DEFAULT_METHOD = "compression_config", compressed.METHOD  # as compressed-tensors wrote it before 0.5

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Scales of keys and values, measured beforehand. No cache of ours wants them: each token and head has its own."""

ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate", ".mlp.router", ".block_sparse_moe.gate", ".block_sparse_moe.router")

SIDE_FILES = {"quantize_config.json": gptq.METHOD, "quant_config.json": awq.METHOD}


def is_quantised(config: dict[str, Any]) -> bool:
    return (config.get(KEY) or config.get(OLD_KEY)) is not None


def parse(config: dict[str, Any]) -> Recipe | None:
    """From a whole config.json; None for one that is not quantised. Raises `ConfigError` for what is not supported."""
    values = config.get(KEY) or config.get(OLD_KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise refuse("quant_method", values, ", ".join(FORMATS))
    method = values.get("quant_method", DEFAULT_METHOD if KEY not in config else None)
    if not isinstance(method, str) or method not in FORMATS:
        raise refuse("quant_method", method, ", ".join(FORMATS))
    recipe: Recipe = FORMATS[method].parse(values)
    return recipe


def _may_be_floats(module: str) -> bool:
    """Returns whether formats leave it unquantised without a word: the embedding, which is a tied head too, head and
    routers."""
    return module in ("model.embed_tokens", "lm_head") or module.endswith(ROUTERS)


def split(tensors: Tensors, names: Iterable[str], recipe: Recipe) -> tuple[list[str], list[str]]:
    """The layers' linear modules by the headers alone, of which `names` are tensors: those stored as the recipe says,
    and those that are floats."""
    modules = sorted({name.rpartition(".")[0] for name in names if name.startswith(LAYERS)})
    kept = [module for module in modules if FORMATS[recipe.method].is_stored(module, tensors)]
    floats = set(modules) - set(kept)
    return kept, sorted(module for module in floats if _is_linear(module, tensors) and not _may_be_floats(module))


def _is_linear(module: str, tensors: Tensors) -> bool:
    return len(tensors.shape_of(f"{module}.weight") or ()) == 2


def check_any(tensors: Tensors, names: Iterable[str], recipe: Recipe) -> None:
    """Raise `ConfigError` where not one weight is stored as the recipe says, although each may be excepted by name."""
    kept, floats = split(tensors, names, recipe)
    if floats and not kept:
        message = (
            f"weights: {KEY} says {recipe.method}, {recipe.bits} bits, and no weight in the files has them: "
            f"{floats[0]} and {len(floats) - 1} others are floats"
        )
        hint = f"take {KEY} out of config.json, or a checkpoint whose files are what its config says"
        raise ConfigError(message, param=floats[0], value=recipe.bits, hint=hint)


def take(tensors: Tensors, recipe: Recipe, module: str, out_features: int, in_features: int) -> FileWeight | None:
    """The weight of `module`; None where it was left unquantised. Raises `ConfigError` naming a tensor that is broken,
    that is quantised although the config excepts it, or that is not although the config promises it."""
    chosen = FORMATS[recipe.method]
    if not chosen.is_stored(module, tensors):
        place = tensors.place_of(module)
        is_float = f"{module}.weight" in tensors or (place is not None and place.tensor in tensors)
        if is_float and not _may_be_floats(module) and not chosen.is_excepted(module, recipe):
            message = f"weights: {module} is floats in the file, {KEY} says that it has {recipe.bits} bits"
            hint = f"name it in {KEY} as not quantised, or take a checkpoint whose files are what its config says"
            raise ConfigError(message, param=module, value=recipe.bits, hint=hint)
        return None
    if chosen.is_excepted(module, recipe):
        message = f"weights: {module} is quantised in the file, {KEY} says that it is not"
        raise ConfigError(message, param=module, value=list(recipe.exceptions))
    kind = FloatWeight if recipe.scales else WEIGHTS[recipe.method]
    weight: FileWeight = kind(tensors, module, recipe, out_features, in_features)
    return weight
