"""Opening a checkpoint by its path: a folder with safetensors, or a .gguf file."""

from pathlib import Path

from splittime.models.config import ModelConfig, load_config
from splittime.models.gguf.checkpoint import GgufCheckpoint
from splittime.models.gguf.config import load_gguf_config
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.source import Source

GGUF_SUFFIX = ".gguf"


def open_source(path: Path, config: ModelConfig) -> Source:
    """Opens a folder with safetensors, or a .gguf file. Cheap: no weight is read."""
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path, config.quantization)


def read_config(path: Path, generation: str = "auto") -> ModelConfig:
    """Reads the config of either: `config.json`, or the file's own metadata. generation: what to take of a folder's
    `generation_config.json`, see `models.generation`."""
    return load_gguf_config(path) if is_gguf(path) else load_config(path, generation)


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and not path.is_dir()
