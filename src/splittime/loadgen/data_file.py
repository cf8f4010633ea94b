"""Reading what users bring: a file of text, plain or gzip, with errors that name file and line."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from splittime.core.errors import ConfigError, NotFound

GZIP_MAGIC = b"\x1f\x8b"


def read_text(path: str, param: str) -> str:
    """Raises `NotFound` for no file and `ConfigError` for one that is no text."""
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"no file at {path}", param=param, value=path)
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ConfigError(f"cannot read {path}: {error}", param=param, value=path) from error


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1 as editors do; only a line feed ends one."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def bad_line(path: str, number: int, why: str, param: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {why}", param=param, value=path, hint=hint)


def bad_file(path: str, why: str, param: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}: {why}", param=param, value=path, hint=hint)
