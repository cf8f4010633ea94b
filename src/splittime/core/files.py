"""Files of ours and of users: small ones that are read whole, and those that are written whole.

Small files that a config names: keys, certificates, labels, configs. Read whole, within a bound, or refused.

What is no regular file is refused before a byte is read: to open a pipe would wait for who writes into it, and a device
has no end.

Files that are written whole or not at all: runs, schedules, tables and reports.

`write_whole` writes beside the file and puts it in its place at the end, so a full disk or a second Ctrl-C leaves what
was there before. `check_writable` refuses beforehand what could not be written after hours of measuring: a device or a
pipe (which would be replaced by a file), a folder, a folder that may not be written to. A ledger is never replaced:
what is in it cannot be made again.
`tests/core/test_whole_file.py` checks both.

A JSON object kept in a file between starts. Trouble with the file costs what it held, never the start.
"""

import contextlib
import json
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from splittime.core.errors import ConfigError

MAX_BYTES = 2**20


def read_small(path: str | Path, most_bytes: int = MAX_BYTES) -> bytes:
    """Returns what is in the file. Raises `OSError` for one that cannot be read, is no regular file or is longer."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is no regular file")
        with os.fdopen(opened, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(opened)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes} bytes")
    return data


MAX_NAME_CHARS = 200
SQLITE = b"SQLite format 3\x00"  # a ledger begins so


def check_writable(path: Path, param: str = "out", *, replaces: bool = True) -> None:
    """Raises `ConfigError` if `write_whole` could not write there now; not `replaces`: or nobody could go on writing
    there. Leaves nothing behind but folders."""
    _refuse_what_is_no_file(path, param)
    if replaces:
        _refuse_a_ledger(path, param)
    try:
        _put(path, None)
    except OSError as error:
        raise _cannot(path, param, error) from error


def write_whole(path: Path, data: bytes, *, param: str = "out", keeps: bool = False) -> None:
    """Raises `ConfigError` where it cannot be written; `keeps`: after putting it into the folder for temporary files,
    because it could not be made again, and the hint says where."""
    _refuse_what_is_no_file(path, param)
    _refuse_a_ledger(path, param)
    try:
        _put(path, data)
    except OSError as error:
        raise _cannot(path, param, error, _kept(path, data) if keeps else None) from error


def _refuse_what_is_no_file(path: Path, param: str) -> None:
    """A folder's own error would come too late: its name can be taken as a file's."""
    try:
        is_other = path.exists() and not path.is_file()
    except OSError as error:
        raise _cannot(path, param, error) from error
    if is_other:
        hint = "Name a file; what --json prints can be sent anywhere."
        raise ConfigError(f"cannot write {path}: it is no file", param=param, value=str(path), hint=hint)


def _refuse_a_ledger(path: Path, param: str) -> None:
    if begins_with(path, SQLITE):
        hint = "Name another file; a ledger that is not wanted any more can be deleted."
        raise ConfigError(f"cannot write {path}: a ledger is there", param=param, value=str(path), hint=hint)


def begins_with(path: Path, data: bytes) -> bool:
    """Returns whether there is a file that can be read and begins so."""
    try:
        with path.open("rb") as file:
            return file.read(len(data)) == data
    except OSError:
        return False


def _put(path: Path, data: bytes | None) -> None:
    """Checks with no data, and leaves nothing behind."""
    path = Path(os.path.realpath(path))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name[:MAX_NAME_CHARS]}.{os.getpid()}")
    try:
        beside.write_bytes(data or b"")
        if data is not None:
            beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _kept(path: Path, data: bytes) -> str | None:
    elsewhere = Path(tempfile.gettempdir(), f"{os.getpid()}-{path.name[-MAX_NAME_CHARS:]}")
    try:
        _put(elsewhere, data)
    except OSError as error:
        return f"Nor could it be kept at {elsewhere}: {error.strerror}. TMPDIR names another folder for such cases."
    return f"Nothing is lost: it is at {elsewhere}."


def _cannot(path: Path, param: str, error: OSError, hint: str | None = None) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror or error}", param=param, value=str(path), hint=hint)


log = logging.getLogger("splittime.runner")


def read(path: Path | None) -> dict[str, Any]:
    """Returns what the file holds; nothing if there is none. A damaged one is told, and taken for empty."""
    try:
        text = path.read_text(encoding="utf-8") if path is not None else "{}"
        found = json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is ignored: %s", path, error)
        return {}
    if not isinstance(found, dict):
        log.warning("%s holds no JSON object and is ignored", path)
        return {}
    return found


def write(path: Path, memory: dict[str, Any]) -> None:
    """Replace the file whole; of two writers the last one wins."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(memory, file, indent=1)
            os.replace(waiting, path)
        except OSError:
            os.unlink(waiting)
