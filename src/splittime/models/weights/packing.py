"""From rows in a mapped checkpoint to a packed weight, holding little of it unpacked.

A weight is handed to the backend as a sequence of pieces of at most `PIECE_BYTES`, and the pages of a piece are
released when the next one is asked for: the head of a 128 k vocabulary, half a gigabyte, passes through a few
megabytes. Where a finished blob lies in the cache none of that is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splittime.kernels.api import Ops, WeightScheme
from splittime.models.quant.plan import INTEGERS, kept_bytes
from splittime.models.weights.cache import PackedCache
from splittime.models.weights.checkpoint import Checkpoint

PIECE_BYTES = 8 << 20
PIECE_ROWS = 64  # pieces begin at multiples of these: the kernels' panels are 16 rows


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight: a mapped tensor [out, in] or [out], and the head_dim within which halves become pairs (0:
    they stay as they are)."""

    tensor: Tensor
    head_dim: int = 0

    def arranged(self) -> Tensor:
        return pair_rows(self.tensor, self.head_dim) if self.head_dim else self.tensor


def pair_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the first dimension, [heads * head_dim, ...], within each head: halves become neighbouring pairs."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


class Packer:
    """Packs each weight, or takes it from the cache; counts what the weights take."""

    def __init__(self, ops: Ops, checkpoint: Checkpoint, cache: PackedCache | None) -> None:
        self.ops = ops
        self.checkpoint = checkpoint
        self.cache = cache
        self.num_bytes = 0

    def linear(self, name: str, parts: Sequence[Rows], biases: Sequence[Rows], scheme: WeightScheme) -> Any:
        """The packed weight of these parts, one below the other; `biases` of all of them or of none."""
        out_features, in_features = sum(len(part.tensor) for part in parts), parts[0].tensor.shape[1]
        bias = torch.cat([part.arranged().float() for part in biases]) if biases else None
        blob_bytes = self.ops.packed_bytes(out_features, in_features, scheme)
        self.num_bytes += blob_bytes or kept_bytes(out_features, in_features, scheme)
        cache = self.cache if scheme.name in INTEGERS else None
        if cache is not None and blob_bytes is not None:
            blob = cache.find(name, blob_bytes)
            if blob is not None:
                return self.ops.linear_from_blob(blob, out_features, in_features, bias, scheme)
        packed = self.ops.pack_linear(_Pieces(parts, self.checkpoint), bias, scheme)
        if cache is not None and blob_bytes is not None:
            cache.keep(name, packed.blob)
        return packed


class _Pieces(Sequence[Tensor]):
    """The rows of these parts as a sequence of tensors, each released when the next is taken or the walk ends."""

    def __init__(self, parts: Sequence[Rows], checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._pieces = [piece for part in parts for piece in self._split(part)]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, place: Any) -> Any:
        return self._pieces[place]

    def __iter__(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            yield piece
            self._checkpoint.release(piece)

    def _split(self, rows: Rows) -> Sequence[Tensor]:
        """Rows that change their order are copied, here and now."""
        tensor = rows.tensor
        if rows.head_dim:
            arranged = rows.arranged()
            self._checkpoint.release(tensor)
            return [arranged]
        step = PIECE_BYTES // (tensor.shape[1] * tensor.element_size()) // PIECE_ROWS * PIECE_ROWS
        return tensor.split(max(PIECE_ROWS, step))
