"""The KV cache's memory: the tensors of each layer, in the layout that `kernels.api` describes, and copies of whole
blocks to slots of host memory and back.

Which block belongs to whom is the scheduler's business. Memory of the CPU is zeroed lazily by the system (`calloc`):
blocks that no request has touched cost nothing. The last block of each layer is the zero block that padding reads.

Slots are the memory behind `kv.cache`, pinned where the KV cache is on a card. A slot holds one block of all layers,
one after the other, so a block is one copy over the bus and not one a layer; slots that follow each other go together.
On the device the block's pieces are gathered from the layers into a staging buffer, one launch a layer for any number
of blocks, and scattered from it on the way back:

    offload    layers [blocks, piece]  --gather-->  staging [n, layers, piece]  --bus-->  slots [n, layers, piece]
    restore    slots  --bus-->  staging  --scatter-->  layers

Pieces are copied as integers, whatever they stand for; tensors of one shape (the values of a KV group's layers, the
scales of int8 and fp8) are a `Plane`.

All of it is put on the stream of the steps and nothing is waited for: the staging buffer is used over and over, a slot
may be overwritten by the next step, and the order of the stream keeps that right. The price is that a step's rows begin
when its copies are done; what a second stream could save is `offload_ns` of the step records.

Pinned memory is taken in slabs: torch's allocator rounds a request up to a power of two.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import Tensor

from splittime.core import this_process
from splittime.core.errors import ConfigError, EngineError
from splittime.core.step import StepPlan, StepResult
from splittime.kernels.api import CPU, KvShape, LayerKv
from splittime.kernels.layer import KvGroup
from splittime.runner.config import RunnerConfig
from splittime.runner.marks import StreamMark, to_device

Moves = Sequence[tuple[int, int]]  # block and slot, in this order
PARAM = "kv_offload_memory_bytes"
SLAB_BYTES = 256 << 20
STAGING_BYTES = 64 << 20
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def staged_blocks(bytes_per_block: int) -> int:
    """Returns how many blocks the staging buffer holds."""
    return max(1, STAGING_BYTES // bytes_per_block)


def staging_bytes(bytes_per_block: int) -> int:
    """Returns the bytes of the device's memory that staging takes."""
    return staged_blocks(bytes_per_block) * bytes_per_block


@dataclass(frozen=True)
class CopyMarks:
    """A step's copies on the stream. Figures are to be had once `end` is reached."""

    begin: StreamMark
    between: StreamMark
    end: StreamMark

    def added_to(self, result: StepResult) -> StepResult:
        """The step's result with what its copies took."""
        offload_ns, restore_ns = self.between.ns_since(self.begin), self.end.ns_since(self.between)
        return msgspec.structs.replace(result, offload_ns=offload_ns, restore_ns=restore_ns)


