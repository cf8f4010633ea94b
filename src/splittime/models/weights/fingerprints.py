"""The hash of a checkpoint's files, and which files are known to be as they were.

Files are read once to hash them, and known again by path, size, times and inode (the time of the inode's last change
cannot be set back by a tool that restores the other one). The hash of a file is the SHA-256 of the SHA-256s of its 16
MiB pieces, so that several threads share one file (hashlib lets go of the GIL). They are threads that no end of the
process waits for (as it would for those of `concurrent.futures`, with all that they have still to hash). A packed file
is remembered as whole when its sums have been checked. The memory is a JSON file beside the cache; losing it costs one
more reading.
"""

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

PIECE_BYTES = 16 << 20
READ_BYTES = 4 << 20
MEMORY_NAME = "files.json"
LEAST_PRIORITY = 19
WHOLE = "whole"  # in place of a hash
Identity = list[int]


def identities(paths: Sequence[Path]) -> list[Identity]:
    """Returns what tells a file from what it was before. Raises OSError for one that is not there."""
    found = (path.stat() for path in paths)
    return [[one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_dev] for one in found]


def recalled(paths: Sequence[Path], folder: Path) -> list[str | None]:
    """The hash of each file that is remembered in `folder`, in hexadecimal."""
    memory = _recall(folder)
    keys = [str(path.resolve()) for path in paths]
    return [_known(memory.get(key), identity) for key, identity in zip(keys, identities(paths), strict=True)]


def fingerprints(paths: Sequence[Path], folder: Path | None) -> list[str]:
    """The hash of each file; what is computed is remembered in `folder`, if there is one that can be written."""
    if folder is None:
        return [_hash_file(path) for path in paths]
    before = identities(paths)
    found = [known or _hash_file(path) for path, known in zip(paths, recalled(paths, folder), strict=True)]
    _remember(folder, paths, before, found)
    return found


def is_whole(path: Path, folder: Path) -> bool:
    """The file is as it was when `note_whole` was told of it."""
    return recalled([path], folder) == [WHOLE]


def note_whole(path: Path, folder: Path) -> None:
    with suppress(OSError):
        _remember(folder, [path], identities([path]), [WHOLE])


def _known(entry: object, identity: Identity) -> str | None:
    if isinstance(entry, list) and entry[:-1] == identity and isinstance(entry[-1], str):
        return entry[-1]
    return None


def _hash_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file, ThreadPool(os.cpu_count(), yield_to_others) as threads:
        begins = range(0, size, PIECE_BYTES)
        pieces = threads.map(lambda begin: _hash_piece(file.fileno(), begin), begins, chunksize=1)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hash_piece(descriptor: int, begin: int) -> bytes:
    digest, end = hashlib.sha256(), begin + PIECE_BYTES
    while begin < end and (read := os.pread(descriptor, min(READ_BYTES, end - begin), begin)):
        digest.update(read)
        begin += len(read)
    return digest.digest()


def yield_to_others() -> None:
    """The calling thread gets what all others leave."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


def _recall(folder: Path) -> dict[str, object]:
    try:
        memory = json.loads((folder / MEMORY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _remember(folder: Path, paths: Sequence[Path], found: Sequence[Identity], hashes: Sequence[str]) -> None:
    """Replaced whole, so that a reader sees the old or the new; of two writers the last one wins, which loses nothing
    that cannot be read again."""
    memory = _recall(folder)
    keys = (str(path.resolve()) for path in paths)
    new = {key: [*identity, known] for key, identity, known in zip(keys, found, hashes, strict=True)}
    if all(memory.get(key) == entry for key, entry in new.items()):
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{MEMORY_NAME}.", folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(memory | new, file, indent=1)
            os.replace(waiting, folder / MEMORY_NAME)
        except OSError:
            os.unlink(waiting)
