"""A stranger's JSON file as an object: a regular file of bounded size, or an error that names it."""

import json
import stat
from pathlib import Path
from typing import Any

from splittime.core.errors import ConfigError
from splittime.models.limits import MAX_CONFIG_BYTES


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError` when there is none."""
    try:
        values = json.loads(read_bounded(path, max_bytes))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="model_path", value=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model_path", value=str(path))
    return values


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The file's content. Raises OSError as reading does, and `ConfigError` for a pipe, a device, or too large a
    file, none of which is opened."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no regular file", param="model_path", value=str(path))
    if status.st_size > max_bytes:
        said = f"{path} has {status.st_size} bytes, more than the {max_bytes} that are read of such a file"
        raise ConfigError(said, param="model_path", value=status.st_size, limit=max_bytes)
    return path.read_bytes()
