"""Putting the new checkpoint together in the work folder: weights in shards, config.json, and the files beside it.

`config.json` gets the fields that transformers, vLLM and others read: compressed-tensors' `QuantizationConfig`,
GPTQModel's and AutoAWQ's quantization_config. `desc_act` says that columns must be put in another order at run time,
which static groups need not; vLLM 0.32 refuses it. The head and the routers of experts stay as they are and are named
where the format has a place for it. A pruned checkpoint is an ordinary dense one: its note tells people, no loader
needs it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splittime import __version__
from splittime.lab.quantize import gptq, layer_map, tensor_file
from splittime.lab.quantize.layer_map import QuantizeSource
from splittime.lab.quantize.layouts import LAYOUTS
from splittime.lab.quantize.settings import WHOLE_ROW, QuantizeSettings
from splittime.lab.quantize.tensor_file import TensorEntry
from splittime.lab.quantize.work import Work
from splittime.models.config import ModelConfig
from splittime.models.weights.shard_files import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 4 << 30
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SPARSITY_KEY = "splittime_sparsity"
COPIED_PATTERNS = ("LICENSE*", "NOTICE*")


def assemble(source: QuantizeSource, work: Work, settings: QuantizeSettings, shard_bytes: int = SHARD_BYTES) -> None:
    """Fill the folder that `Work.finish` renames; raises `ConfigError` where it cannot be written."""
    try:
        folder = work.begin_result()
        _write_weights(source, work, folder, shard_bytes)
        tensor_file.write_json(folder / "config.json", _with_note(source.values, source.config, settings))
        for path in _beside(source.folder):
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise tensor_file.unwritable(work.folder, error) from error


def _write_weights(source: QuantizeSource, work: Work, folder: Path, shard_bytes: int) -> None:
    entries = list(source.outer_entries())
    for index in range(source.config.num_layers):
        entries += work.layer_entries(index)
    shards = list(_shards(entries, shard_bytes))
    if len(shards) == 1:
        tensor_file.write(folder / SINGLE_NAME, shards[0])
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        tensor_file.write(folder / name, shard)
    places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for entry in entries)
    tensor_file.write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    )


def _shards(entries: list[TensorEntry], limit: int) -> Iterator[list[TensorEntry]]:
    """As many tensors in a file as stay within the limit, at least one."""
    shard: list[TensorEntry] = []
    taken_bytes = 0
    for entry in entries:
        if shard and taken_bytes + entry.num_bytes > limit:
            yield shard
            shard, taken_bytes = [], 0
        shard.append(entry)
        taken_bytes += entry.num_bytes
    yield shard


def _beside(folder: Path) -> Iterator[Path]:
    for pattern in (*COPIED, *COPIED_PATTERNS):
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _with_note(values: dict[str, Any], config: ModelConfig, settings: QuantizeSettings) -> dict[str, Any]:
    """Returns the values of the old config.json with a note of the resolved settings."""
    if settings.scheme is None:
        note = {"pattern": settings.prune, "sparsity": settings.sparsity, "metric": settings.metric, "layout": "dense"}
        return {**values, SPARSITY_KEY: note}
    return {**values, "quantization_config": _quantization(config, settings, settings.scheme)}


def _quantization(config: ModelConfig, settings: QuantizeSettings, scheme: str) -> dict[str, Any]:
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


def _scheme(settings: QuantizeSettings, scheme: str) -> dict[str, Any]:
    is_whole = settings.group_size == WHOLE_ROW
    kind = "float" if scheme == "fp8" else "int"
    weights = _arguments(settings.bits or 0, kind, "channel" if is_whole else "group", is_dynamic=False)
    weights["group_size"] = None if is_whole else settings.group_size
    activations = _arguments(8, kind, "token", is_dynamic=True) if scheme in ("w8a8", "fp8") else None
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}


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
