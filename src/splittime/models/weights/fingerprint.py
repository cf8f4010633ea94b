"""What files hold, as short hashes: read once, then remembered by path, size, times and inode (the time of the
inode's last change cannot be set back by a tool that restores the other one).

The hash of a file is the SHA-256 of the SHA-256s of its 16 MiB pieces, so that several threads share one file (hashlib
lets go of the GIL). The memory is a JSON file beside the cache; losing it costs one more reading.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

PIECE_BYTES = 16 << 20
READ_BYTES = 1 << 20
MEMORY_NAME = "files.json"


def fingerprints(paths: Sequence[Path], folder: Path) -> list[str]:
    """The hash of each file, in hexadecimal; what is computed is remembered in `folder` if that can be written."""
    memory = _recall(folder)
    identities = [_identity(path) for path in paths]
    keys = [str(path.resolve()) for path in paths]
    found = [_known(memory.get(key), identity) for key, identity in zip(keys, identities, strict=True)]
    new = {key: _hash_file(path) for key, path, known in zip(keys, paths, found, strict=True) if known is None}
    if new:
        entries = {key: [*identity, new[key]] for key, identity in zip(keys, identities, strict=True) if key in new}
        _remember(folder, memory | entries)
    return [known or new[key] for key, known in zip(keys, found, strict=True)]


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _known(entry: object, identity: list[int]) -> str | None:
    if isinstance(entry, list) and entry[:-1] == identity and isinstance(entry[-1], str):
        return entry[-1]
    return None


def _hash_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(os.cpu_count()) as threads:
        pieces = threads.map(lambda begin: _hash_piece(file.fileno(), begin), range(0, size, PIECE_BYTES))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(descriptor: int, begin: int) -> bytes:
    digest, end = hashlib.sha256(), begin + PIECE_BYTES
    while begin < end and (read := os.pread(descriptor, min(READ_BYTES, end - begin), begin)):
        digest.update(read)
        begin += len(read)
    return digest.digest()


def _recall(folder: Path) -> dict[str, object]:
    try:
        memory = json.loads((folder / MEMORY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(folder: Path, memory: dict[str, object]) -> None:
    """Replaced whole, so that a reader sees the old or the new; of two writers the last one wins, which loses nothing
    that cannot be read again."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{MEMORY_NAME}.", folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(memory, file, indent=1)
            os.replace(waiting, folder / MEMORY_NAME)
        except OSError:
            os.unlink(waiting)
