"""Memory for packed weights: large ones on huge pages (half the address translations); and files of them, mapped to be
used where they lie.

Linux has a mapped file on huge pages too, where the file system keeps large folios in the page cache (ext4 since 6.16,
xfs, btrfs) and the mapping begins at a multiple of 2 MiB, which it does by itself since 6.7. What either is worth was
measured by decode steps of 1.2 GB of int8, by turns with anonymous huge pages (2 cores with AMX, 60 rounds, median and
quartiles of the ratio): a file on huge pages 1.008 (0.999-1.021), a file on pages of 4 KiB 1.008 (1.000-1.020),
anonymous pages of 4 KiB 1.018 (1.007-1.032). So files are mapped, whatever their pages.
"""

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.native.library import BLOB_ALIGNMENT, library

HUGE_PAGE_BYTES = 2 << 20
POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14
LARGE_BYTES = 8 << 20  # below this, rounding up to huge pages of 2 MiB would cost more than it gains


class _Mapping:
    """An anonymous mapping, shown to numpy by the array interface and given back when the last array of it goes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = library().st_allocate(num_bytes)
        if not self.address:
            raise MemoryError(f"cannot allocate {num_bytes} bytes for weights")
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self._free = library().st_free

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._free(self.address, self.num_bytes)


def allocate(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of zeros, aligned for a blob."""
    if num_bytes >= LARGE_BYTES:
        return torch.from_numpy(np.asarray(_Mapping(num_bytes)))
    raw = torch.zeros(num_bytes + BLOB_ALIGNMENT, dtype=torch.uint8)
    begin = -raw.data_ptr() % BLOB_ALIGNMENT
    return raw[begin : begin + num_bytes]


def extent(tensor: Tensor) -> tuple[int, int]:
    """Where its elements lie: the first byte's address, and that behind the last. Others may lie between them."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size() * bool(tensor.numel())


def release_pages(tensor: Tensor) -> None:
    """Let the system drop the pages of a tensor that was read from a file mapping; its content stays readable, and so
    does what lies between its elements."""
    begin, end = extent(tensor)
    library().st_release_pages(ctypes.c_void_p(begin), end - begin)


class _MappedFile:
    """A mapping of a whole file, to be read alone, shown to numpy by the array interface; numpy would mark it as not to
    be written to, of which torch warns."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        shown = np.frombuffer(self._mapping, dtype=np.uint8)
        data = (shown.__array_interface__["data"][0], False)
        self.__array_interface__ = {"shape": shown.shape, "typestr": "|u1", "data": data, "version": 3}


def map_file(descriptor: int) -> Tensor:
    """uint8 [bytes of the file], in the system's page cache; to be read, never to be written to."""
    return torch.from_numpy(np.asarray(_MappedFile(descriptor)))


def populate(mapped: Tensor) -> None:
    """Read this part of a mapped file into memory, now, if it is not there. Without the GIL; an old system reads it
    when it is used."""
    begin = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = mapped.data_ptr() + mapped.numel() - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), POPULATE_READ)
