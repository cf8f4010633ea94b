"""The KV cache's memory: the tensors of each layer, in the layout that `kernels.api` describes, and copies of whole
blocks to slots of host memory and back (`runner.host_store`).

Which block belongs to whom is the scheduler's business. Memory of the CPU is zeroed lazily by the system (`calloc`):
blocks that no request has touched cost nothing. The last block of each layer is the zero block that padding reads.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import EngineError
from splittime.core.step import StepPlan
from splittime.kernels.api import CPU, KvShape, LayerKv
from splittime.kernels.layer import KvGroup
from splittime.runner.host_store import CopyMarks, HostStore

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
    copies of evicted ones.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        num_host_slots: int = 0,
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
        self.num_host_slots = num_host_slots
        self._host = HostStore(self.layers, num_host_slots) if num_host_slots else None

    def move(self, plan: StepPlan) -> CopyMarks | None:
        """Make a plan's copies to host memory, then those from there. None: there are none."""
        if not (plan.offloads or plan.restores):
            return None
        if self._host is None:
            raise EngineError("the plan copies blocks to host memory, and none was set aside for it")
        return self._host.move(self.layers, plan.offloads, plan.restores)

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
