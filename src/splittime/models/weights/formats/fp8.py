"""`quant_method: fp8`: e4m3 as DeepSeek-V3 and Qwen3 publish it, in blocks; and as AutoFP8 wrote it, a scale a weight.

    weight             [out, in]                            float8_e4m3fn
    weight_scale_inv   [out / 128, in / 128, rounded up]    of blocks: what weights are multiplied by, whatever its name
    weight_scale       [] or [1]                            without weight_block_size
    input_scale        [] or [1]                            where activation_scheme is "static"

(github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; github.com/neuralmagic/AutoFP8.)
"""

from typing import Any

from splittime.models.fields import Fields
from splittime.models.weights.formats.floats import BLOCK
from splittime.models.weights.formats.recipe import Recipe, Tensors, is_excepted_by_parts, names, refuse, refuse_others

METHOD = "fp8"
ALLOWED: dict[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "float32"),
    "weight_block_size": ([BLOCK, BLOCK],),
    "kv_cache_scheme": ("static", "dynamic"),
    "dequantize": (False,),
}


def parse(values: dict[str, Any]) -> Recipe:
    fields = Fields(values, "quantization_config.")
    refuse_others(values, METHOD, ALLOWED)
    in_blocks = values.get("weight_block_size") is not None
    activations = values.get("activation_scheme", "dynamic")
    choices = ("dynamic",) if in_blocks else ("dynamic", "static")
    if activations not in choices:
        raise refuse("activation_scheme", activations, f"{' or '.join(map(repr, choices))} (of {METHOD})")
    return Recipe(
        method=METHOD,
        layout="blocks" if in_blocks else "tensors",
        bits=8,
        group_size=BLOCK if in_blocks else 0,
        symmetric=True,
        exceptions=names(fields, "modules_to_not_convert") + names(fields, "ignored_layers"),
        scales="block" if in_blocks else "tensor",
        scale_name="weight_scale_inv" if in_blocks else "weight_scale",
        has_input_scale=activations == "static",
        rounds_activations=True,
    )


is_excepted = is_excepted_by_parts


def is_stored(module: str, tensors: Tensors) -> bool:
    return any(f"{module}.{name}" in tensors for name in ("weight_scale_inv", "weight_scale")) or tensors.is_float8(
        f"{module}.weight"
    )
