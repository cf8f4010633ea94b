"""Reading what users bring: a file of text, plain or gzip, with errors that name file and line."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from splittime.core.errors import ConfigError, NotFound

GZIP_MAGIC = b"\x1f\x8b"
MAX_TEXT_BYTES = 2**30  # a small file may be packed from any number


def read_text(path: str, param: str) -> str:
    """Raises `NotFound` for no file and `ConfigError` for one that is no text."""
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"no file at {path}", param=param, value=path)
    try:
        with file.open("rb") as plain:
            is_packed = plain.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(file) if is_packed else file.open("rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            hint = "Take a part of it."
            what = f"{path} holds more than {MAX_TEXT_BYTES:,} bytes"
            raise ConfigError(what, param=param, value=path, limit=MAX_TEXT_BYTES, hint=hint)
        return data.decode("utf-8-sig")
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
