"""A mixture of experts, from the router's choice to the sum: two products over the pairs of `route`, and one sum.

    h[p]   = silu(gate_e x[t]) * (up_e x[t])     both products of a tile in one program, in float32 until h
    y[p]   = share[p] * down_e h[p]              the share on the float32 sums
    out[t] = residual[t] + sum_c y[t k + c]      in float32, in the order of c: the same choices give the same bytes

Weights of all experts of a layer lie in one tensor [E, ..], each as `integers` keeps it, as `w8a8` keeps e4m3 (x is not
rounded here: with few tokens an expert its weights' bytes are what counts), or dense [out, in]. A tile
reads one expert's weights; experts that no token chose have no tile and are not read. With so few tokens that most
choices differ (`ALONE_TOKENS`) each pair is a tile of its own and no tables are made: two launches fewer, and an expert
that two tokens chose comes from the cache the second time.

*Bytes read.* Which experts ran is known on the device only, so a counter there adds up how many did, and `bytes_read`
asks it (and waits for the device): each expert's weights once a call, however many tiles it had. The counter is part
of the kernels, so that what a captured graph reads when it is replayed counts too.

*A row and its batch*: as in `tiles`; `choose` is by pairs for each expert.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.layer import PackedWeight
from splittime.kernels.triton import integers, w8a8
from splittime.kernels.triton.device import dot_dtype
from splittime.kernels.triton.grouped_kernels import Routes, combine, products, route
from splittime.kernels.triton.linear import DenseWeight, Own, kept
from splittime.kernels.triton.tiles import PROCESSORS, Tiles

ALONE_TOKENS = 2
COMBINED = 1024  # outputs of a program of the sum
MAX_EXPERTS = 1024


@dataclass(frozen=True, eq=False)
class Experts:
    """gate_up: of [E, 2 I, H], gate first; down: of [E, H, I]; both stacked over the experts.
    run: int64 [1] on the device, experts that ran so far."""

    gate_up: Own
    down: Own
    num_experts: int
    run: Tensor

    def bytes_read(self) -> dict[str, int]:
        """By scheme, as `Ops.bytes_read`; waits for the device."""
        read: Counter[str] = Counter()
        for weights in (self.gate_up, self.down):
            name, tensors = kept(weights)
            one = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // self.num_experts
            read[f"weights.{name}"] += one * int(self.run.item())
        return dict(read)


def stack_experts(gate_ups: Sequence[PackedWeight], downs: Sequence[PackedWeight]) -> Experts:
    """Stacks weights that `linear` packed, one for each expert. Raises `ConfigError` for experts that are not alike,
    have a bias or an order of columns, or a scheme that there is no grouped product for."""
    gate_up, down = _stacked(gate_ups), _stacked(downs)
    num_experts, device = len(gate_ups), kept(down)[1][0].device
    if num_experts > MAX_EXPERTS:
        raise ConfigError(f"{num_experts} experts a layer", param="experts", value=num_experts, limit=MAX_EXPERTS)
    return Experts(gate_up, down, num_experts, torch.zeros(1, dtype=torch.int64, device=device))


def _stacked(packed: Sequence[PackedWeight]) -> Own:
    alike = [one for one in packed if isinstance(one, Own) and one.bias is None]
    kinds = {_kind(one) for one in alike}
    if len(alike) < len(packed) or len(kinds) != 1 or None in kinds.pop():
        found = ", ".join(sorted({type(one).__name__ for one in packed}))
        message = f"experts kept as {found} have no grouped product"
        raise ConfigError(
            message, param="experts", value=found, limit="dense, int8, int4 or fp8, all alike, without a bias"
        )
    first, stacks = alike[0], [torch.stack(tensors) for tensors in zip(*(kept(one)[1] for one in alike), strict=True)]
    if isinstance(first, DenseWeight):
        return DenseWeight(stacks[0])
    if isinstance(first, w8a8.EightBitWeight):
        return replace(first, values=stacks[0], scales=stacks[1])
    return replace(first, words=stacks[0], scales=stacks[1])


def _kind(one: Own) -> tuple[object, ...]:
    """Returns the key under which experts' tensors may be stacked."""
    if kept(one)[1][0].dtype == torch.int8:  # `w8a8` has int8 for rounded x alone
        return (type(one), None)
    shapes = tuple(tensor.shape for tensor in kept(one)[1])
    if isinstance(one, w8a8.EightBitWeight):
        return type(one), shapes, one.unit
    return type(one), shapes, *((one.group, one.has_minima) if isinstance(one, integers.IntegerWeight) else ())


