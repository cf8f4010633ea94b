"""Packed weights kept between starts, in `packed_file`s named by what they were made of.

The name is a hash of the content of every checkpoint file, of the schemes, of the layout's version, of what decides
the order of rows, and of what a quantised checkpoint's config says about its numbers: another checkpoint, however named
or dated, is another name, and a copy of this one is the same. A checkpoint that was never hashed is packed anew without
a look into the cache, since packing takes less time than the hash; `keeping` then hashes it and writes the file.

Only integers are kept, whether they were rounded here or came so. To pack bfloat16 as bfloat16 takes hardly longer than
to read it, so a second copy of all bytes would save nothing.

Trouble with the cache is a warning and costs the time it would have saved, never the start: a folder that cannot be
written, a full disk, a damaged file (made again). Nothing is removed for its age: to clear it, delete the folder.
"""

import errno
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path

from torch import Tensor

from splittime.kernels.native.library import INTERFACE_VERSION
from splittime.models.config import ModelConfig
from splittime.models.quant.plan import WeightPlan
from splittime.models.weights import keeping
from splittime.models.weights.fingerprints import Identity, fingerprints, identities, is_whole, note_whole, recalled
from splittime.models.weights.packed_file import PackedFileBroken, PackedReader, PackedWriter
from splittime.models.weights.source import PLAIN, Source

log = logging.getLogger("splittime.weights")

ROW_ORDER_VERSION = 1  # raise with any change to which rows a packed weight has, or their order (`load`)
NOTE = "packed weights, made from checkpoints by splittime; may be deleted at any time\n"


class PackedCache:
    """One model's packed weights: `find` gives what is there, `keep` takes what is not, `close` makes it last.

    path: None while it is not known; path_of: finds it out. story: for the user, what becomes of it.
    """

    def __init__(self, folder: Path, path: Path | None, path_of: Callable[[], Path]) -> None:
        self._folder, self._path, self._path_of = folder, path, path_of
        self._reader: PackedReader | None = None
        self._writer: PackedWriter | None = None
        self._blobs: dict[str, Tensor] = {}
        self._is_replacing = False
        self.story = f"in {folder}, not written"
        try:
            if path is None:
                self._start_writing()
            else:
                self._reader = PackedReader(path, is_whole(path, folder))
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
            self._blobs[name] = blob

    def remake(self, why: str) -> None:
        """From a broken file to an empty cache."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._replace(why)

    def close(self) -> None:
        """After the last weight."""
        if self._reader is not None:
            assert self._path is not None
            self._reader.close()
            note_whole(self._path, self._folder)
            self.story = f"mapped {_size(self._reader.num_bytes)} of {self._path}"
        elif self._writer is not None:
            total = _size(sum(map(len, self._blobs.values())))
            self.story = f"packed {total}, kept in {self._folder} for the next start (in the background)"
            keeping.Keeping(self._writer, self._blobs, self._path_of, self._is_replacing)

    def abandon(self) -> None:
        """Loading failed: leave nothing half made."""
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.abandon()

    def _replace(self, why: str) -> None:
        log.warning("the packed weights in %s are made again: %s", self._path, why)
        self._is_replacing = True
        self._start_writing()

    def _start_writing(self) -> None:
        """Tells at once where that is not possible."""
        try:
            self._writer = PackedWriter(self._folder)
            (self._folder / "README").write_text(NOTE)
        except OSError as error:
            log.warning(keeping.NOT_KEPT, error)
            self.story = f"not kept: {error}"
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.abandon()


def open_cache(folder: Path, source: Source, config: ModelConfig, plan: WeightPlan) -> PackedCache | None:
    """The cache of this model in these schemes. None if the checkpoint cannot be looked at."""
    files, named = list(source.files), _naming(folder, source, config, plan)
    try:
        known = recalled(files, folder)
        path_of = partial(_found_out, files, identities(files), folder, named)
    except OSError as error:
        log.warning("no cache of packed weights: %s", error)
        return None
    hashes = [one for one in known if one is not None]
    return PackedCache(folder, named(hashes) if len(hashes) == len(files) else None, path_of)


def _found_out(
    files: Sequence[Path], before: list[Identity], folder: Path, named: Callable[[Sequence[str]], Path]
) -> Path:
    """The cache's file; reads all of the checkpoint the first time. Raises OSError where it is no longer the one that
    was packed."""
    hashes = fingerprints(files, folder)
    if identities(files) != before:
        raise OSError(errno.ESTALE, "the checkpoint has changed since it was opened")
    return named(hashes)


def _naming(folder: Path, source: Source, config: ModelConfig, plan: WeightPlan) -> Callable[[Sequence[str]], Path]:
    """A function from the hashes of the source's files to the path; it holds nothing of the source."""
    files, content_of = list(source.files), dict(source.content_of)
    facts = {
        "stored": [source.format, source.recipe],
        "schemes": [astuple(scheme) for scheme in (plan.layers, plan.finer, plan.head, plan.router)],
        "versions": [INTERFACE_VERSION, ROW_ORDER_VERSION],
        "config": [config.architecture, config.hidden_size, config.tie_word_embeddings],
        "heads": [
            [one.num_heads, one.num_kv_heads, one.head_dim, one.position.turned_dims(one.head_dim), one.keys_are_values]
            for one in config.attention
        ],
    }
    if config.deltas:
        facts["deltas"] = [
            [one.num_key_heads, one.num_value_heads, one.key_dim, one.value_dim] for one in config.deltas
        ]
    label = plan.layers.name if source.format == PLAIN else source.format

    def named(hashes: Sequence[str]) -> Path:
        hash_of = dict(zip(files, hashes, strict=True))
        tensors = {tensor: hash_of[path] for tensor, path in content_of.items()}
        key = hashlib.sha256(json.dumps({"tensors": tensors, **facts}, sort_keys=True).encode()).hexdigest()
        return folder / f"{label}-{key[:32]}.packed"

    return named


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
