"""GGUF files from safetensors folders, written with llama.cpp's own `gguf` package: its names, its writer, its blocks.

A matrix is written as it is, or replaced by random blocks of a type. Then the folder's own matrix is replaced by what
the package says these blocks mean, so that both files hold the same model to the last bit.
"""

import json
import math
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
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    **dict.fromkeys(("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"), "granite"),
    "GraniteMoeForCausalLM": "granitemoe",
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), "olmo2"),
    "OlmoeForCausalLM": "olmoe",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "SeedOssForCausalLM": "seed_oss",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Dots1ForCausalLM": "dots1",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "Ministral3ForCausalLM": "mistral3",
    "GptOssForCausalLM": "gpt-oss",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Starcoder2ForCausalLM": "starcoder2",
}
PAIRED = ("llama", "smollm3", "granite", "granitemoe", "mistral3")  # whose converter reorders queries and keys
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
WITHOUT_WINDOWS = ("qwen2", "qwen3", "qwen2moe", "qwen3moe", "smollm3", "dots1", "mistral3")
GROUPED = ("glm4moe", "dots1")
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
        if tensor.ndim == 2 and not name.endswith((".mlp.gate.weight", "block_sparse_moe.gate.weight", "_norm.weight")):
            blocks[name] = random_blocks(rng, tensor.shape, kind)
            tensors[name] = gguf.quants.dequantize(blocks[name], gguf.GGMLQuantizationType[kind])
    return blocks


def _describe(writer: Any, config: dict[str, Any]) -> None:
    architecture = ARCHITECTURES[config["architectures"][0]]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("shared_intermediate_size") or config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    _describe_rope(writer, config, architecture, head_dim)
    if config.get("sliding_window") and architecture not in WITHOUT_WINDOWS:
        writer.add_sliding_window(config["sliding_window"])
        if architecture in ("olmo2", "exaone4"):
            writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])
    names = {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for name, add in names.items():
        if config.get(name) is not None:
            add(config[name])
    _describe_experts(writer, config, architecture)


def _describe_rope(writer: Any, config: dict[str, Any], architecture: str, head_dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    kind, theta = rope.get("rope_type"), rope.get("rope_theta", 10_000.0)
    if kind == "dynamic":
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share or architecture in ("phi3", *PAIRED):
        writer.add_rope_dimension_count(int(head_dim * (share or 1.0)))
    if config["architectures"] == ["GraniteMoeHybridForCausalLM"]:
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture == "phi3":
        original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        ratio = config["max_position_embeddings"] / original
        if kind == "longrope":
            own = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or own)
            for length in ("short", "long"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))


def _describe_experts(writer: Any, config: dict[str, Any], architecture: str) -> None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((config[name] for name in names if config.get(name)), None)
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(next(config[name] for name in CHOSEN if config.get(name)))
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config.get("norm_topk_prob") is not None and architecture != "qwen3moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if architecture == "ernie4_5-moe":
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if architecture in GROUPED:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_tensors(
    writer: Any, tensors: dict[str, np.ndarray], blocks: dict[str, np.ndarray], config: Any, arch: str, kind: str
) -> None:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, tensor in tensors.items():
        content = blocks.get(name, tensor)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            content = content + 1
        if name.endswith(("e_score_correction.bias", "shared_expert_gate.weight")):
            content = content.squeeze()
        if name.endswith("_linear.weight") or (arch == "gpt-oss" and ".experts." in name):
            _add_stack(writer, name, content, arch)
            continue
        name += ".weight" * name.endswith("sinks")
        if arch in PAIRED and (".q_proj." in name or ".k_proj." in name):
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


def _add_stack(writer: Any, name: str, content: np.ndarray, arch: str) -> None:
    """Gates and ups in one tensor: Granite's, of all experts or of the one MLP, and gpt-oss's, turned and by turns."""
    layer, suffix = name.split(".")[2], "" if arch == "granite" else "_exps"
    kind = "bias" if name.endswith("_bias") else "weight"
    if arch == "gpt-oss" and kind == "weight":
        content = content.swapaxes(1, 2)
    parts = {"down": content}
    if "down" not in name and "output" not in name:
        halves = (content[:, ::2], content[:, 1::2]) if arch == "gpt-oss" else np.split(content, 2, axis=-2)
        parts = dict(zip(("gate", "up"), halves, strict=True))
    for part, own in parts.items():
        writer.add_tensor(f"blk.{layer}.ffn_{part}{suffix}.{kind}", np.ascontiguousarray(own))


def _add(writer: Any, name: str, content: np.ndarray, is_blocks: bool, kind: str) -> None:
    assert name
    if is_blocks:
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
    else:
        is_half = kind == "F16" and content.ndim > 1 and not name.endswith("_norm.weight")
        writer.add_tensor(name, content.astype(np.float16 if is_half else np.float32))


def _neighbours(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order within each head of queries and keys: value i beside value i + D / 2."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Llama 3.1's scaling as numbers by which each frequency is divided: transformers' frequencies say which."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    if rope.get("rope_type") != "llama3":
        return None
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**config), "cpu")[0].numpy()
    exponents = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    return (rope["rope_theta"] ** -exponents / scaled).astype(np.float32)
