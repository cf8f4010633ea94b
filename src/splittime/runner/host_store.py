"""The memory behind `kv.host`: slots in host memory, pinned where the KV cache is on a card, and copies both ways.

A slot holds one block of all layers, one after the other, so a block is one copy over the bus and not one a layer;
slots that follow each other go together. On the device the block's pieces are gathered from the layers into a staging
buffer, one launch a layer for any number of blocks, and scattered from it on the way back:

    offload    layers [blocks, piece]  --gather-->  staging [n, layers, piece]  --bus-->  slots [n, layers, piece]
    restore    slots  --bus-->  staging  --scatter-->  layers

Pieces are copied as integers, whatever they stand for; scales of int8 and fp8 are a second `Plane` of the same kind.

All of it is put on the stream of the steps and nothing is waited for: the staging buffer is used over and over, a slot
may be overwritten by the next step, and the order of the stream keeps that right. The price is that a step's rows begin
when its copies are done. On a second stream an offload could run beside the rows, but then the block's next owner would
have to wait for its copy's event before the first write, and rows for that of their restores; what it could save is
`offload_ns` of the step records.

Pinned memory is taken in slabs: torch's allocator rounds a request up to a power of two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from splittime.core.plan import StepResult
from splittime.kernels.api import LayerKv
from splittime.runner.device.marks import Mark, to_device

Moves = Sequence[tuple[int, int]]  # block and slot, in this order
SLAB_BYTES = 256 << 20
STAGING_BYTES = 64 << 20
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def staged_blocks(bytes_per_block: int) -> int:
    """How many blocks the staging buffer holds."""
    return max(1, STAGING_BYTES // bytes_per_block)


def staging_bytes(bytes_per_block: int) -> int:
    """Of the device's memory."""
    return staged_blocks(bytes_per_block) * bytes_per_block


@dataclass(frozen=True)
class Moved:
    """A step's copies on the stream. Figures are to be had once `end` is reached."""

    begin: Mark
    between: Mark
    end: Mark

    def told(self, result: StepResult) -> StepResult:
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
        first, count = layers[0], len(layers)
        num_staged = staged_blocks(first.data[0].nbytes * count)
        self._data = Plane(first.data, count, num_slots, num_staged)
        self._scales = None if first.scales is None else Plane(first.scales, count, num_slots, num_staged)

    def move(self, layers: Sequence[LayerKv], offloads: Moves, restores: Moves) -> Moved:
        """Offloads (block, slot), then restores (slot, block)."""
        device = layers[0].data.device
        data = [layer.data for layer in layers]
        scales = [layer.scales for layer in layers if layer.scales is not None]
        back = [(block, slot) for slot, block in restores]
        begin = between = end = Mark(device)
        if offloads:
            self._data.offload(data, offloads)
            if self._scales is not None:
                self._scales.offload(scales, offloads)
            between = end = Mark(device)
        if restores:
            self._data.restore(data, back)
            if self._scales is not None:
                self._scales.restore(scales, back)
            end = Mark(device)
        return Moved(begin, between, end)
