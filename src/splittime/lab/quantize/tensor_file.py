"""Writing safetensors files piece by piece: no more than one tensor is in memory, and equal content is equal bytes.

    u64 length of the header | header, JSON filled up with spaces to 8 bytes | tensors, one after the other

The library's own writer takes all tensors at once and orders the metadata as it comes; its reader reads both. Tensors
are ordered by falling size of their elements, then by name, which keeps each aligned. A file appears under its name
when it is whole and on the disk.

The work folder `OUT.unfinished`: what a killed run leaves to the next one, and how a result appears all at once.

    manifest.json              what the result depends on; a run with anything else is refused
    layer-00007.safetensors    a finished layer: its tensors as the checkpoint will hold them, its errors in the notes
    checkpoint/                the result being put together, begun anew by each run; renamed to OUT when it is whole
    hidden.f32                 hidden states of the calibration text, where they are too large for memory
    lock                       held by the process that works here

Manifest and layers are written beside their names and renamed when they are on the disk. So OUT either is not there or
is whole, and a run that was killed anywhere goes on after the last finished layer.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import safe_open
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
MANIFEST, LOCK, RESULT = "manifest.json", "lock", "checkpoint"
MEANS = "means"  # in the manifest: of computing, threads or kernels; not compared
OLD_MEANS = "num_threads"  # once called so, of threads alone
T = TypeVar("T", int, str)


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


class Work:
    def __init__(self, out: Path) -> None:
        """Take the folder for this process. Raises `ConfigError` if OUT is there, or this is not ours or in use."""
        self.out = out
        self.folder = out.with_name(out.name + ".unfinished")
        self.is_done = _has_content(out)  # so far; `adopt` refuses it unless this very run had just finished
        if self.is_done and not (self.folder / MANIFEST).is_file():
            raise _exists(out)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            message = f"another process is working in {self.folder}"
            raise ConfigError(message, param="out", value=str(out), hint="wait for it, or name another --out") from None

    def close(self) -> None:
        os.close(self._lock)

    def _refuse_foreign(self) -> None:
        foreign = [path.name for path in self.folder.iterdir() if not _is_ours(path.name)]
        if foreign and not (self.folder / MANIFEST).is_file():
            told = f"{self.folder} is not a work folder: it holds {foreign[0]} and no {MANIFEST}"
            raise ConfigError(told, param="out", value=str(self.out), hint="name another --out")

    def adopt(self, identity: Mapping[str, Any], means: T) -> T:
        """Begin, or go on with what was begun with the same identity; -> the means to compute with, which whoever goes
        on takes over. Raises `ConfigError` naming what is different."""
        path = self.folder / MANIFEST
        if not path.is_file():
            write_json(path, {**identity, MEANS: means})
            return means
        found = _read_manifest(path)
        begun_with = found.pop(MEANS, found.pop(OLD_MEANS, None))
        for key in {**found, **identity}:
            if (then := found.get(key)) != (now := identity.get(key)):
                told = f"{self.folder} was begun with another {key}: {then}, now {now}"
                hint = f"repeat the command as it was, name another --out, or remove {self.folder}"
                raise ConfigError(told, param=key, value=str(now), limit=str(then), hint=hint)
        if self.is_done and (self.folder / RESULT).exists():
            raise _exists(self.out)
        if not isinstance(begun_with, type(means)) or not begun_with:
            raise _damaged(path)
        return begun_with

    def layer_path(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def keep_layer(self, index: int, tensors: Mapping[str, Tensor], errors: Mapping[str, float]) -> None:
        entries = [TensorEntry.of(name, tensor) for name, tensor in tensors.items()]
        write(self.layer_path(index), entries, {"errors": json.dumps(errors)})

    def errors(self, index: int) -> dict[str, float]:
        with safe_open(self.layer_path(index), framework="pt") as file:
            return json.loads(file.metadata()["errors"])

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        with safe_open(self.layer_path(index), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)

    def layer_entries(self, index: int) -> list[TensorEntry]:
        """The finished layer's tensors, each read when it is written."""
        path, each = self.layer_path(index), self.layer_tensors(index).items()
        return [TensorEntry(name, one.dtype, tuple(one.shape), partial(_read_one, path, name)) for name, one in each]

    def begin_result(self) -> Path:
        result = self.folder / RESULT
        if result.exists():
            shutil.rmtree(result)
        result.mkdir()
        return result

    def finish(self) -> None:
        """The result takes its name; then the work folder goes."""
        if not self.is_done:
            try:
                self.out.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self.folder / RESULT, self.out)
            except OSError as error:
                raise unwritable(self.out, error) from error
        (self.folder / MANIFEST).unlink()  # first: a run killed below leaves rubbish, not something to go on with
        shutil.rmtree(self.folder)


def _read_one(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise _damaged(path)
    return found


def _damaged(path: Path) -> ConfigError:
    told = f"{path} is damaged, or an older version began it"
    return ConfigError(told, param="out", value=str(path), hint=f"remove {path.parent} and begin anew")


def _has_content(out: Path) -> bool:
    return any(out.iterdir()) if out.is_dir() else out.exists() or out.is_symlink()


def _is_ours(name: str) -> bool:
    return name in (LOCK, "files.json") or name.startswith((f".{MANIFEST}.", ".files.json."))


def _exists(out: Path) -> ConfigError:
    return ConfigError(f"{out} is there already", param="out", value=str(out), hint="name another --out, or remove it")
