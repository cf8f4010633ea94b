"""The KV cache's memory: the tensors of each layer, in the layout that `kernels.api` describes, and whole-block copies,
within it and to slots of host memory (`runner.host_store`).

Which block belongs to whom is the scheduler's business. Memory of the CPU is zeroed lazily by the system (`calloc`):
blocks that no request has touched cost nothing. The last block of each layer is the zero block that padding reads.
"""

import math

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import EngineError
from splittime.core.plan import StepPlan
from splittime.kernels.api import CPU, KvShape, LayerKv
from splittime.runner.host_store import HostStore, Moved

ALIGNMENT = 64  # a cache line: a kernel's vectors then do not cross two


def bytes_per_block(shape: KvShape, num_layers: int, dtype: torch.dtype) -> int:
    """Of all layers together, with the scales of int8."""
    head_bytes = shape.head_dim * dtype.itemsize + (torch.float32.itemsize if _has_scales(dtype) else 0)
    return num_layers * 2 * shape.num_kv_heads * shape.block_size * head_bytes


class KvStore:
    """num_host_slots: blocks of host memory for copies of evicted ones."""

    def __init__(
        self,
        shape: KvShape,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        num_host_slots: int = 0,
    ) -> None:
        self.shape = shape
        self.zero_block = shape.num_blocks
        self.layers = tuple(_allocate_layer(shape, dtype, device) for _ in range(num_layers))
        self.num_host_slots = num_host_slots
        self._host = HostStore(self.layers, num_host_slots) if num_host_slots else None

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) each, one after the other."""
        for source, target in copies:
            for layer in self.layers:
                layer.data[target].copy_(layer.data[source])
                if layer.scales is not None:
                    layer.scales[target].copy_(layer.scales[source])

    def move(self, plan: StepPlan) -> Moved | None:
        """Make a plan's copies: to host memory, from there, within the cache. None: none of the first two."""
        moved = None
        if plan.offloads or plan.restores:
            if self._host is None:
                raise EngineError("the plan copies blocks to host memory, and none was set aside for it")
            moved = self._host.move(self.layers, plan.offloads, plan.restores)
        self.copy_blocks(plan.copies)
        return moved

    def scrub(self, block_ids: list[int]) -> None:
        """Make what is not finite zero, so that the next owner of these blocks cannot read it through a mask."""
        index = torch.tensor(block_ids, device=self.layers[0].data.device)
        for layer in self.layers:
            floats = layer.data if layer.scales is None else layer.scales
            floats[index] = torch.nan_to_num(floats[index], nan=0.0, posinf=0.0, neginf=0.0)


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
