"""Memory for packed weights: large ones on huge pages (half the address translations, a few per cent of bandwidth)."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.native.library import BLOB_ALIGNMENT, library

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


def release_pages(tensor: Tensor) -> None:
    """Let the system drop the pages of a tensor that was read from a file mapping; its content stays readable."""
    address = ctypes.c_void_p(tensor.data_ptr())
    library().st_release_pages(address, tensor.numel() * tensor.element_size())
