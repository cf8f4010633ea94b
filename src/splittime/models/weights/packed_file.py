"""A file of packed weights: every blob of one model, one after the other, then a table of what is where.

    blob | padding | blob | ... | table (JSON: name, begin, bytes, CRC-32) | trailer (48 bytes)
    trailer = offset of the table, u64 | SHA-256 of the table | magic

Blobs begin at multiples of 4 KiB, large ones of 2 MiB, and each is written by as few calls as can be: so the page cache
has them on huge pages, where it can. What pads them is a hole in the file.

`PackedWriter` writes beside the name, waits for the disk and renames at the end, so that a file of that name is whole:
two processes that write the same do not meet, and one that dies leaves only a `.tmp`. `PackedReader` maps the file, and
has several threads bring the blobs into memory, in the order in which they will be asked for; they stay where they are,
in the page cache, which other processes with the same model share. Whoever cuts the file short while it is in use
kills those processes (SIGBUS), as with any mapped file; to replace or to delete it harms nobody. A file that is not
known to be as it was written is read and summed first; one that is cut short or changed is `PackedFileBroken`.
"""

import errno
import fcntl
import hashlib
import json
import os
import struct
import tempfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from splittime.kernels.native import memory

ALIGNMENT = 4096
MAGIC = b"STPACK01"
TRAILER = struct.Struct("<Q32s8s")
WRITE_BYTES = 1 << 30  # the system takes at most 2 GB less a page
THREADS = 4


class PackedFileBroken(Exception):
    """The file does not hold what it should; says in what."""


class PackedWriter:
    """Write with `add`, then `finish`, or `abandon`. All raise OSError (disk full, not writable)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        self._descriptor, self._waiting = _begin(folder)
        self._end = 0
        self._table: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, blob: Tensor) -> None:
        """blob: uint8, one dimension."""
        content = _bytes_of(blob)
        self._end += -self._end % (memory.HUGE_PAGE_BYTES if len(content) >= memory.LARGE_BYTES else ALIGNMENT)
        self._table[name] = (self._end, len(content), zlib.crc32(content))
        self._write(content)

    def finish(self, path: Path) -> None:
        """Returns when the disk has it."""
        table = json.dumps(self._table).encode()
        begin = self._end
        self._write(table)
        self._write(TRAILER.pack(begin, hashlib.sha256(table).digest(), MAGIC))
        os.fsync(self._descriptor)
        self._waiting.replace(path)  # while it is ours: nobody takes it for one that was left behind
        self._close()

    def require_room(self, num_bytes: int) -> None:
        """A disk that cannot hold so much is not filled up first: others write to it too."""
        status = os.fstatvfs(self._descriptor)
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and num_bytes > free:  # a file system may not tell
            raise OSError(errno.ENOSPC, f"No space left on device: {num_bytes} bytes are needed and {free} are free")

    def abandon(self) -> None:
        with suppress(OSError):
            self._waiting.unlink(missing_ok=True)
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            written = os.pwrite(self._descriptor, left[:WRITE_BYTES], self._end)
            left = left[written:]
            self._end += written


class PackedReader:
    """All blobs of the file at `path`. is_known: it is as it was written, no sum is checked. Raises OSError if there is
    none, `PackedFileBroken` if it is not whole."""

    def __init__(self, path: Path, is_known: bool = False) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._table = _read_table(descriptor)
            self._mapped = memory.map_file(descriptor)
        finally:
            os.close(descriptor)
        self.num_bytes = sum(size for _, size, _ in self._table.values())
        self._is_known = is_known
        self._threads = ThreadPoolExecutor(THREADS)
        self._blobs = {name: self._threads.submit(self._read, *place) for name, place in self._table.items()}

    def take(self, name: str, num_bytes: int) -> Tensor:
        """The blob called `name`, once: uint8 [num_bytes], a part of the mapped file."""
        future: Future[Tensor] | None = self._blobs.pop(name, None)
        if future is None or self._table[name][1] != num_bytes:
            raise PackedFileBroken(f"it holds no {name} of {num_bytes} bytes")
        return future.result()

    def close(self) -> None:
        """What was taken stays."""
        self._threads.shutdown(cancel_futures=True)
        del self._mapped

    def _read(self, begin: int, num_bytes: int, checksum: int) -> Tensor:
        if begin + num_bytes > len(self._mapped):
            raise PackedFileBroken("it ends within a weight")
        blob = self._mapped[begin : begin + num_bytes]
        memory.populate(blob)
        if not self._is_known and _sum_of(blob) != checksum:
            raise PackedFileBroken("a weight is not what was written")
        return blob


def _sum_of(blob: Tensor) -> int:
    return zlib.crc32(_bytes_of(blob))


def _read_table(descriptor: int) -> dict[str, tuple[int, int, int]]:
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, TRAILER.size, max(0, size - TRAILER.size))
    begin, digest, magic = TRAILER.unpack(trailer) if len(trailer) == TRAILER.size else (0, b"", b"")
    if magic != MAGIC or begin > size:
        raise PackedFileBroken("it has no end")
    table = os.pread(descriptor, size - TRAILER.size - begin, begin)
    if hashlib.sha256(table).digest() != digest:
        raise PackedFileBroken("its table is damaged")
    return {name: tuple(place) for name, place in json.loads(table).items()}


def _bytes_of(blob: Tensor) -> memoryview:
    return memoryview(blob.numpy())  # type: ignore[arg-type]  # an array is a buffer; its stubs do not say so


def _begin(folder: Path) -> tuple[int, Path]:
    """A new file that is ours until it is closed, by us or by our death. Until it is locked another process that looks
    for what was left behind may take it for that, and remove it: then it is none."""
    while True:
        descriptor, waiting = tempfile.mkstemp(".tmp", ".new.packed.", folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, Path(waiting)
        except OSError:  # a file system without locks
            os.unlink(waiting)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    """What processes that died were writing: nobody holds its lock."""
    for left in folder.glob(".*.packed.*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # another process is writing it, or was quicker
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
