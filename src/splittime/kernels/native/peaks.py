"""What the processor can do at most, by short loops of its fastest instructions (`csrc/peaks.h`): no kernel of ours.

A call runs on the calling thread, without the GIL: to measure several cores, call from several threads at once.
"""

import functools
from dataclasses import dataclass

from torch import Tensor

from splittime.kernels.native.library import library

FLOAT32, BFLOAT16, INT8, READ = range(4)


@dataclass(frozen=True)
class Loop:
    """A loop that this processor runs. kind: FLOAT32, BFLOAT16, INT8 (what it multiplies), or READ."""

    number: int
    name: str
    kind: int

    def multiply(self, rounds: int) -> float:
        """Multiply so often. Returns the operations done: a multiplication and its addition are two."""
        return float(library().st_peak_multiply(self.number, rounds))

    def read(self, memory: Tensor) -> None:
        """Read all of it once. memory: uint8, a multiple of 1024 bytes."""
        library().st_peak_read(self.number, memory.data_ptr(), memory.numel())


@functools.cache
def loops() -> tuple[Loop, ...]:
    """The loops that this processor runs; asked once. Raises `LibraryMissing`."""
    lib, found = library(), []
    number = 0
    while (name := lib.st_peak_name(number)) is not None:
        if lib.st_peak_runs(number):
            found.append(Loop(number, name.decode(), lib.st_peak_kind(number)))
        number += 1
    return tuple(found)


def can_forget() -> bool:
    """Returns whether `forget` does anything on this processor. Raises `LibraryMissing`."""
    return bool(library().st_peak_forget(None, 0))


def forget(memory: Tensor) -> None:
    """Take it out of every cache of every core: the next read is from memory."""
    library().st_peak_forget(memory.data_ptr(), memory.numel())
