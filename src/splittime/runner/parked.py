"""Memory under tensors, given back and taken again while the tensors stay: with their content kept elsewhere (`Parked`)
or forgotten (`Emptied`).

`device_tensors` finds every tensor that an object of ours leads to, by way of fields, lists and dicts. What is parked
is their storages, each once, so what shares one goes on sharing it. Host memory is pinned, in pieces: pinned memory is
handed out in powers of two, and the last piece alone is rounded up.
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from splittime.core.errors import EngineError

PIECE_BYTES = 1 << 28
OURS = "splittime."
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MADV_DONTNEED = 4


def device_tensors(root: Any, device: torch.device) -> list[Tensor]:
    """On this device, each once, in the order in which they are met."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # kept, so that no address is met twice
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            if one.device.type == device.type:
                found[id(one)] = one
        else:
            waiting.extend(_held(one))
    return list(found.values())


def _held(one: Any) -> Iterable[Any]:
    if isinstance(one, list | tuple | set):
        return one
    if isinstance(one, dict):
        return one.values()
    kind = type(one)
    if not kind.__module__.startswith(OURS):
        return ()
    slots = (getattr(one, name, None) for part in kind.__mro__ for name in getattr(part, "__slots__", ()))
    return [*getattr(one, "__dict__", {}).values(), *slots]


def storages_of(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each once, and none that is empty."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.numel()}
    return list(found.values())


class Parked:
    """Host memory for the content of these tensors' storages. Raises `EngineError` if `room_bytes` do not hold it.

    fill_host, free_device, fill_device: in this order, and the last two again and again.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, room_bytes: int) -> None:
        self._storages = [one for one in storages_of(tensors) if one.resizable()]  # no mapped file, as without a card
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._device = device
        self.num_bytes = sum(self._sizes)
        if self.num_bytes > room_bytes:
            raise EngineError(
                f"weights of {self.num_bytes} bytes do not fit into the {room_bytes} bytes of free host memory; "
                "the engine stays awake",
                code="no_memory",
                value=self.num_bytes,
                limit=room_bytes,
                hint="level=2 drops them",
            )
        self._pieces = _pieces(self.num_bytes, device.type == "cuda")

    def fill_host(self) -> None:
        for place, part in self._pairs():
            place.copy_(part, non_blocking=True)
        self._wait()

    def free_device(self) -> None:
        """Free the tensors' memory on the device. (`fill_device` copies them there again.)"""
        for storage in self._storages:
            storage.resize_(0)

    def fill_device(self) -> None:
        """As they were, at other addresses."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for place, part in self._pairs():
            part.copy_(place, non_blocking=True)
        self._wait()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(bytes in host memory, bytes on the device), as large as both are contiguous."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            content = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            begin = 0
            while begin < size:
                piece, offset = self._pieces[at // PIECE_BYTES], at % PIECE_BYTES
                count = min(size - begin, len(piece) - offset)
                yield piece[offset : offset + count], content[begin : begin + count]
                begin, at = begin + count, at + count

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _pieces(num_bytes: int, is_pinned: bool) -> list[Tensor]:
    sizes = [min(PIECE_BYTES, num_bytes - begin) for begin in range(0, num_bytes, PIECE_BYTES)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]


class Emptied:
    """Tensors whose content may be forgotten; when they are taken again it is zeros."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
        self.num_bytes = sum(num_bytes for _, num_bytes in self._tensors)

    def free(self) -> None:
        for tensor, _ in self._tensors:
            if tensor.device.type == "cpu":
                _give_pages_back(tensor)
            else:
                tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """On a CPU there is nothing to do: what is not written to takes no memory."""
        for tensor, num_bytes in self._tensors:
            if tensor.device.type != "cpu":
                tensor.untyped_storage().resize_(num_bytes)
                tensor.zero_()


def _give_pages_back(tensor: Tensor) -> None:
    """Give the tensor's whole pages back; the rest of it, less than two, is zeroed. (Elsewhere than on Linux the advice
    does not mean this, and the memory stays.)"""
    begin, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first, end = -(-begin // PAGE_BYTES) * PAGE_BYTES, (begin + num_bytes) // PAGE_BYTES * PAGE_BYTES
    if sys.platform != "linux" or end <= first:
        tensor.zero_()
        return
    flat = tensor.view(-1).view(torch.uint8)
    flat[: first - begin].zero_()
    flat[end - begin :].zero_()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
