"""The hidden states of the calibration text between two layers: in memory, or in a file where they are too large.

4 bytes x samples x length x hidden_size: 128 samples of 512 tokens take 536 MB at a width of 2048.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from splittime.models.layers import embed
from splittime.quantize.tensor_file import unwritable

IN_MEMORY_BYTES = 512 << 20


def begin(windows: Tensor, embedding: Tensor, file: Path, in_memory_bytes: int = IN_MEMORY_BYTES) -> Tensor:
    """What the embedding makes of windows [N, length]: float32 [N, length, hidden], mapped from `file` if too large."""
    count, length = windows.shape
    width = embedding.shape[1]
    states = _allocate((count, length, width), file, in_memory_bytes)
    for number, ids in enumerate(windows):
        states[number] = embed(embedding, ids, torch.float32)
    return states


def _allocate(shape: tuple[int, int, int], file: Path, in_memory_bytes: int) -> Tensor:
    num_elements = shape[0] * shape[1] * shape[2]
    if 4 * num_elements <= in_memory_bytes:
        return torch.empty(shape)
    try:
        with open(file, "wb") as made:
            os.posix_fallocate(made.fileno(), 0, 4 * num_elements)  # a full disk is an error here, and a crash later
    except OSError as error:
        raise unwritable(file, error) from error
    return torch.from_file(str(file), shared=True, size=num_elements, dtype=torch.float32).view(shape)