class Plane:
    """Slots for one kind of a layer's tensors, which are all alike: [blocks, any...]."""

    def __init__(self, like: Tensor, num_layers: int, num_slots: int, num_staged: int) -> None:
        piece = like[0].numel() * like.itemsize
        self._dtype = next(dtype for dtype in INTEGERS if piece % dtype.itemsize == 0)
        shape = (num_layers, piece // self._dtype.itemsize)
        slot_bytes = num_layers * piece
        self._staging = torch.empty(num_staged, *shape, dtype=self._dtype, device=like.device)
        self._slab_slots = max(1, SLAB_BYTES // slot_bytes)
        self._slabs = [
            torch.empty(min(self._slab_slots, num_slots - first), *shape, dtype=self._dtype, pin_memory=like.is_cuda)
            for first in range(0, num_slots, self._slab_slots)
        ]

    def offload(self, layers: Sequence[Tensor], moves: Moves) -> None:
        for part in self._parts(moves):
            index = to_device(torch.tensor([block for block, _ in part]), layers[0].device)
            staged = self._staging[: len(part)]
            for number, layer in enumerate(layers):
                torch.index_select(self._pieces(layer), 0, index, out=staged[:, number])
            for slots, staged_slots in self._runs(part):
                slots.copy_(staged_slots, non_blocking=True)

    def restore(self, layers: Sequence[Tensor], moves: Moves) -> None:
        for part in self._parts(moves):
            for slots, staged_slots in self._runs(part):
                staged_slots.copy_(slots, non_blocking=True)
            index = to_device(torch.tensor([block for block, _ in part]), layers[0].device)
            staged = self._staging[: len(part)]
            for number, layer in enumerate(layers):
                self._pieces(layer).index_copy_(0, index, staged[:, number])

    def _pieces(self, layer: Tensor) -> Tensor:
        return layer.view(layer.shape[0], -1).view(self._dtype)

    def _parts(self, moves: Moves) -> Iterator[Moves]:
        """As many at once as the staging buffer holds, by slot."""
        ordered, count = sorted(moves, key=lambda move: move[1]), len(self._staging)
        return (ordered[first : first + count] for first in range(0, len(ordered), count))

    def _runs(self, part: Moves) -> Iterator[tuple[Tensor, Tensor]]:
        """Slots that follow each other in a slab, with their places in the staging buffer."""
        begins = [0]
        for place, ((_, before), (_, slot)) in enumerate(pairwise(part), 1):
            if slot != before + 1 or slot % self._slab_slots == 0:
                begins.append(place)
        for begin, end in pairwise([*begins, len(part)]):
            slab, first = divmod(part[begin][1], self._slab_slots)
            yield self._slabs[slab][first : first + end - begin], self._staging[begin:end]


class HostStore:
    """Slots for `num_slots` blocks of these layers; another set of layers of the same shapes may be moved later."""

    def __init__(self, layers: Sequence[LayerKv], num_slots: int) -> None:
        num_staged = staged_blocks(sum(layer.data[0].nbytes for layer in layers))
        self._planes = [Plane(alike[0], len(alike), num_slots, num_staged) for alike in _alike(layers)]

    def move(self, layers: Sequence[LayerKv], offloads: Moves, restores: Moves) -> CopyMarks:
        """Offloads (block, slot), then restores (slot, block)."""
        pairs = list(zip(self._planes, _alike(layers), strict=True))
        back = [(block, slot) for slot, block in restores]
        begin = between = end = StreamMark(layers[0].data.device)
        if offloads:
            for plane, tensors in pairs:
                plane.offload(tensors, offloads)
            between = end = StreamMark(layers[0].data.device)
        if restores:
            for plane, tensors in pairs:
                plane.restore(tensors, back)
            end = StreamMark(layers[0].data.device)
        return CopyMarks(begin, between, end)


def _alike(layers: Sequence[LayerKv]) -> list[list[Tensor]]:
    """The layers' tensors, those of one shape and dtype together."""
    found: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for tensor in [layer.data for layer in layers] + [layer.scales for layer in layers if layer.scales is not None]:
        found.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    return list(found.values())


# ---- how many there are


def num_host_slots(config: RunnerConfig, kernels: str, bytes_per_block: int) -> int:
    """0: none asked for. Raises `ConfigError`: the cache is in host memory already, not one block fits, or that much
    is not free; pinned memory is taken whole, at start."""
    asked = config.kv_offload_memory_bytes
    if not asked:
        return 0
    if kernels != "triton":
        message = f"{PARAM} is {asked}, but the KV cache of the {kernels} kernels is in host memory already"
        raise ConfigError(message, param=PARAM, value=asked, limit=0, hint="kv_cache_memory_bytes makes it larger")
    if asked < bytes_per_block:
        message = f"{PARAM} is {asked}, less than one block of KV cache, {bytes_per_block} bytes"
        raise ConfigError(message, param=PARAM, value=asked, limit=bytes_per_block)
    room, ranks = this_process.free_memory_bytes(), config.tensor_parallel_size
    if asked * ranks > room:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        message = f"{PARAM} is {asked}{each}, but {room} bytes of host memory are free"
        raise ConfigError(message, param=PARAM, value=asked, limit=room // ranks)
    return asked // bytes_per_block


def story(num_slots: int, block_size: int, bytes_per_block: int) -> str:
    """For the start-up's list."""
    if not num_slots:
        return "off: evicted blocks are lost"
    num_bytes = num_slots * bytes_per_block
    return f"{num_slots * block_size} tokens of evicted blocks in {num_bytes} bytes of host memory"


ALIGNMENT = 64  # a cache line: a kernel's vectors then do not cross two


def bytes_per_block(groups: Sequence[KvGroup], block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a block in all layers of all groups together, with the scales of int8."""
    scale_bytes = torch.float32.itemsize if _has_scales(dtype) else 0
    per_token = sum(
        len(group.layers) * 2 * group.num_kv_heads * (group.head_dim * dtype.itemsize + scale_bytes) for group in groups
    )
    return block_size * per_token


class KvStore:
    """A pool of blocks for each of a model's `KvGroup`s; all have as many blocks, and a block id means one in each.

    shapes: of the groups, in their order. layers: of each layer of the model. num_host_slots: blocks of host memory for
    copies of evicted ones. states: of each layer that keeps one, `num_state_slots` of so many floats.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        num_host_slots: int = 0,
        state_floats: Sequence[int] = (),
        num_state_slots: int = 0,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.zero_block = num_blocks
        self.shapes = tuple(KvShape(num_blocks, block_size, group.num_kv_heads, group.head_dim) for group in groups)
        stores = {
            layer: _allocate_layer(shape, dtype, device)
            for group, shape in zip(groups, self.shapes, strict=True)
            for layer in group.layers
        }
        self.layers = tuple(stores[layer] for layer in sorted(stores))
        self.num_state_slots = num_state_slots
        self.states = tuple(_zeros((num_state_slots, size), torch.float32, device) for size in state_floats)
        self.num_host_slots = num_host_slots
        self._host = HostStore(self.layers, num_host_slots) if num_host_slots else None
        received: dict[int, bytes] = {}
        self.take_received: Callable[[int], bytes] = received.pop  # by number; `kv_port` has one of its own

    def move(self, plan: StepPlan) -> CopyMarks | None:
        """Make a plan's copies to host memory, then those from there. None: there are none."""
        if plan.imports:
            return self._copy_in(plan.imports)
        if not (plan.offloads or plan.restores):
            return None
        if self._host is None:
            raise EngineError("the plan copies blocks to host memory, and none was set aside for it")
        return self._host.move(self.layers, plan.offloads, plan.restores)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that a block has a piece of, in the order of its bytes: each [blocks, any...]."""
        return [each for layer in self.layers for each in (layer.data, layer.scales) if each is not None]

    def _copy_in(self, imports: Moves) -> CopyMarks:
        """Blocks of the CPU's memory, from what `take_received` gives by number."""
        begin = StreamMark(CPU)
        for number, block_id in imports:
            blob, at = np.frombuffer(self.take_received(number), dtype=np.uint8), 0
            for tensor in self.tensors:
                piece = bytes_of(tensor[block_id])
                piece[:] = blob[at : at + len(piece)]
                at += len(piece)
        return CopyMarks(begin, begin, StreamMark(CPU))

    def scrub(self, block_ids: list[int]) -> None:
        """Make what is not finite zero, so that the next owner of these blocks cannot read it through a mask."""
        index = torch.tensor(block_ids, device=self.layers[0].data.device)
        for layer in self.layers:
            floats = layer.data if layer.scales is None else layer.scales
            floats[index] = torch.nan_to_num(floats[index], nan=0.0, posinf=0.0, neginf=0.0)


def bytes_of(piece: Tensor) -> np.ndarray:
    """Returns the bytes of a piece in the CPU's memory, in place."""
    return piece.view(-1).view(torch.uint8).numpy()


def _has_scales(dtype: torch.dtype) -> bool:
    return dtype in (torch.int8, torch.float8_e4m3fn)


def _allocate_layer(shape: KvShape, dtype: torch.dtype, device: torch.device) -> LayerKv:
    tiles = (shape.num_blocks + 1, 2, shape.num_kv_heads)
    data = _zeros((*tiles, shape.block_size * shape.head_dim), dtype, device)
    return LayerKv(data, _zeros((*tiles, shape.block_size), torch.float32, device) if _has_scales(dtype) else None)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    num_bytes = math.prod(sizes) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(sizes)
