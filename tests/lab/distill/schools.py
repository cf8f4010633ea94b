"""Little teachers and students with the packaged tokenizer, and texts, for the tests of distillation."""

import json
from importlib.resources import files
from pathlib import Path

import torch

from splittime.lab.distill.llama import Llama, Shape
from splittime.lab.distill.student import StudentPlan, write_folder

PACKAGED = Path(str(files("splittime") / "packaged" / "code"))
STUDENT = Shape(16, 32, 1, 1, 1, head_dim=16, max_position_embeddings=64)
TEACHER = Shape(32, 64, 2, 2, 1, head_dim=16, max_position_embeddings=64)


def make_model(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Random weights, all of them: those that training starts at zero as well; norms of one."""
    torch.manual_seed(seed)
    model = Llama(shape)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    write_folder(folder, StudentPlan(shape, shape.config()), model.state_dict(), PACKAGED)
    return folder


def write_config(path: Path, shape: Shape, **changed: object) -> Path:
    path.write_text(json.dumps(shape.config() | changed))
    return path


def write_texts(path: Path, count: int, lines: int = 12) -> Path:
    """Documents that differ, as JSONL."""
    with path.open("w") as file:
        for number in range(count):
            text = "".join(f"def f_{number}_{line}(x):\n    return x + {line * number}\n" for line in range(lines))
            file.write(json.dumps({"text": text.strip()}) + "\n")
    return path
