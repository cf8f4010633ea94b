"""Writing a model folder in Hugging Face's format while others may be reading it.

Owns the file layout. Promises that a reader never sees half a file: each is written beside its place, then moved.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from splittime.lab.distill.llama import Llama, Shape
from training.tokenizer import END_OF_TEXT_ID, as_json, tokenizer_config

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGED = REPOSITORY / "src" / "splittime" / "packaged"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary path)`, then move the result to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    temporary.chmod(0o644)  # safetensors makes files that only their owner may read
    os.replace(temporary, path)


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def generation_config() -> dict[str, object]:
    """The defaults that generation_config.json gives to whoever generates."""
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    return {**ends, "do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95}


def export_folder(folder: Path, shape: Shape, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write every file of a model folder; the weights are rounded to bfloat16."""
    rounded = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    texts = {
        "config.json": as_json(shape.config()),
        "generation_config.json": as_json(generation_config()),
        "tokenizer_config.json": as_json(tokenizer_config(shape.max_position_embeddings)),
        "tokenizer.json": tokenizer.to_str() + "\n",
    }
    for name, text in texts.items():
        replace_text(folder / name, text)
    replace_file(folder / "model.safetensors", lambda path: save_file(rounded, path, metadata={"format": "pt"}))


def load_folder(folder: Path) -> Llama:
    """The model of a folder, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval()
