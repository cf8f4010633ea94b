"""GGUF files from safetensors folders, written with llama.cpp's own `gguf` package: its names, its writer, its blocks.

A matrix is written as it is, or replaced by random blocks of a type. Then the folder's own matrix is replaced by what
the package says these blocks mean, so that both files hold the same model to the last bit.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), "llama"),
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


SCALES = {
    "Q4_0": {0: 0.013},
    "Q4_1": {0: 0.013, 2: -0.1},
    "Q5_0": {0: 0.0065},
    "Q5_1": {0: 0.0065, 2: -0.1},
    "Q8_0": {0: 8e-4},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 4.4e-5},
}
"""Where in a block its scales are, and how large: so that weights come out with a standard deviation of about 0.06."""


def write(folder: Path, path: Path, kind: str = "F32", **metadata: Any) -> None:
    """The checkpoint in `folder` as the file `path`, its matrices of type `kind`; more metadata by its key."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    tensors = load_file(folder / "model.safetensors")
    blocks = _replace_by_blocks(tensors, kind) if kind not in ("F32", "F16") else {}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, config)
    for key, value in metadata.items():
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    _add_tensors(writer, tensors, blocks, config, architecture, kind)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Any bits for the integers, but scales as trained weights have them: uint8 [rows, bytes of a row]."""
    quant = gguf.GGMLQuantizationType[kind]
    values, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = rng.integers(0, 256, (shape[0], shape[1] // values, num_bytes), dtype=np.uint8)
    for place, size in SCALES[kind].items():
        scales = (rng.uniform(0.5, 1.5, raw.shape[:2]) * size).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def _replace_by_blocks(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """The blocks by name; routers stay floats, as converters leave them."""
    rng, blocks = np.random.default_rng(0), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.endswith((".mlp.gate.weight", "block_sparse_moe.gate.weight")):
            blocks[name] = random_blocks(rng, tensor.shape, kind)
            tensors[name] = gguf.quants.dequantize(blocks[name], gguf.GGMLQuantizationType[kind])
    return blocks


def _describe(writer: Any, config: dict[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("sliding_window") and config["architectures"][0] in ("MistralForCausalLM", "MixtralForCausalLM"):
        writer.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])


def _add_tensors(
    writer: Any, tensors: dict[str, np.ndarray], blocks: dict[str, np.ndarray], config: Any, arch: str, kind: str
) -> None:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, tensor in tensors.items():
        content = blocks.get(name, tensor)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            content = _neighbours(content, heads)
        if ".experts." in name:
            before, after = name.split(".experts.")
            number, own = after.split(".", 1)
            stacks[names.get_name(f"{before}.experts.{own}", try_suffixes=(".weight",)) or ""][int(number)] = content
        else:
            _add(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), content, name in blocks, kind)
    for name, stack in stacks.items():
        _add(writer, name, np.stack([stack[number] for number in sorted(stack)]), bool(blocks), kind)


def _add(writer: Any, name: str, content: np.ndarray, is_blocks: bool, kind: str) -> None:
    assert name
    if is_blocks:
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
    else:
        writer.add_tensor(name, content.astype(np.float16 if kind == "F16" and content.ndim > 1 else np.float32))


def _neighbours(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order within each head of queries and keys: value i beside value i + D / 2."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Llama 3.1's scaling as numbers by which each frequency is divided: transformers' frequencies say which."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**config), "cpu")[0].numpy()
    exponents = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    return (rope["rope_theta"] ** -exponents / scaled).astype(np.float32)
