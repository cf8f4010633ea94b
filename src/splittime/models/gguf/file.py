"""The container: header, metadata, and where each tensor lies in the mapped file. Versions 2 and 3, little endian.

    magic "GGUF" | version u32 | tensor_count u64 | metadata_kv_count u64 | metadata: key, type, value ... |
    tensors: name, n_dims u32, dimensions u64 ..., type u32, offset u64 ... | padding | the tensors' bytes

A file is somebody else's: whatever does not fit is a `ConfigError` with the file's and the field's name, before
anything of that size is allocated (`cursor`), and tensors neither overlap nor leave the file. Dimensions are kept
here in the order of torch: GGUF counts from the innermost.

A model is one such file or several: `name-00001-of-00003.gguf` and so on, of which the first has the metadata.
"""

import math
import mmap
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from splittime.core.errors import ConfigError
from splittime.models.fields import EXPERTS
from splittime.models.gguf.cursor import OTHERS, SERVED, GgufCursor, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20
MAX_DIMENSIONS = 4
MAX_ROW = 1 << 40
LEAST_KEY_BYTES = 8 + 4 + 1  # an empty key, the type, a byte
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dimensions, the type, the offset


@dataclass(frozen=True)
class TensorPlace:
    """shape: as torch has it, rows of shape[-1] values; begin, num_bytes: in the file."""

    type: TensorType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class GgufFile:
    """metadata: by key; numbers, texts, arrays. tensors: by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = _map(path)
        cursor = GgufCursor(self.content, path.name)
        self.version = _version(cursor)
        num_tensors = cursor.count("tensor_count", LEAST_TENSOR_BYTES)
        num_keys = cursor.count("metadata_kv_count", LEAST_KEY_BYTES)
        self.metadata = _metadata(cursor, num_keys)
        self.alignment = _alignment(cursor, self.metadata)
        headers = _headers(cursor, num_tensors)
        data_begin = cursor.at + -cursor.at % self.alignment
        self.tensors = {name: _place(cursor, name, header, data_begin) for name, header in headers.items()}
        self._check_places(cursor)

    def bytes_of(self, name: str) -> np.ndarray:
        """uint8, a view of the mapping: read when touched."""
        place = self.tensors[name]
        return np.frombuffer(self.content, np.uint8, place.num_bytes, place.begin)

    def _check_places(self, cursor: GgufCursor) -> None:
        places = sorted((place.begin, place.begin + place.num_bytes, name) for name, place in self.tensors.items())
        for begin, _, name in places:
            if begin % self.alignment:
                raise cursor.broken(
                    f"tensor {name!r}: offset", f"is no multiple of general.alignment, {self.alignment}"
                )
        for (_, end, earlier), (begin, _, name) in pairwise(places):
            if begin < end:
                raise cursor.broken(f"tensor {name!r}: offset", f"lies within tensor {earlier!r}")


def _map(path: Path) -> mmap.mmap:
    """Private: torch wants memory that could be written, and nothing that writes there reaches the file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ConfigError(f"{path.name} is empty", param="model_path", value=str(path))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="model_path", value=str(path)) from error


def _version(cursor: GgufCursor) -> int:
    cursor.need(4, "magic")
    magic, cursor.at = bytes(cursor.content[:4]), 4
    if magic != MAGIC:
        raise cursor.broken("magic", f"is {magic!r}, not {MAGIC!r}: this is no GGUF file")
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if version and version & 0xFFFF == 0:
        raise cursor.broken("version", "is written in big-endian order; only little-endian files are read", version)
    raise cursor.broken("version", f"is {version}; {' and '.join(map(str, VERSIONS))} are read", version)


