"""What the backends without blobs share: operations composed of smaller ones, and counting what was read
(`Ops.bytes_read`): bytes of weights and of KV stores, by what they were kept as.

The backends that compute with torch count what each product and each attention takes from memory, once a call and
after it, so that what was loaded and never used counts nothing. The native library counts in its kernels.
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splittime.kernels.api import (
    CPU,
    AttentionBatch,
    AttentionPlan,
    LayerKv,
    LinearShape,
    NotFused,
    RunnableLayer,
    StatePlan,
    WeightScheme,
)
from splittime.kernels.layer import LENGTH_EPS, DeltaSpec, DeltaWeights, LayerWeights, PackedNorm, PackedWeight
from splittime.kernels.low_rank import ProductUses

WHOLE_VECTORS = 128  # elements: a multiple of what torch takes at once, for each instruction set and dtype
ONE_THREAD = 32_768  # elements: torch shares out more than these
_lock = threading.Lock()
_bytes: Counter[str] = Counter()


def count_weight(name: str, *tensors: Tensor | None) -> None:
    """A product read these tensors of a weight kept in the scheme `name`."""
    _count(f"weights.{name}", tensors)


def count_kv(*tensors: Tensor | None) -> None:
    """An attention read these values of a KV store, and their scales."""
    values = tensors[0]
    assert values is not None
    _count(f"kv.{str(values.dtype).removeprefix('torch.')}", tensors)


def count_kv_bytes(dtype: torch.dtype, num_bytes: int) -> None:
    """Count so many bytes of keys and values as read."""
    with _lock:
        _bytes[f"kv.{str(dtype).removeprefix('torch.')}"] += num_bytes


def add(counted: Mapping[str, int]) -> None:
    """What a captured step reads at each replay, by kind."""
    with _lock:
        _bytes.update(counted)


def total() -> dict[str, int]:
    with _lock:
        return dict(_bytes)


def _count(kind: str, tensors: tuple[Tensor | None, ...]) -> None:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    if num_bytes:
        with _lock:
            _bytes[kind] += num_bytes


def each_alike(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Returns `function` of each element, the same bits whatever stands beside it. function: of torch, with an `out`.

    On a CPU torch computes what does not fill its vectors by another formula: the last elements, and the last of each
    thread's part. So it is given pieces that one thread computes, the last filled up to whole vectors.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.device != CPU:
        return function(x, out=y)
    size = ONE_THREAD if torch.get_num_threads() > 1 else max(1, x.numel())
    for piece, made in zip(x.contiguous().view(-1).split(size), y.view(-1).split(size), strict=True):
        missing = -len(piece) % WHOLE_VECTORS
        if missing:
            filled = F.pad(piece, (0, missing))
            made.copy_(function(filled, out=filled)[: len(piece)])
        else:
            function(piece, out=made)
    return y


def turned(heads: Tensor, turns: Tensor) -> Tensor:
    """heads [T, H, D], turns complex [T, D / 2] -> the same in float32, each pair of neighbours turned. (A product of
    complex numbers would be rounded as what is beside it has it.)"""
    first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turns.real[:, None], turns.imag[:, None]
    return torch.stack((first * cosine - second * sine, first * sine + second * cosine), -1).flatten(-2)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """approximate: as torch has it, "none" or "tanh"."""
    return each_alike(partial(torch.ops.aten.gelu.out, approximate=approximate), x)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.api.Ops.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, "tanh").mul_(up)


def sum_pairs(x: Tensor, dim: int) -> Tensor:
    """Returns the sum along `dim`, which is added half to half until one is left: an order that depends on nothing
    else, as that of torch's own sums does on what lies beside them."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = folded if size % 2 == 0 else torch.cat((folded, x.narrow(dim, size - 1, 1)), dim)
    return x.squeeze(dim)


def plan_states(batch: AttentionBatch) -> StatePlan:
    """See `kernels.api.Ops.plan_states`."""
    states = batch.states
    assert states is not None, "a batch of a model whose layers keep states"
    begins, reads, writes = map(torch.tensor, (batch.query_begins, states.reads, states.writes))
    return StatePlan(begins, reads, writes, torch.tensor(states.keeps, dtype=torch.int64).view(-1, 3))


def delta(products: Tensor, weights: DeltaWeights, states: Tensor, plan: StatePlan) -> Tensor:
    """See `kernels.api.Ops.delta`. Each product and each sum is rounded by itself, as an element's own and no other's.

    A slot is [num_value_heads, key_dim, value_dim] of S, then [conv_width - 1, channels] of inputs, the oldest first.
    """
    spec, heads = weights.spec, weights.spec.num_value_heads
    mixed, z, b, a = products.float().split((spec.channels, spec.inner, heads, heads), dim=1)
    found = states[plan.reads.clamp_min(0)].masked_fill_((plan.reads < 0)[:, None], 0.0)
    sums, seen = found.split((spec.inner * spec.key_dim, spec.channels * (spec.conv_width - 1)), dim=1)
    lines, firsts = _behind(seen.unflatten(1, (-1, spec.channels)), mixed, plan.begins)
    convolved = _convolved(lines, firsts, weights.conv, plan.begins)
    decays = each_alike(torch.exp, weights.decay * each_alike(_softplus, a + weights.dt_bias))
    inputs = (*_heads(each_alike(_silu, convolved), spec), decays, each_alike(torch.sigmoid, b))
    order = plan.begins.diff().argsort(descending=True, stable=True)  # rows that have another token are the first
    sums = sums[order].view(-1, heads, spec.key_dim, spec.value_dim)
    left = sorted(_left(plan), reverse=True)
    y, lengths, ranks = torch.empty(len(z), heads, spec.value_dim), plan.begins.diff()[order], order.argsort().tolist()
    for count in range(int(lengths[0]) + 1):
        while left and left[-1][0] == count:
            _, row, slot = left.pop()
            window = lines[firsts[row] + count :][: spec.conv_width - 1]
            states[slot] = torch.cat((sums[ranks[row]].flatten(), window.flatten()))
        active = int((lengths > count).sum())
        tokens = plan.begins[order[:active]] + count
        y[tokens] = _stepped(sums[:active], *(one[tokens] for one in inputs))
    scale = sum_pairs(y * y, 2) / spec.value_dim + spec.norm.eps
    gated = y / scale.sqrt()[..., None] * weights.norm * each_alike(_silu, z).view_as(y)
    return gated.flatten(1).to(products.dtype)


