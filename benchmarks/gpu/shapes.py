"""Configurations of well-known models, to be filled with random weights: shapes only."""

import json
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}


def _shape(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: tuple[int, int], **more: Any) -> dict:
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _shape(_LLAMA, 4096, 14336, 32, (32, 8), vocab_size=128256),
    "llama-3.1-70b": _shape(_LLAMA, 8192, 28672, 80, (64, 8), vocab_size=128256),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, (16, 8), vocab_size=151936, tie_word_embeddings=True),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, (32, 8), vocab_size=151936),
    "qwen3-30b-a3b": _shape(
        {**_QWEN3, "architectures": ["Qwen3MoeForCausalLM"]}, 2048, 6144, 48, (32, 4),
        vocab_size=151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "tiny": _shape(_LLAMA, 32, 64, 1, (2, 1), vocab_size=128) | {"head_dim": 16},
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """A folder with that config.json, for `load_format="dummy"`."""
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(SHAPES[name]))
    return place
