"""Which safetensors files a checkpoint's folder has, each opened: one, or those that an index names.

Both the index and each file's header are somebody else's. What is looked at here is what the safetensors library does
not look at (tests/models/test_evil_files.py has both): a header that names a tensor twice, or is so long that reading
it costs hundreds of megabytes, and names in the index that lead out of the folder, by "..", by an absolute path or by
a link. Links within the folder are followed, and those of the Hub's cache, whose snapshots link to blobs beside them.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from splittime.core.errors import ConfigError
from splittime.models.fields import MAX_HEADER_BYTES, MAX_INDEX_BYTES, read_bounded

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_files(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Handles by file name, and the file name of each tensor. Raises `ConfigError`."""
    if not (folder / INDEX_NAME).exists():
        handle = open_file(folder, SINGLE_NAME)
        return {SINGLE_NAME: handle}, dict.fromkeys(handle.keys(), SINGLE_NAME)
    file_of = _read_index(folder / INDEX_NAME)
    handles = {name: open_file(folder, name) for name in dict.fromkeys(file_of.values())}
    held = {name: set(handle.keys()) for name, handle in handles.items()}
    for tensor, name in file_of.items():
        if tensor not in held[name]:
            said = f"{folder / name} lacks tensor {tensor}, which {INDEX_NAME} says it has"
            raise ConfigError(said, param="model_path", value=tensor)
    return handles, file_of


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of = msgspec.json.decode(read_bounded(path, MAX_INDEX_BYTES), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} has no weight_map: {error}", param="model_path", value=str(path)) from error
    if not file_of:
        raise ConfigError(f"{path} has an empty weight_map", param="model_path", value=str(path))
    for name in dict.fromkeys(file_of.values()):
        if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(SUFFIX):
            said = f"{path}: weight_map names the file {name!r}, must be the plain name of a {SUFFIX} file beside it"
            raise ConfigError(said, param="weight_map", value=name)
    return file_of


def open_file(folder: Path, name: str) -> Any:
    """Returns the handle of one safetensors file. Raises `ConfigError` for one that leads out of the folder or that
    cannot be read."""
    path = folder / name
    try:
        _refuse_leaving(folder, path)
        header = _header(path)
        handle = safe_open(path, framework="pt")
        _refuse_twice(path, header)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"cannot read weights {path}: {error}", param="model_path", value=str(folder)) from error
    return handle


def _refuse_leaving(folder: Path, path: Path) -> None:
    """Raises `ConfigError` for a link out of the folder, and for what is no regular file; OSError where nothing is."""
    target = path.resolve(strict=True)
    real = folder.resolve()
    roots = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    if not any(target.is_relative_to(root) for root in roots):
        said = f"{path} is a link to {target}, outside of the model's folder"
        hint = "put the file itself into the folder, or name the folder that it lies in"
        raise ConfigError(said, param="model_path", value=str(target), hint=hint)
    if not target.is_file():
        raise ConfigError(f"{path} is no regular file", param="model_path", value=str(path))


def _header(path: Path) -> bytes:
    """The header's bytes as far as the file has them. Raises `ConfigError` for too many."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            said = f"cannot read weights {path}: its header claims {num_bytes} bytes, {MAX_HEADER_BYTES} are read"
            raise ConfigError(said, param="model_path", value=num_bytes, limit=MAX_HEADER_BYTES)
        return file.read(num_bytes)


def _refuse_twice(path: Path, header: bytes) -> None:
    """header: of a file that the library has taken, so that it is JSON of the right types."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ConfigError(f"{path}: the header has {name!r} twice", param="model_path", value=name)
            seen.add(name)

    json.loads(header, object_pairs_hook=check)
