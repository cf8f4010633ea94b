"""What the new `config.json` says of its weights: the fields that transformers, vLLM and others read.

compressed-tensors' `QuantizationConfig`, GPTQModel's and AutoAWQ's quantization_config. `desc_act` says that columns
must be put in another order at run time, which static groups need not; vLLM 0.32 refuses it. The head and the routers
of experts stay as they are and are named where the format has a place for it. A pruned checkpoint is an ordinary dense
one: its note tells people, no loader needs it.
"""

from typing import Any

from splittime import __version__
from splittime.models.config import ModelConfig
from splittime.quantize import gptq, layer_map
from splittime.quantize.layouts import LAYOUTS
from splittime.quantize.settings import WHOLE_ROW, Settings

SPARSITY_KEY = "splittime_sparsity"


def noted(values: dict[str, Any], config: ModelConfig, settings: Settings) -> dict[str, Any]:
    """The values of the old config.json with the note of resolved settings."""
    if settings.scheme is None:
        note = {"pattern": settings.prune, "sparsity": settings.sparsity, "metric": settings.metric, "layout": "dense"}
        return {**values, SPARSITY_KEY: note}
    return {**values, "quantization_config": _quantization(config, settings, settings.scheme)}


def _quantization(config: ModelConfig, settings: Settings, scheme: str) -> dict[str, Any]:
    routers = _routers(config)
    if scheme == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "desc_act": settings.act_order and not settings.static_groups,
            "static_groups": settings.static_groups,
            "sym": True,
            "true_sequential": True,
            "damp_percent": gptq.DAMPING,
            "lm_head": False,
            "meta": {"quantizer": [f"splittime:{__version__}"]},
        }
    if scheme == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "zero_point": True,
            "modules_to_not_convert": routers or None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[scheme],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *routers],
        "config_groups": {"group_0": _scheme(settings, scheme)},
    }


def _scheme(settings: Settings, scheme: str) -> dict[str, Any]:
    is_whole = settings.group_size == WHOLE_ROW
    kind = "float" if scheme == "fp8" else "int"
    weights = _arguments(settings.bits or 0, kind, "channel" if is_whole else "group", is_dynamic=False)
    weights["group_size"] = None if is_whole else settings.group_size
    activations = _arguments(8, kind, "token", is_dynamic=True) if scheme in ("w8a8", "fp8") else None
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def _arguments(bits: int, kind: str, strategy: str, is_dynamic: bool) -> dict[str, Any]:
    """compressed-tensors' `QuantizationArgs`."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": is_dynamic,
        "actorder": None,
        "block_structure": None,
        "observer": None if is_dynamic else "minmax",
        "observer_kwargs": {},
    }


def _routers(config: ModelConfig) -> list[str]:
    found = ((index, layer_map.router(config, index)) for index in range(config.num_layers))
    return [layer_map.layer_prefix(index) + name for index, name in found if name is not None]