def choose(num_pairs: int, num_experts: int, out_features: int) -> Tiles:
    """By pairs for each expert, if all were chosen alike: tiles much longer than that would be mostly empty. Where few
    experts make few programs, half as many outputs make twice as many."""
    each = num_pairs / num_experts
    if each <= 16:
        is_scarce = num_pairs * triton.cdiv(out_features, 64) < 2 * PROCESSORS
        return Tiles(16, 32, num_warps=2, num_stages=5) if is_scarce else Tiles(16, 64, num_warps=4, num_stages=4)
    if each <= 64:
        return Tiles(32, 64, num_warps=4, num_stages=3)
    return Tiles(64, 128, num_warps=8, num_stages=2)


def lines(experts: Experts, num_chosen: int) -> list[int]:
    """Numbers of tokens that compile all that this layer will need: one of each line of `choose`."""
    inner, width = experts.gate_up.out_features // 2, experts.down.out_features
    firsts: dict[tuple[object, ...], int] = {}
    for tokens in range(1, 65 * experts.num_experts // num_chosen + 2):
        cuts = (choose(tokens * num_chosen, experts.num_experts, out) for out in (inner, width))
        firsts.setdefault((tokens if tokens <= ALONE_TOKENS else 0, *cuts), tokens)
    return list(firsts.values())


def grouped(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, residual: Tensor | None = None, *,
    gate_up_tiles: Tiles | None = None, down_tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Returns what `kernels.compose.mixture` does once it has chosen: x [T, H], chosen integers [T, k] experts of each
    token, all different, below 0 for none, weights [T, k] -> residual + the experts' outputs times their weights, [T,
    H]. No value on the device is waited for. Tiles, of the same number of tokens: for benchmarks; else `choose`."""
    num_tokens, num_chosen = chosen.shape
    if not num_tokens:
        return torch.zeros_like(x) if residual is None else residual.clone()
    x = x if x.stride(1) == 1 else x.contiguous()
    chosen, shares, num_pairs = chosen.contiguous(), weights.contiguous(), chosen.numel()
    inner, width = experts.gate_up.out_features // 2, experts.down.out_features
    first = gate_up_tiles or choose(num_pairs, experts.num_experts, inner)
    second = down_tiles or choose(num_pairs, experts.num_experts, width)
    is_alone = num_tokens <= ALONE_TOKENS
    routes = None if is_alone else route(chosen, experts.num_experts, first.tokens, experts.run)
    hidden = x.new_empty(num_pairs, inner)
    _run(x, chosen, routes, None, experts.gate_up, hidden, first)
    parts = x.new_empty(num_pairs, width)
    _run(hidden, chosen, routes, shares, experts.down, parts, second)
    out = x.new_empty(num_tokens, width)
    residual = None if residual is None else residual.contiguous()
    combine[(num_tokens, triton.cdiv(width, COMBINED))](
        parts, residual, out, chosen, experts.run, width, num_pairs,
        num_chosen, residual is not None, is_alone, triton.next_power_of_2(num_pairs) if is_alone else 1, COMBINED,
    )  # fmt: skip
    return out


def _run(
    x: Tensor, chosen: Tensor, routes: Routes | None, shares: Tensor | None, weights: Own, y: Tensor, tiles: Tiles
) -> None:
    """One of the two products: gate and up where there are no shares, else down. Every pair alone without routes."""
    lines = chosen.numel() if routes is None else len(routes.tiles)
    weight, scales, constants = _operands(weights, x.dtype)
    products[(lines, triton.cdiv(y.shape[1], tiles.outputs))](
        x, chosen, None if routes is None else routes.pairs, None if routes is None else routes.tiles, shares,
        weight, scales, y, x.shape[1], y.shape[1], weights.out_features, *_sizes(weights), x.stride(0), chosen.shape[1],
        IS_GATED=shares is None, IS_ALONE=routes is None, **constants,
        OUTS=tiles.outputs, TOKENS=tiles.tokens, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip


def _operands(weights: Own, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, dict[str, object]]:
    if isinstance(weights, integers.IntegerWeight):
        return weights.words, weights.scales, {**integers.constants(weights, dtype), "FLOAT8": False}
    plain: dict[str, object] = {
        "BITS": 16,
        "GROUP": 0,
        "UNIT": 1,
        "HAS_MINIMA": False,
        "IS_WHOLE": True,
        "FLOAT8": False,
    }
    plain |= {"DOT": dot_dtype(dtype), "FAST": False}
    if isinstance(weights, w8a8.EightBitWeight):
        return weights.values, weights.scales, {**plain, "UNIT": weights.unit, "FLOAT8": True}
    return weights.weight, None, plain


def _sizes(weights: Own) -> tuple[int, int]:
    """Tiles of integers (or columns) of an output's weights, and groups; see `grouped_kernels`."""
    if isinstance(weights, w8a8.EightBitWeight):
        return weights.values.shape[-1], weights.scales[0].numel()
    if isinstance(weights, DenseWeight):
        return weights.weight.shape[-1], 1
    return weights.words.shape[-3], weights.scales.shape[-2] if weights.group else 1
