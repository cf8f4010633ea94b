"""Writing safetensors files piece by piece: no more than one tensor is in memory, and equal content is equal bytes.

    u64 length of the header | header, JSON filled up with spaces to 8 bytes | tensors, one after the other

The library's own writer takes all tensors at once and orders the metadata as it comes; its reader reads both. Tensors
are ordered by falling size of their elements, then by name, which keeps each aligned. A file appears under its name
when it is whole and on the disk.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from splittime.core.errors import ConfigError

PIECE_BYTES = 64 << 20
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to come: read when it is written, `done` afterwards."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    done: Callable[[Tensor], None] = lambda tensor: None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @staticmethod
    def of(name: str, tensor: Tensor, done: Callable[[Tensor], None] = lambda tensor: None) -> "TensorEntry":
        return TensorEntry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor, done)


def write(path: Path, entries: Sequence[TensorEntry], notes: Mapping[str, str] | None = None) -> None:
    """Make the file, or raise `ConfigError` when it cannot be written and leave nothing under its name."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    with replacing(path) as file:
        file.write(_header(ordered, notes or {}))
        for entry in ordered:
            tensor = entry.read()
            for piece in _pieces(tensor):
                file.write(piece)
            entry.done(tensor)


def write_json(path: Path, values: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block has ended well."""
    waiting = path.with_name(f".{path.name}.tmp")
    try:
        with open(waiting, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    except OSError as error:
        waiting.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    hint = "make room (or name another --out) and run the same command again: it goes on from what is finished"
    return ConfigError(f"cannot write {path}: {error.strerror or error}", param="out", value=str(path), hint=hint)


def _header(entries: Sequence[TensorEntry], notes: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        table[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    content = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
