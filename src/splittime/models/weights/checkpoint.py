"""A checkpoint folder's tensors by name: one safetensors file, or shards with an index. Each is mapped and read once.

Errors name the tensor and the file: missing, unexpected, or of another shape than the config says.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.models.config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attention.bias")  # buffers that old exports carry


class Checkpoint:
    """`take` hands out each tensor; `check_all_taken` then says whether the checkpoint held anything else."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_parameters = 0
        self._handles: dict[str, Any] = {}
        self._file_of = self._find_files(folder)
        self._left = set(self._file_of)

    def _find_files(self, folder: Path) -> dict[str, str]:
        """Tensor name -> file name, opening every file that holds one."""
        if (folder / INDEX_NAME).exists():
            index = read_json(folder / INDEX_NAME).get("weight_map")
            if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
                raise ConfigError(f"{folder / INDEX_NAME} has no weight_map", param="model_path", value=str(folder))
            for name in dict.fromkeys(index.values()):
                self._open(folder, name)
            return self._check_index(folder, index)
        self._open(folder, SINGLE_NAME)
        return dict.fromkeys(self._handles[SINGLE_NAME].keys(), SINGLE_NAME)

    def _open(self, folder: Path, name: str) -> None:
        try:
            self._handles[name] = safe_open(folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            message = f"cannot read weights {folder / name}: {error}"
            raise ConfigError(message, param="model_path", value=str(folder)) from error

    def _check_index(self, folder: Path, index: dict[str, str]) -> dict[str, str]:
        held = {name: set(handle.keys()) for name, handle in self._handles.items()}
        for tensor, name in index.items():
            if tensor not in held[name]:
                raise ConfigError(
                    f"{folder / name} lacks tensor {tensor}, which {INDEX_NAME} says it has", value=tensor
                )
        return index

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, as this checkpoint's dtype. Raises `ConfigError` if absent or of another shape."""
        if name not in self._file_of:
            raise ConfigError(f"weights: tensor {name} of shape {list(shape)} is missing", param=name)
        tensor = self._handles[self._file_of[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            message = f"weights: tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
            raise ConfigError(message, param=name, value=list(tensor.shape), limit=list(shape))
        if not tensor.is_floating_point():
            raise ConfigError(f"weights: tensor {name} is {tensor.dtype}, not a float", param=name)
        self._left.discard(name)
        self.num_parameters += tensor.numel()
        return tensor.to(self.dtype)

    def skip(self, name: str) -> None:
        """Say that `name`, if there, is rightly left unread."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raises `ConfigError` naming the tensors that no part of the model asked for."""
        left = sorted(name for name in self._left if not name.endswith(IGNORED_SUFFIXES))
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise ConfigError(f"weights: {len(left)} tensors are unknown to this architecture: {shown}", value=left[0])
