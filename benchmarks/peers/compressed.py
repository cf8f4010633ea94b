"""A checkpoint of `make_models.py` as vLLM wants it on a CPU: integer weights in the compressed-tensors layout.

    w8a8    weights in 8 bits with one scale a row; activations in 8 bits with one scale a token, found as they come
    w4      weights in 4 bits with one scale for `GROUP` columns; whether vLLM rounds activations to 8 bits, which it
            does with AMX, is a setting of its own and not in the checkpoint

Rounded to the nearest, symmetric: the weights are random, so no better choice exists, and what a step costs is the
same. The head is stored apart from the embedding and rounded as the layers are, since vLLM rounds no tied head: else
it would read twice the bytes that the others read of it. The embedding stays in bfloat16; a step reads a row of it.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

KINDS = ("w8a8", "w4")
GROUP = 128  # with 64 columns vLLM 0.32 leaves its fast path: 5 tokens/s at batch 8 instead of 100
ROUNDED = re.compile(r"\.layers\.\d+\..*_proj\.weight$|^lm_head\.weight$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def write(source: Path, target: Path, kind: str) -> None:
    """Reads one file of bfloat16 weights, as `make_models.py` writes them."""
    with safe_open(source / "model.safetensors", "pt") as found:
        tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 (it is no dict)
    tensors.setdefault(HEAD, tensors[EMBEDDING].clone())
    rounded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = (eight_bits if kind == "w8a8" else four_bits)(tensor) if ROUNDED.search(name) else {"": tensor}
        rounded |= {f"{name}{part}": one.contiguous() for part, one in parts.items()}
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "quantization_config": layout(kind)}
    save_file(rounded, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def layout(kind: str) -> dict[str, Any]:
    """What config.json says of it."""
    weights: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False}
    if kind == "w8a8":
        weights |= {"num_bits": 8, "strategy": "channel"}
    else:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    group = {
        "targets": ["Linear", "re:.*lm_head"],
        "weights": weights,
        "input_activations": PER_TOKEN if kind == "w8a8" else None,
        "output_activations": None,
    }
    form = "int-quantized" if kind == "w8a8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def eight_bits(weight: Tensor) -> dict[str, Tensor]:
    """By the ending of the tensor's name; [rows, columns] and [rows, 1]."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return {"": (weight.float() / scale).round().to(torch.int8), "_scale": scale}


def four_bits(weight: Tensor) -> dict[str, Tensor]:
    """By the ending of the tensor's name: eight columns in a 32-bit number, the first lowest, each 8 too high."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-8) / 7
    numbers = (groups / scale).round().clamp(-8, 7).add(8).to(torch.int64).view(rows, columns // 8, 8)
    packed = (numbers << torch.arange(0, 32, 4)).sum(2)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=torch.int64)
    return {"_packed": signed, "_scale": scale.squeeze(2).to(weight.dtype), "_shape": shape}
