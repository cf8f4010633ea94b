"""Random adapters in PEFT's format, and the base model with one merged into its weights."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "target_modules": list(ALL),
    "rank_pattern": {},
    "lora_dropout": 0.05,
}


def tensors_of(
    base: dict[str, Tensor], modules: tuple[str, ...], rank: int, seed: int, size: float
) -> dict[str, Tensor]:
    """A and B for these modules of every layer of the base model, whose tensors these are."""
    source, made = torch.Generator().manual_seed(seed), {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}.lora_"
            made[f"{prefix}A.weight"] = torch.randn(rank, columns, generator=source) * size
            made[f"{prefix}B.weight"] = torch.randn(rows, rank, generator=source) * size
    return made


def write_adapter(
    folder: Path, base: dict[str, Tensor], seed: int = 1, modules: tuple[str, ...] = ALL, size: float = 0.3, **changes
) -> dict[str, Tensor]:
    """Write both files; returns the tensors, to spoil and save again."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    made = tensors_of(base, modules, config["r"], seed, size)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(made, folder / "adapter_model.safetensors")
    return made


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor], **changes) -> dict[str, Tensor]:
    """The base's tensors with B A times the scale added."""
    config = {**CONFIG, **changes}
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    result = dict(base)
    for name, up in adapter.items():
        if name.endswith("lora_B.weight"):
            down = adapter[name.replace("lora_B", "lora_A")]
            target = name.removeprefix("base_model.model.").replace("lora_B.weight", "weight")
            result[target] = base[target] + config["lora_alpha"] / root * (up.double() @ down.double()).to(base[target])
    return result
