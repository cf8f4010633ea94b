"""What the backends without blobs share: operations composed of smaller ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splittime.kernels import reads
from splittime.kernels.api import CPU, AttentionPlan, LayerKv, LinearShape, NotFused, RunnableLayer, WeightScheme
from splittime.kernels.layer_weights import LayerWeights, PackedNorm, PackedWeight


@dataclass(frozen=True)
class Stack(PackedWeight):
    """Packed weights, the outputs of each beside those of the one before."""

    parts: tuple[PackedWeight, ...]

    def product(self, linear: Callable[[Tensor, PackedWeight], Tensor], x: Tensor, residual: Tensor | None) -> Tensor:
        y = torch.cat([linear(x, part) for part in self.parts], dim=1)
        return y if residual is None else y.add_(residual)


class PlainOps(ABC):
    """Half of `kernels.api.Ops`; the abstract methods are what the other half is made of."""

    name: str
    isa_reason = ""
    activation_dtype: torch.dtype
    device = CPU

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor: ...

    def set_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def product_dtype(self, scheme: WeightScheme) -> str:
        return str(self.activation_dtype).removeprefix("torch.")

    def keeps(self, scheme: WeightScheme) -> bool:
        return True

    def packed_bytes(self, out_features: int, in_features: int, scheme: WeightScheme) -> None:
        return None

    def linear_from_blob(self, blob: Tensor, shape: LinearShape) -> PackedWeight:
        raise NotImplementedError("this backend has no blobs")

    def stack_linear(self, packed: Sequence[PackedWeight]) -> Stack:
        return Stack(tuple(packed))

    def bytes_read(self) -> dict[str, int]:
        return reads.total()

    def fuse(self, layer: LayerWeights) -> RunnableLayer | NotFused:
        return NotFused(f"the {self.name} kernels are single operations")

    def finite(self, x: Tensor) -> list[bool]:
        return x.sum(-1).isfinite().tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    def draw(self, logits: Tensor, draws: np.ndarray) -> list[int] | None:
        return None

    def linear_norm(self, x: Tensor, packed: PackedWeight, residual: Tensor, norm: PackedNorm) -> tuple[Tensor, Tensor]:
        total = self.linear(x, packed, residual)
        return total, self.rms_norm(total, norm)


class HostOps(PlainOps):
    """The same for backends whose rotary embedding and writing of keys and values are operations of their own."""

    @abstractmethod
    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """x [T, H, D] in place: its adjacent pairs turned by `turns`, complex64 [T, D / 2]."""

    @abstractmethod
    def write_kv(self, kv: Tensor, store: LayerKv, plan: AttentionPlan) -> None:
        """kv [T, 2 Hkv, D], keys then values, to the plan's places."""

    def rope_write(
        self, qkv: Tensor, head_norm: PackedNorm | None, turns: Tensor, kv: LayerKv, plan: AttentionPlan
    ) -> None:
        num_kv_heads = kv.data.shape[2]
        turned = qkv[:, :-num_kv_heads]
        if head_norm is not None:
            turned.copy_(self.rms_norm(turned, head_norm))
        self.rotate(turned, turns)
        self.write_kv(qkv[:, -2 * num_kv_heads :], kv, plan)