_softplus, _silu = torch.ops.aten.softplus.out, torch.ops.aten.silu.out


def _behind(seen: Tensor, mixed: Tensor, begins: Tensor) -> tuple[Tensor, list[int]]:
    """seen [R, W - 1, channels], mixed [T, channels] -> each row's tokens behind what was seen before them, one row
    below the other, and where each begins."""
    width, places = seen.shape[1], begins.tolist()
    pairs = zip(seen, mixed.split(begins.diff().tolist()), strict=True)
    return torch.cat([part for pair in pairs for part in pair]), [
        begin + r * width for r, begin in enumerate(places[:-1])
    ]


def _convolved(lines: Tensor, firsts: Sequence[int], conv: Tensor, begins: Tensor) -> Tensor:
    """Returns the convolution of each token's channels, [T, channels]."""
    oldest = torch.cat(
        [torch.arange(first, first + n) for first, n in zip(firsts, begins.diff().tolist(), strict=True)]
    )
    y = lines[oldest] * conv[:, 0]
    for place in range(1, conv.shape[1]):
        y += lines[oldest + place] * conv[:, place]
    return y


def _heads(mixed: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of each value head, [T, num_value_heads, dim]."""
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = mixed.split((keys, keys, spec.inner), dim=1)

    def unit(x: Tensor) -> Tensor:
        heads = x.unflatten(1, (spec.num_key_heads, -1))
        units = heads / (sum_pairs(heads * heads, 2) + LENGTH_EPS).sqrt()[..., None]
        return units.repeat_interleave(spec.num_value_heads // spec.num_key_heads, dim=1)

    return unit(q) * spec.key_dim**-0.5, unit(k), v.unflatten(1, (spec.num_value_heads, -1))


def _left(plan: StatePlan) -> list[tuple[int, int, int]]:
    """Returns behind how many tokens of which row the state is left in which slot."""
    lengths, writes = plan.begins.diff().tolist(), plan.writes.tolist()
    ends = [(length, row, slot) for row, (length, slot) in enumerate(zip(lengths, writes, strict=True))]
    return [*ends, *((count, row, slot) for row, count, slot in plan.keeps.tolist())]


def _stepped(sums: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Goes one token on: sums [N, heads, key_dim, value_dim], in place; returns the outputs, [N, heads, value_dim]."""
    sums *= decay[..., None, None]
    missing = (v - sum_pairs(sums * k[..., None], 2)) * strength[..., None]
    sums += k[..., None] * missing[:, :, None]
    return sum_pairs(sums * q[..., None], 2)


@dataclass(frozen=True)
class LayerNorm(PackedNorm):
    """Any backend's. weight: float32 [D], or [heads, D], of each of a row's heads; bias: [D]."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D], or [T, heads * D] -> the same; a new tensor."""
        if self.weight.dim() == 1:
            return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
        heads = F.layer_norm(x.float().unflatten(1, self.weight.shape), self.weight.shape[1:], eps=self.eps)
        return heads.mul_(self.weight).flatten(1).to(x.dtype)


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
    tells_finite = False
    activation_dtype: torch.dtype
    device = CPU

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedWeight, residual: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def rms_norm(self, x: Tensor, packed: PackedNorm) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_mul(gate_up)

    def add_low_rank(self, y: Tensor, x: Tensor, uses: ProductUses) -> None:
        for low_rank, tokens in uses:
            if low_rank is None:
                continue
            inner, column = self.linear(x[tokens], low_rank.down), 0
            for part in low_rank.parts:
                read = inner[:, column : column + part.rank]
                y[:, part.begin : part.end].index_add_(0, tokens, self.linear(read, part.up))
                column += part.rank

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
        return total()

    def fuse(self, layer: LayerWeights) -> RunnableLayer | NotFused:
        return NotFused(f"the {self.name} kernels are single operations")

    def finite(self, x: Tensor) -> list[bool]:
        return x.sum(-1).isfinite().tolist()

    def argmax(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    def draw(self, logits: Tensor, draws: np.ndarray, bits: np.ndarray | None = None) -> list[int] | None:
        return None

    def plan_states(self, batch: AttentionBatch) -> StatePlan:
        return plan_states(batch)

    def delta(self, products: Tensor, weights: DeltaWeights, states: Tensor, plan: StatePlan) -> Tensor:
        return delta(products, weights, states, plan)

    def linear_norm(self, x: Tensor, packed: PackedWeight, residual: Tensor, norm: PackedNorm) -> tuple[Tensor, Tensor]:
        total = self.linear(x, packed, residual)
        return total, self.rms_norm(total, norm)


class HostOps(PlainOps):
    """As `PlainOps`, for backends whose rotary embedding and writing of keys and values are operations of their own."""

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
