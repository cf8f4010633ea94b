"""Packed weights kept between starts, in `packed_file`s named by what they were made of.

The name is a hash of the content of every checkpoint file, of the schemes, of the layout's version, of what decides
the order of rows, and of what a quantised checkpoint's config says about its numbers: another checkpoint, however named
or dated, is another name, and a copy of this one is the same.

Only integers are kept, whether they were rounded here or came so. On two busy cores (Zen 3) a bfloat16 checkpoint of
1.2 billion parameters took 8.0 s to round to int4 and 2.1 s to read back (2.5 s with nothing in the page cache); the
first start also hashes it, 2.5 GB at 0.9 GB/s a core. To pack bfloat16 as bfloat16 costs 0.3 s a gigabyte, so a second
copy of all bytes would save nothing.

Trouble with the cache is a warning and costs the time it would have saved, never the start: a folder that cannot be
written, a full disk, a damaged file (made again). Nothing is removed for its age: to clear it, delete the folder.

Files are read once to hash them, and known again by path, size, times and inode (the time of the inode's last change
cannot be set back by a tool that restores the other one). The hash of a file is the SHA-256 of the SHA-256s of its 16
MiB pieces, so that several threads share one file (hashlib lets go of the GIL). The memory is a JSON file beside the
cache; losing it costs one more reading.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from torch import Tensor

from splittime.kernels.native.library import INTERFACE_VERSION
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights.packed_file import PackedFileBroken, PackedReader, PackedWriter
from splittime.models.weights.source import PLAIN, Source

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


log = logging.getLogger("splittime.weights")

ROW_ORDER_VERSION = 1  # raise with any change to which rows a packed weight has, or their order (`load`)
NOTE = "packed weights, made from checkpoints by splittime; may be deleted at any time\n"


class PackedCache:
    """One model's packed weights: `find` gives what is there, `keep` adds what is not, `close` makes it last.

    story: for the user, what became of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: PackedReader | None = None
        self._writer: PackedWriter | None = None
        self.story = f"{path}, not written"
        try:
            self._reader = PackedReader(path)
        except FileNotFoundError:
            self._start_writing()
        except (OSError, PackedFileBroken) as error:
            self._replace(str(error))

    def find(self, name: str, num_bytes: int) -> Tensor | None:
        """The blob, or None while the cache is being made. Raises `PackedFileBroken`: call `remake` and start over."""
        if self._reader is None:
            return None
        try:
            return self._reader.take(name, num_bytes)
        except OSError as error:
            raise PackedFileBroken(str(error)) from error

    def keep(self, name: str, blob: Tensor) -> None:
        if self._writer is not None:
            try:
                self._writer.add(name, blob)
            except OSError as error:
                self._give_up(error)

    def remake(self, why: str) -> None:
        """From a broken file to an empty cache."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._replace(why)

    def close(self) -> None:
        """After the last weight."""
        if self._reader is not None:
            self._reader.close()
            self.story = f"read {_size(self._reader.num_bytes)} from {self.path}"
        elif self._writer is not None:
            try:
                self._writer.finish()
                self.story = f"wrote {_size(self.path.stat().st_size)} to {self.path}"
            except OSError as error:
                self._give_up(error)

    def abandon(self) -> None:
        """Loading failed: leave nothing half made."""
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.abandon()

    def _replace(self, why: str) -> None:
        log.warning("the packed weights in %s are made again: %s", self.path, why)
        self._start_writing()

    def _start_writing(self) -> None:
        try:
            self._writer = PackedWriter(self.path)
            (self.path.parent / "README").write_text(NOTE)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("packed weights are not kept, the next start packs again: %s", error)
        self.story = f"not kept: {error}"
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()


def open_cache(folder: Path, source: Source, config: ModelConfig, plan: WeightPlan) -> PackedCache | None:
    """The cache of this model in these schemes; reads all of the checkpoint the first time. None if that fails."""
    try:
        hashes = dict(zip(source.files, fingerprints(source.files, folder), strict=True))
    except OSError as error:
        log.warning("no cache of packed weights: %s", error)
        return None
    mixers = [layer.mixer for layer in config.layers]
    facts = {
        "tensors": {tensor: hashes[path] for tensor, path in source.content_of.items()},
        "stored": [source.format, source.recipe],
        "schemes": [astuple(scheme) for scheme in (plan.layers, plan.head, plan.router)],
        "versions": [INTERFACE_VERSION, ROW_ORDER_VERSION],
        "config": [config.architecture, config.hidden_size, config.tie_word_embeddings],
        "heads": [[mixer.num_heads, mixer.num_kv_heads, mixer.head_dim] for mixer in mixers],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    label = plan.layers.name if source.format == PLAIN else source.format
    return PackedCache(folder / f"{label}-{key[:32]}.packed")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
