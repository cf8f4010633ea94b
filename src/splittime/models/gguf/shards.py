"""A model of one GGUF file or of several: `name-00001-of-00003.gguf` and so on, of which the first has the metadata."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from splittime.core.errors import ConfigError
from splittime.models.gguf.file import GgufFile

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
