"""Tiny random checkpoints of every architecture, made with transformers, which is also the oracle for their logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
MSCALE = {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}

OSS = {"num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
GLM_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}

# name of the variant: (architecture without ForCausalLM, what differs from BASE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("Llama", {"rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-above-layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-bias-window": (
        "Qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "use_sliding_window": True}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}),
    "qwen2-moe-window-plain-layers": (
        "Qwen2Moe",
        {
            **MOE,
            **{"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2, "qkv_bias": False},
            **{"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        },
    ),
    "gpt-oss-yarn": ("GptOss", {**OSS, "num_local_experts": 5, "attention_bias": False, "swiglu_limit": 0.8}),
    "ernie-moe": ("Ernie4_5_Moe", {**ERNIE_MOE, "moe_num_shared_experts": 2}),
    "ernie-moe-some-layers": (
        "Ernie4_5_Moe",
        {**ERNIE_MOE, "moe_num_shared_experts": 0, "moe_layer_end_index": 1, "moe_norm_min": 0.4},
    ),
    "glm-moe": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm-moe-groups": (
        "Glm4Moe",
        {**GLM_MOE, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "dots": (
        "Dots1",
        {**GLM_MOE, "first_k_dense_replace": 1, "n_group": 2, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mellum": (
        "Mellum",
        {
            **{**MOE, "sliding_window": 7, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "eos_token_id": 2}),
    "granite-moe": (
        "GraniteMoe",
        {
            **{"num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.3, "logits_scaling": 3.0},
            **{"embedding_multiplier": 5.0, "residual_multiplier": 0.4},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **OSS,
            "num_local_experts": 6,
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        },
    ),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-rope-yarn-whole-pairs": ("Llama", {"rope_parameters": {**YARN, **MSCALE}, "head_dim": 20}),
    "qwen3-moe-plain-layers": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0, 2], "attention_bias": True}),
}


LONG = {"max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.0, 1.1, 1.3, 2.0]},
    "long_factor": [1.0, 1.5, 4.0, 9.0],
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 11}
GEMMA = {"head_dim": 20, "hidden_size": 54, "query_pre_attn_scalar": 14}  # 54: its root is none that is exact
GEMMA_4 = {"head_dim": 20, "global_head_dim": 32, "sliding_window": 11, "hidden_size_per_layer_input": 0}
LAST_FULL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
SHARING = [*LAST_FULL["layer_types"], "sliding_attention", *LAST_FULL["layer_types"]]
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
PLAIN_HYBRID = {
    "mamba_n_heads": 4,
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 44,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-windows": ("SmolLM3", {**WINDOWED, "no_rope_layers": [1, 0, 0], "tie_word_embeddings": False}),
    "seed-oss": ("SeedOss", {"head_dim": 12}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 20}),
    "ernie-biases": ("Ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    "granite": ("Granite", MULTIPLIERS),
    "granite-tied": ("Granite", {**MULTIPLIERS, "attention_bias": True, "tie_word_embeddings": True}),
    "granite-hybrid": ("GraniteMoeHybrid", {**MULTIPLIERS, **PLAIN_HYBRID, "position_embedding_type": "rope"}),
    "granite-hybrid-no-rope": ("GraniteMoeHybrid", {**PLAIN_HYBRID, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 13}),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-short-partial": (
        "Phi3",
        {
            **{"hidden_size": 96, "original_max_position_embeddings": 512, "max_position_embeddings": 512},
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5, "attention_factor": 1.2},
            **{"tie_word_embeddings": True, "initializer_range": 0.1},
        },
    ),
    "ministral": ("Ministral", {**KINDS, "head_dim": 20}),
    "ministral3": ("Ministral3", {"rope_parameters": GROWING, "head_dim": 20}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 20, "attention_bias": True}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 20, "num_experts": 8, "moe_topk": 3, "attention_bias": True}),
    "hunyuan-moe-alpha": (
        "HunYuanMoEV1",
        {
            **{"head_dim": 8, "num_experts": 4, "moe_topk": [2] * 3, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan-yarn": ("HunYuanDenseV1", {"head_dim": 20, "rope_parameters": YARN, "rms_norm_eps": 0.3}),
    "hunyuan-long": (
        "HunYuanDenseV1",
        {"head_dim": 8, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 6}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 11, "num_hidden_layers": 5}),
    "olmo3-yarn": (
        "Olmo3",
        {**KINDS, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}},
    ),
    "exaone4": ("Exaone4", {**KINDS, "head_dim": 20}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm": ("Glm", {"head_dim": 20, "attention_bias": False}),
    "glm4": ("Glm4", {"head_dim": 20, "partial_rotary_factor": 0.6, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"head_dim": 20, "logit_scale": 0.3}),
    "cohere-head-norms": ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 11, "num_hidden_layers": 5, "logit_scale": 2.5}),
    "cohere2-kinds": ("Cohere2", {**KINDS, "attention_bias": True, "head_dim": 20, "tie_word_embeddings": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 11, "num_attention_heads": 4}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False, "norm_epsilon": 0.01}),
    "gemma": ("Gemma", {"head_dim": 20, "hidden_size": 50}),
    "gemma2": ("Gemma2", {**GEMMA, **CAPS, "sliding_window": 11, "num_hidden_layers": 4}),
    "gemma2-file": (
        "Gemma2",
        {**CAPS, "head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 11, "num_hidden_layers": 4},
    ),
    "gemma2-untied": (
        "Gemma2",
        {**GEMMA, "head_dim": 32, "attn_logit_softcapping": 20.0, "tie_word_embeddings": False},
    ),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window": 11, "num_hidden_layers": 7}),
    "gemma3-file": (  # what a GGUF file can say
        "Gemma3",
        {"head_dim": 20, "hidden_size": 36, "query_pre_attn_scalar": 20, "sliding_window": 11, "num_hidden_layers": 7},
    ),
    "gemma4": ("Gemma4", {**GEMMA_4, "num_hidden_layers": 7}),
    "gemma4-keys-are-values": (
        "Gemma4",
        {**GEMMA_4, **LAST_FULL, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size": 54},
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            **{**GEMMA_4, **LAST_FULL, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
            **{"enable_moe_block": True, "final_logit_softcapping": 2.0, "use_bidirectional_attention": "vision"},
        },
    ),
    "gemma4-layer-inputs": (
        "Gemma4",
        {
            **{**GEMMA_4, "num_hidden_layers": 7, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97},
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "layer_types": SHARING},
        },
    ),
    "gemma3-linear": ("Gemma3", {**GEMMA, **KINDS, "rope_parameters": TWO_ROPES, "attention_bias": True}),
}
"""Decoders whose layers differ from Llama's; texts of 300 tokens are read by them."""
VARIANTS |= {name: (family, {**LONG, **changes}) for name, (family, changes) in FAMILIES.items()}

