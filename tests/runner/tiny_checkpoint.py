"""A random Llama of a few thousand weights, written without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    names["lm_head.weight"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return names


def write(folder: Path, **changes) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors; returns the tensors, to spoil and save again."""
    config = {**CONFIG, **changes}
    source = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=source) * 0.3 for name, shape in shapes(config).items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
