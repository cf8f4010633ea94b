"""What the processor can do at most, by short loops of its fastest instructions (`csrc/peaks.h`): no kernel of ours.

Each call runs on the calling thread and lets others run meanwhile; several threads call at once. Which loops a
processor runs is asked once: tiles are tried in a child process, since a processor may advertise them and kill who uses
them.
"""

import ctypes
import functools
from dataclasses import dataclass

from torch import Tensor

from splittime.kernels.native.library import LibraryMissing, library

FLOAT32, BFLOAT16, INT8, READ = range(4)
_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "st_peak_name": (ctypes.c_char_p, (ctypes.c_int32,)),
    "st_peak_kind": (ctypes.c_int32, (ctypes.c_int32,)),
    "st_peak_runs": (ctypes.c_int32, (ctypes.c_int32,)),
    "st_peak_multiply": (ctypes.c_double, (ctypes.c_int32, ctypes.c_int64)),
    "st_peak_forget": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_int64)),
    "st_peak_read": (ctypes.c_int64, (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)),
}


@dataclass(frozen=True)
class Loop:
    """One that this processor runs. kind: FLOAT32, BFLOAT16, INT8, or READ."""

    number: int
    name: str
    kind: int

    def multiply(self, rounds: int) -> float:
        """Returns the operations done; a multiplication and its addition are two."""
        return float(_library().st_peak_multiply(self.number, rounds))

    def read(self, memory: Tensor) -> None:
        """All of it once; uint8, a multiple of 1024 bytes."""
        _library().st_peak_read(self.number, memory.data_ptr(), memory.numel())


@functools.cache
def loops() -> tuple[Loop, ...]:
    """Raises LibraryMissing."""
    lib, found = _library(), []
    number = 0
    while (name := lib.st_peak_name(number)) is not None:
        if lib.st_peak_runs(number):
            found.append(Loop(number, name.decode(), lib.st_peak_kind(number)))
        number += 1
    return tuple(found)


def can_forget() -> bool:
    """Raises LibraryMissing."""
    return bool(_library().st_peak_forget(None, 0))


def forget(memory: Tensor) -> None:
    """Take it out of every cache, whoever shares it: the next read is from memory."""
    _library().st_peak_forget(memory.data_ptr(), memory.numel())


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernels' library. Raises LibraryMissing, too if it was built before it had these loops."""
    lib = library()
    for name, (result, arguments) in _SIGNATURES.items():
        if not hasattr(lib, name):
            raise LibraryMissing(f"the library has no {name}: reinstall")
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