def _metadata(cursor: GgufCursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(count):
        key = cursor.text(f"metadata key {number}")
        if key in found:
            raise cursor.broken(f"metadata key {key!r}", "comes twice")
        found[key] = cursor.value(f"metadata {key!r}")
    return found


def _alignment(cursor: GgufCursor, metadata: dict[str, Any]) -> int:
    given = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(given) is int and given > 0 and given & (given - 1) == 0
    if not is_power or not MIN_ALIGNMENT <= given <= MAX_ALIGNMENT:
        wanted = f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        raise cursor.broken("general.alignment", f"is {given!r}, must be {wanted}")
    return given


def _headers(cursor: GgufCursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """By name: dimensions as the file has them, type, offset."""
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for number in range(count):
        name = cursor.text(f"tensor name {number}")
        field = f"tensor {name!r}"
        if name in found:
            raise cursor.broken(field, "comes twice")
        num_dims = cursor.u32(f"{field}: n_dims")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise cursor.broken(f"{field}: n_dims", f"is {num_dims}, must be 1 to {MAX_DIMENSIONS}", num_dims)
        dims = tuple(cursor.u64(f"{field}: dimension {number}") for number in range(num_dims))
        found[name] = dims, cursor.u32(f"{field}: type"), cursor.u64(f"{field}: offset")
    return found


def _place(cursor: GgufCursor, name: str, header: tuple[tuple[int, ...], int, int], data_begin: int) -> TensorPlace:
    dims, number, offset = header
    field = f"tensor {name!r}"
    kind = SERVED.get(number)
    if kind is None:
        served = ", ".join(sorted(each.name for each in SERVED.values()))
        raise cursor.broken(
            f"{field}: type", f"is {OTHERS.get(number, number)}, which is not served; these are: {served}", number
        )
    if min(dims) < 1 or dims[0] % kind.values or dims[0] > MAX_ROW:
        rule = f"positive, the first a multiple of {kind.values} for {kind.name}"
        raise cursor.broken(f"{field}: dimensions", f"are {list(dims)}, must be {rule}")
    if len(dims) == 3 and dims[2] > EXPERTS.most:
        said = f"are {list(dims)}: {dims[2]} matrices, more than the {EXPERTS.most} that are read"
        raise cursor.broken(f"{field}: dimensions", said, dims[2], EXPERTS.most)
    num_bytes = math.prod(dims) // kind.values * kind.num_bytes
    begin = data_begin + offset
    if begin + num_bytes > cursor.size:
        said = f"puts its {num_bytes} bytes at byte {begin}, the file ends at {cursor.size}"
        raise cursor.broken(f"{field}: offset", said, offset)
    return TensorPlace(kind, dims[::-1], begin, num_bytes)


SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufModel:
    """metadata: of the first file. file_of: for each tensor, the file that holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = GgufFile(path)
        self.metadata: dict[str, Any] = first.metadata
        self.files = [first, *(GgufFile(other) for other in _others(path, first.metadata))]
        self.file_of: dict[str, GgufFile] = {}
        for file in self.files:
            twice = self.file_of.keys() & file.tensors.keys()
            if twice:
                raise self.broken(f"tensor {min(twice)!r}", f"is in {file.path.name} and in an earlier file")
            self.file_of |= dict.fromkeys(file.tensors, file)
        self._check_total()

    def broken(self, field: str, said: str, value: Any = None, limit: Any = None) -> ConfigError:
        return ConfigError(f"{self.path.name}: {field} {said}", param="model_path", value=value, limit=limit)

    def _check_total(self) -> None:
        total = self.metadata.get("split.tensors.count")
        if total is not None and total != len(self.file_of):
            raise self.broken("split.tensors.count", f"is {total}, the files hold {len(self.file_of)} tensors", total)


def open_model(path: Path) -> GgufModel:
    """The model whose (first) file is `path`. It is asked for its config, then for its weights: read once, unless the
    file has changed."""
    try:
        status = path.stat()
    except OSError:
        return GgufModel(path)  # which says what is wrong
    return _opened(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(1)
def _opened(path: Path, *_: int) -> GgufModel:
    return GgufModel(path)


def _others(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The second and later files of the model whose first one `path` is."""
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int):
        raise ConfigError(f"{path.name}: split.count is {count!r}, split.no {number!r}: no integers", value=count)
    if count <= 1:
        return []
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        wanted = f"is one of {count} files; it must be called NAME-00001-of-{count:05d}.gguf"
        raise ConfigError(f"{path.name}: split.count: this {wanted}", param="model_path", value=count)
    if number != 0:
        first = f"{match['stem']}-00001-of-{count:05d}.gguf"
        raise ConfigError(f"{path.name} is part {number + 1} of {count}; name the first, {first}", param="model_path")
    others = [path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(2, count + 1)]
    missing = [other.name for other in others if not other.is_file()]
    if missing:
        raise ConfigError(f"{path.name} lacks its other parts: {', '.join(missing[:5])}", param="model_path")
    return others
