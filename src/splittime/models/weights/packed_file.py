"""A file of packed weights: every blob of one model, one after the other, then a table of what is where.

    blob | padding to 4 KiB | blob | ... | table (JSON: name, begin, bytes, CRC-32) | trailer (48 bytes)
    trailer = offset of the table, u64 | SHA-256 of the table | magic

`PackedWriter` writes beside the name and renames at the end, so that a file of that name is whole: two processes that
write the same do not meet, and one that dies leaves only a `.tmp`. Nothing waits for the disk: after a power failure
the sums tell. `PackedReader` starts to read all blobs at once, several threads straight into the memory they will stay
in, and raises `PackedFileBroken` for a file that is cut short or changed.
"""

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
READ_BYTES = 1 << 20
THREADS = 4


class PackedFileBroken(Exception):
    """The file does not hold what it should; says in what."""


class PackedWriter:
    """Write with `add`, then `finish`, or `abandon`. All raise OSError (disk full, not writable)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        self.path = path
        descriptor, waiting = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until it is closed, by us or by our death
        self._waiting = Path(waiting)
        self._descriptor = descriptor
        self._end = 0
        self._table: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, blob: Tensor) -> None:
        """blob: uint8, one dimension."""
        content = _bytes_of(blob)
        self._table[name] = (self._end, len(content), zlib.crc32(content))
        self._write(content)
        self._write(bytes(-self._end % ALIGNMENT))

    def finish(self) -> None:
        table = json.dumps(self._table).encode()
        begin = self._end
        self._write(table)
        self._write(TRAILER.pack(begin, hashlib.sha256(table).digest(), MAGIC))
        self._waiting.replace(self.path)  # while it is ours: nobody takes it for one that was left behind
        self._close()

    def abandon(self) -> None:
        with suppress(OSError):
            self._waiting.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            written = os.write(self._descriptor, left)
            left = left[written:]
            self._end += written


class PackedReader:
    """All blobs of the file at `path`. Raises OSError if there is none, `PackedFileBroken` if it is not whole."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self._table = _read_table(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_bytes = sum(size for _, size, _ in self._table.values())
        self._threads = ThreadPoolExecutor(THREADS)
        self._blobs = {name: self._threads.submit(self._read, *place) for name, place in self._table.items()}

    def take(self, name: str, num_bytes: int) -> Tensor:
        """The blob called `name`, once: uint8 [num_bytes], in memory of its own."""
        future: Future[Tensor] | None = self._blobs.pop(name, None)
        if future is None or self._table[name][1] != num_bytes:
            raise PackedFileBroken(f"it holds no {name} of {num_bytes} bytes")
        return future.result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def _read(self, begin: int, num_bytes: int, checksum: int) -> Tensor:
        blob = memory.allocate(num_bytes)
        view, at, seen = _bytes_of(blob), 0, 0
        while at < num_bytes:
            read = os.preadv(self._descriptor, [view[at : at + READ_BYTES]], begin + at)
            if read == 0:
                raise PackedFileBroken("it ends within a weight")
            seen = zlib.crc32(view[at : at + read], seen)
            at += read
        if seen != checksum:
            raise PackedFileBroken("a weight is not what was written")
        return blob


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


def _remove_stale(folder: Path) -> None:
    """What processes that died were writing: nobody holds its lock."""
    for left in folder.glob(".*.packed.*.tmp"):
        with suppress(OSError), left.open("rb") as file:  # another process is writing it, or was quicker
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
