"""The KV cache's memory: one tensor a layer, in the layout that `kernels.api` describes, and whole-block copies.

Which block belongs to whom is the scheduler's business. Memory is zeroed lazily by the system (`calloc`): blocks that
no request has touched cost nothing. The last block of each layer is the zero block that padding reads.
"""

import numpy as np
import torch
from torch import Tensor

from splittime.kernels.api import KvShape


def bytes_per_block(shape: KvShape, num_layers: int, dtype: torch.dtype) -> int:
    """Of all layers together."""
    return num_layers * 2 * shape.num_kv_heads * shape.block_size * shape.head_dim * dtype.itemsize


class KvStore:
    def __init__(self, shape: KvShape, num_layers: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.zero_block = shape.num_blocks
        self.layers = tuple(self._allocate(shape, dtype) for _ in range(num_layers))

    @staticmethod
    def _allocate(shape: KvShape, dtype: torch.dtype) -> Tensor:
        """[num_blocks + 1, 2, num_kv_heads, block_size, head_dim] of zeros."""
        sizes = (shape.num_blocks + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        raw = np.zeros(int(np.prod(sizes)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(sizes)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, (source, target) each, one after the other."""
        for source, target in copies:
            for layer in self.layers:
                layer[target].copy_(layer[source])

    def scrub(self, block_ids: list[int]) -> None:
        """Make what is not finite zero, so that the next owner of these blocks cannot read it through a mask."""
        index = torch.tensor(block_ids)
        for layer in self.layers:
            layer[index] = torch.nan_to_num(layer[index], nan=0.0, posinf=0.0, neginf=0.0)
