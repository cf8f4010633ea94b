"""Small random checkpoints with a tokenizer of bytes, and their text."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from splittime.lab.quantize import layer_map
from splittime.lab.quantize.calibration import Calibration
from splittime.models.config import parse_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
BIASED = {"attention_bias": True, "mlp_bias": True}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder as a user has it. Norms differ from 1, and some channels see far larger values than others."""
    values = {**BASE, **changes}
    config = parse_config(values)
    dtype = getattr(torch, values["torch_dtype"])
    random = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for index in range(config.num_layers):
        prefix = layer_map.layer_prefix(index)
        shapes |= {prefix + name: shape for name, shape in layer_map.tensor_shapes(config, index).items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _draw(name, shape, random).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    _save_tokenizer(folder)
    return folder


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=random)
    if "norm" in name:
        return (values * 0.8).exp()
    return values * (0.5 if len(shape) == 1 else shape[-1] ** -0.5 * 1.5)


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def make_text(samples: int = 6, length: int = 32, seed: int = 1) -> Calibration:
    random = torch.Generator().manual_seed(seed)
    return Calibration(torch.randint(0, BASE["vocab_size"], (samples, length), generator=random))


def correlated(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs whose channels depend on each other and differ in size: float32 [tokens, width]."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, width // 4, generator=random) @ torch.randn(width // 4, width, generator=random)
    sizes = torch.randn(width, generator=random).exp()
    return (mixed + 0.3 * torch.randn(tokens, width, generator=random)) * sizes


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
