"""The audit log's lines: JSON objects, each with the hash of the one before and its own.

    {"n": 7, "prev": "<64 hex>", "at": "2026-11-27T06:41:02.123456Z", "kind": "request", ..., "hash": "<64 hex>"}

`hash` is the SHA-256 of the line without it, as it stands in the file. A line that is changed, taken out, put in or
moved breaks the chain there, and a first line that is not number 1 says that its beginning is missing. Lines taken off
the end break nothing, and who may write the file can make all of it anew: a `last_hash` that was kept elsewhere
(`gateway status`, `audit verify`) shows that, since the chain must hold it still.
"""

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from splittime.core.errors import ConfigError, NotFound

FIRST = "0" * 64  # `prev` of the first line
BEGIN = b'{"n":'
MAX_LINE_BYTES = 8 * 2**20


class ChainEnd(NamedTuple):
    """number, digest: of the last line."""

    number: int = 0
    digest: str = FIRST


class AuditVerdict(NamedTuple):
    """lines: good ones from the file's beginning. broken_line: the first that is not, from 1; None: the file is whole.
    why: what is wrong there. dropped: lines that the log itself says are missing."""

    lines: int
    end: ChainEnd
    broken_line: int | None
    why: str
    dropped: int


def link(end: ChainEnd, fields: dict[str, Any]) -> tuple[bytes, ChainEnd]:
    """Returns the next line, with its line break, and the end of the chain after it."""
    told = {"n": end.number + 1, "prev": end.digest, **fields}
    text = json.dumps(told, ensure_ascii=True, separators=(",", ":"))
    digest = sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n'.encode(), ChainEnd(end.number + 1, digest)


_TAIL_BYTES = len(f',"hash":"{FIRST}"}}')


def unlink(line: bytes) -> dict[str, Any]:
    """Returns what a line says. Raises ValueError, which says why, for one that is not as it was written."""
    body, tail = line[:-_TAIL_BYTES] + b"}", line[-_TAIL_BYTES:]
    digest = sha256(body).hexdigest()
    if tail != f',"hash":"{digest}"}}'.encode():
        raise ValueError("its hash is not that of what it says")
    told = json.loads(body)
    if not isinstance(told, dict) or not isinstance(told.get("n"), int) or not isinstance(told.get("prev"), str):
        raise ValueError("it has no number or no hash of the line before")
    return {**told, "hash": digest}


def verify(lines: Iterable[bytes], *, after: str = FIRST, holds: str = "") -> AuditVerdict:
    """Follow the chain to the first line that is broken. after: the last hash of the file that this one goes on from;
    by default it begins the log. holds: a hash that the chain must have; "" for none."""
    end, count, dropped, is_held = ChainEnd(digest=after), 0, 0, not holds
    for line in lines:
        try:
            told = _linked(line, end, is_first=count == 0)
        except (ValueError, RecursionError) as error:
            return AuditVerdict(count, end, count + 1, str(error), dropped)
        count, end = count + 1, ChainEnd(told["n"], told["hash"])
        is_held = is_held or end.digest == holds
        dropped += int(told.get("dropped", 0)) if told.get("kind") == "dropped" else 0
    if not count:
        return AuditVerdict(0, end, 1, "it is not there: the file is empty", 0)
    if not is_held:
        return AuditVerdict(count, end, count + 1, f"no line up to here has the hash {holds}", dropped)
    return AuditVerdict(count, end, None, "", dropped)


def _linked(line: bytes, end: ChainEnd, *, is_first: bool) -> dict[str, Any]:
    """Returns what a line says that follows this end. Raises `ValueError`, which says why, for any other."""
    told = unlink(line.removesuffix(b"\n"))
    if is_first:
        _require_begin(told, end.digest)
        end = ChainEnd(told["n"] - 1, end.digest)
    _require_next(told, end)
    if not line.endswith(b"\n"):
        raise ValueError("it has no end")
    return told


def _require_begin(told: dict[str, Any], after: str) -> None:
    number = told["n"]
    if (number == 1) != (told["prev"] == FIRST):
        raise ValueError("it is no beginning")
    if after == FIRST and number != 1:
        raise ValueError(f"its beginning is missing: it is line {number} of the log, and those before it are not here")


def _require_next(told: dict[str, Any], end: ChainEnd) -> None:
    if told["prev"] != end.digest:
        raise ValueError("the line before it is not the one that it was written after")
    if told["n"] != end.number + 1:
        raise ValueError(f"its number is {told['n']}, and {end.number + 1} is next")


def verify_file(path: Path, *, after: str = FIRST, holds: str = "") -> AuditVerdict:
    """As `verify`. Raises `NotFound` for no file, `ConfigError` for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return verify(iter(lambda: file.readline(MAX_LINE_BYTES), b""), after=after, holds=holds)
    except FileNotFoundError:
        raise NotFound(f"no audit log at {path}", param="file", value=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", param="file", value=str(path)) from error