DELTA = {
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 6},
    **{"head_dim": 24, "num_hidden_layers": 5, "full_attention_interval": 2},
}
SHARED = {"shared_expert_intermediate_size": 40}
WIDE_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5-tied": (
        "Qwen3_5",
        {
            **{**DELTA, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 5},
            **{"linear_key_head_dim": 4, "linear_value_head_dim": 18, "tie_word_embeddings": True},
            "rope_parameters": {**WIDE_ROPE, "mrope_section": [2, 3, 1], "mrope_interleaved": True},
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        },
    ),
    "qwen3.5-biases": (
        "Qwen3_5",
        {**DELTA, "attention_bias": True, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "rms_norm_eps": 0.01},
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **SHARED},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **{**DELTA, **SHARED, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
            **{"mlp_only_layers": [1], "norm_topk_prob": False, "linear_key_head_dim": 6},
        },
    ),
}
"""Models of which some layers keep states."""
STATEFUL = {name: (family, {**LONG, **changes}) for name, (family, changes) in STATEFUL.items()}


def make(variant: str, folder: Path) -> Any:
    """Write the variant's checkpoint into `folder` and return transformers' model of it, in float32."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, differences = (VARIANTS | STATEFUL)[variant]
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**BASE, **differences})).float().eval()
    for parameter_name, parameter in model.named_parameters():
        # else all zeros or all ones, which would hide errors
        if any(word in parameter_name for word in ("bias", "norm", "sinks", "scale", "A_log")):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        if variant.startswith("gemma4") and "q_norm" in parameter_name:
            parameter.data.mul_(0.2)  # its scores are divided by nothing: trained norms keep them small
    for name, buffer in model.named_buffers():
        if "correction" in name or "layer_scalar" in name:
            buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model
