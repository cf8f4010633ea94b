"""Where a runner's memory goes while it sleeps, and how it comes back.

                        on a card                                  on a CPU
    weights, level 1    to pinned host memory, and back            stay: they are in host memory already
    weights, level 2    dropped; read from their files again       the same
    KV cache            freed, allocated again                     its pages given back, taken again when written to
    captured steps      dropped, captured again                    there are none
    past answers        (no drafts come from them)                 forgotten, where drafts come from them

A card's memory is freed under its tensors: a storage is resized to nothing and back (as FSDP does with its flat
parameters, Zhao et al. 2023), so every tensor, view and tied weight stays the object that it is, and only addresses
change; captured steps hold addresses, so they go first. On a CPU the KV cache keeps its addresses, which fused layers
hold, and loses its pages (madvise(2), MADV_DONTNEED: they read as zeros afterwards, as they did at the start).

What fails while waking is undone, and the runner is asleep as before.

`device_tensors` finds every tensor that an object of ours leads to, by way of fields, lists and dicts. What is parked
is their storages, each once, so what shares one goes on sharing it. Host memory is pinned, in pieces: pinned memory is
handed out in powers of two, and the last piece alone is rounded up.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from splittime.core import this_process
from splittime.core.engine import Moved, Part
from splittime.core.errors import ConfigError, EngineError, SplittimeError, error_from_info
from splittime.models.decoder import Decoder
from splittime.models.weights import keeping
from splittime.models.weights.load import load_decoder, read_config
from splittime.runner import machine
from splittime.runner.torch_runner import TorchRunner

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


MEMORY_MAP = Path("/proc/self/smaps_rollup")
STAY = "weights stay where they are, in host memory; level 2 drops them too"


class TorchSleeper:
    """A `core.engine.Sleeper` for a `TorchRunner` of one process.

    parks: level 1 moves the weights to host memory. forget: forgets what is kept of past requests' texts; None: nothing
    is.
    """

    def __init__(self, runner: TorchRunner, forget: Callable[[], None] | None = None) -> None:
        self._runner, self._forget = runner, forget
        self._device = runner.decoder.ops.device
        self.parks = self._device.type == "cuda"
        self._parked: Parked | None = None
        self._level = 0
        self._graph_sizes: tuple[int, ...] = ()
        self._weights_bytes = 0
        self._kv = Emptied(device_tensors(runner.store, self._device))
        self._parts: list[Part] = []

    @torch.inference_mode()
    def sleep(self, level: int) -> Moved:
        self._parts = []
        before = self._memory_bytes()
        runner = self._runner
        parked = self._park() if level == 1 and self.parks else None
        with self._part("graphs"):
            self._graph_sizes = runner.execution.drop_captured()
        with self._part("weights"):
            if parked is not None:
                parked.free_device()
                self._weights_bytes = parked.num_bytes
            elif level == 2:
                self._weights_bytes = self._held_bytes()
                self._drop_weights()
            else:
                self._weights_bytes = 0
        if self._forget is not None:
            with self._part("texts"):
                self._forget()
        resident = self._memory_bytes()
        with self._part("kv"):
            self._kv.free()
        kv_bytes = max(0, min(self._kv.num_bytes, resident - self._memory_bytes()))
        with self._part("give_back"):
            self._return_memory()
        after = self._memory_bytes()
        self._level, self._parked = level, parked
        if self._device.type == "cuda":
            kv_bytes = self._kv.num_bytes
        note = "" if level == 2 or self.parks else STAY
        return self._moved(before, after, kv_bytes, note)

    @torch.inference_mode()
    def wake(self) -> Moved:
        self._parts = []
        before = self._memory_bytes()
        self._check_room()
        failure = self._take_all()
        if failure is not None:
            self._undo()
            raise failure
        self._parked = None
        kv_bytes = self._kv.num_bytes if self._device.type == "cuda" else 0
        return self._moved(before, self._memory_bytes(), kv_bytes, "")

    def _held_bytes(self) -> int:
        """Returns the bytes of the weights. On a CPU the embedding stays in its file, and is none of them."""
        if self._device.type == "cpu":
            return self._runner.resolved.weights_bytes
        return sum(one.nbytes() for one in storages_of(device_tensors(self._runner.decoder, self._device)))

    def _park(self) -> Parked:
        """A copy of the weights in host memory. Raises with nothing changed."""
        tensors = device_tensors(self._runner.decoder, self._device)
        try:
            with self._part("pin"):
                parked = Parked(tensors, self._device, self._host_room_bytes(tensors))
            with self._part("copy"):
                parked.fill_host()
        except RuntimeError as error:  # torch's words for no (pinned) memory
            message = f"weights could not be copied to host memory, the engine stays awake: {error}"
            raise EngineError(message, code="no_memory", hint="level=2 drops them") from error
        return parked

    def _host_room_bytes(self, tensors: list[Tensor]) -> int:
        """Torch keeps pinned memory that was let go of, of the sleep before for one: it is free if it is needed."""
        free = this_process.free_memory_bytes()
        if self._device.type == "cuda" and sum(one.nbytes() for one in storages_of(tensors)) > free:
            getattr(torch._C, "_host_emptyCache", lambda: torch.accelerator.empty_host_cache())()
            return this_process.free_memory_bytes()
        return free

    def _take_all(self) -> SplittimeError | None:
        """Returns what went wrong, as an error that holds no memory: one with a traceback would keep all that was
        taken."""
        try:
            with self._part("weights"):
                self._restore_weights()
            with self._part("kv"):
                self._kv.take()
            with self._part("graphs"):
                if self._graph_sizes:
                    self._runner.capture(self._graph_sizes)
        except SplittimeError as error:
            return error_from_info(error.info)
        except Exception as error:  # no memory, a file that is gone or broken
            return EngineError(f"{type(error).__name__}: {error}", code="wake_failed")
        return None

    def _restore_weights(self) -> None:
        if self._parked is not None:
            self._parked.fill_device()
        elif self._level == 2:
            self._runner.decoder = self._loaded()

    def _drop_weights(self) -> None:
        """What is left of the decoder is its configuration and its operations; nothing can be run. What still writes
        the weights to the cache holds them until it has, but not for long."""
        keeping.finish(keeping.PATIENCE_S)
        self._runner.decoder = self._runner.decoder.without_weights()
        self._runner.execution.forget_weights()

    def _loaded(self) -> Decoder:
        """From the same files, with the same operations, as the runner was."""
        config, resolved, old = self._runner.config, self._runner.resolved, self._runner.decoder
        path, ops = Path(config.model_path), old.ops
        if read_config(path, config.generation_config) != old.config:
            message = f"{path} holds another model than the one that was put to sleep"
            raise ConfigError(message, param="model", value=str(path), hint="put its config.json back, or start anew")
        plan = machine.choose_weights(config, resolved.dtype, resolved.kernels)
        folder = machine.packed_cache_folder(config.packed_cache)
        is_dummy = config.load_format == "dummy"
        ops.set_threads(config.num_threads or this_process.num_cores())
        try:
            loaded = load_decoder(path, old.config, ops, plan, resolved.max_model_len, folder, is_dummy=is_dummy)
        finally:
            ops.set_threads(resolved.num_threads)
        return loaded.decoder

    def _check_room(self) -> None:
        """Before anything is touched: is what was given back there to be taken?"""
        on_card = self._device.type == "cuda"
        needed = self._weights_bytes + (self._kv.num_bytes if on_card else 0)
        free = torch.cuda.mem_get_info(self._device)[0] if on_card else this_process.free_memory_bytes()
        if needed > free:
            raise EngineError(
                f"{needed} bytes are needed and {free} are free, {needed - free} too few",
                code="no_memory",
                value=needed,
                limit=free,
                hint="end what has taken them, and wake it again",
            )

    def _undo(self) -> None:
        self._runner.execution.drop_captured()
        if self._parked is not None:
            self._parked.free_device()
        elif self._level == 2:
            self._drop_weights()
        self._kv.free()
        self._return_memory()

    def _return_memory(self) -> None:
        """What libraries keep of what was freed goes back to the system."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if sys.platform == "linux":
            getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: 0)(0)  # of glibc alone

    def _memory_bytes(self) -> int:
        with self._part("measure"):
            if self._device.type != "cuda":
                return resident_bytes()
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free

    def _moved(self, before: int, after: int, kv_bytes: int, note: str) -> Moved:
        return Moved(
            weights_bytes=self._weights_bytes,
            kv_bytes=kv_bytes,
            memory="device" if self._device.type == "cuda" else "process",
            memory_before_bytes=before,
            memory_after_bytes=after,
            parts=tuple(self._parts),
            note=note,
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._parts.append((name, begin_ns, time.monotonic_ns()))


def resident_bytes() -> int:
    """Returns what this process holds, its files' pages too; 0 where the system does not tell. (/proc/self/statm would
    be cheaper, and is off by up to a batch of pages for each core since Linux 6.2.)"""
    return this_process.numbers(MEMORY_MAP).get("Rss", 0) * 1024
