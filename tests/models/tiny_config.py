"""A tiny Llama's config.json, without weights."""

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
LAYER = 32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32  # q, k and v; o; MLP; norms
NUM_PARAMETERS = 61 * 32 + 2 * LAYER + 32


def write(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
