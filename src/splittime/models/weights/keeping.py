"""Writes packed weights in the background, so that a first start does not wait for it: to hash the checkpoint, which
gives the file its name, to write the file and to wait for the disk takes longer than to pack the weights.

One thread of the least priority for each model, which holds the weights until they are written. Under load it goes
slowly: a step that wants the cores has them. A Python process that ends waits for it, but not for long
(`PATIENCE_S`); an engine in a process of its own does not. What is not written then, the next start packs again.
A checkpoint that has changed since it was opened is not kept: its hash would name other weights.
"""

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from splittime.models.weights.fingerprints import note_whole, yield_to_others
from splittime.models.weights.packed_file import PackedWriter

log = logging.getLogger("splittime.weights")

PATIENCE_S = 10.0  # of who ends or sleeps
NOT_KEPT = "packed weights are not kept, the next start packs again: %s"
_running: "set[Keeping]" = set()
_starting = threading.Lock()  # who is in `_running` has been started


class Keeping:
    """Writes `blobs` to the file that `path_of` says, unless there is one; with `is_replacing` there is, and it is
    broken. path_of: raises OSError if they are not to be kept."""

    def __init__(
        self, writer: PackedWriter, blobs: dict[str, Tensor], path_of: Callable[[], Path], is_replacing: bool
    ) -> None:
        self._writer, self._blobs, self._path_of, self._is_replacing = writer, blobs, path_of, is_replacing
        self._is_over = False
        self.thread = threading.Thread(target=self._run, name="keep-packed", daemon=True)
        with _starting:
            self.thread.start()
            _running.add(self)

    def end(self, patience_s: float | None) -> None:
        """Wait for it, or tell it to give up and let go of the weights."""
        self.thread.join(patience_s)
        self._is_over = True
        self._blobs = {}

    def _run(self) -> None:
        yield_to_others()
        try:
            path = self._path_of()
            if self._is_replacing or not path.exists():
                self._write(path, self._blobs)
        except (OSError, RuntimeError) as error:  # the latter: no more threads, the interpreter ends (Python 3.12.1)
            log.warning(NOT_KEPT, error)
        finally:
            self._writer.abandon()
            self._blobs = {}
            with _starting:
                _running.discard(self)

    def _write(self, path: Path, blobs: dict[str, Tensor]) -> None:
        self._writer.require_room(sum(map(len, blobs.values())))
        for name, blob in blobs.items():
            if self._is_over:
                return
            self._writer.add(name, blob)
        if self._is_over:  # since before the first: there may have been none
            return
        self._writer.finish(path)
        note_whole(path, path.parent)


def finish(patience_s: float | None = None) -> None:
    """Wait until all that is being written is, or for so long at most for each."""
    with _starting:
        running = list(_running)
    for keeping in running:
        keeping.end(patience_s)


@atexit.register
def _finish_soon() -> None:
    """Ctrl-C gives up: what was being written is removed by the next start."""
    with suppress(KeyboardInterrupt):
        finish(PATIENCE_S)
