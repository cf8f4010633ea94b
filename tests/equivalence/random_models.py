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
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}

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
    "qwen3-moe-plain-layers": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0, 2], "attention_bias": True}),
}


def make(variant: str, folder: Path) -> Any:
    """Write the variant's checkpoint into `folder` and return transformers' model of it, in float32."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, differences = VARIANTS[variant]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **differences})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "norm" in parameter_name:  # else all zeros or all ones, which would hide errors
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model
