"""Random models that are too large for the processor's cache, so that memory's bandwidth binds: one by its weights, one
by its keys and values. They say nonsense at the price of sense; the words are the packaged model's. And an encoder.

    with model("weights") as folder: ...      raises MemoryShort where this machine has no room for it

Weights: bfloat16, normal with standard deviation 0.02, seed 0.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import splittime
from benchmarks.scenarios.encoder_shapes import SHAPES as ENCODERS
from benchmarks.scenarios.encoder_shapes import write_encoder

PACKAGED = Path(splittime.__file__).parent / "packaged" / "code"
NEEDED_BYTES = 3 << 30  # to make it and to serve it
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "weights": {  # 0.24 G parameters, 0.49 GB
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "kv": {  # 64 KiB of keys and values a token, and 40 MB of weights
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
}


class MemoryShort(Exception):
    """Not enough memory is free for the model."""


@contextmanager
def model(name: str) -> Iterator[Path]:
    free_bytes = available_bytes()
    if free_bytes < NEEDED_BYTES:
        raise MemoryShort(f"{free_bytes / 2**30:.1f} GiB of memory are free, {NEEDED_BYTES / 2**30:.0f} are needed")
    with tempfile.TemporaryDirectory() as folder:
        if name == "encoder":
            write_encoder(Path(folder), ENCODERS["minilm"])
        else:
            _save(Path(folder), SHAPES[name])
        yield Path(folder)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _save(folder: Path, shape: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in _sizes(shape):
        drawn = torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(0.0, 0.02, generator=generator)
        weights[name] = drawn.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(COMMON | shape))
    for path in PACKAGED.glob("tokenizer*"):
        shutil.copy(path, folder)


def _sizes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Llama checkpoint, and its shape."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape[f"num_{what}_heads"] * shape["head_dim"] for what in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (COMMON["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        about = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{about}{name}.weight", (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{about}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{about}self_attn.o_proj.weight", (hidden, queries)
        for name in ("gate", "up"):
            yield f"{about}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{about}mlp.down_proj.weight", (hidden, inner)
