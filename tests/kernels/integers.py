"""Made-up weights of integers, and what the kernels should make of them, in float64."""

import torch
from torch import Tensor

from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.reference import rounding

SCHEMES = [
    WeightScheme("int8"),
    *(WeightScheme("int8", group, has_minima=minima) for group in (16, 32, 64, 128) for minima in (False, True)),
    WeightScheme("int8", 320, has_minima=True),
    *(WeightScheme("int4", group) for group in (32, 64, 96)),
    *(WeightScheme("int4", group, has_zeros=True) for group in (32, 128, 320)),
    *(WeightScheme("int4", group, has_minima=True) for group in (32, 64, 128)),
    WeightScheme("int4", 64, has_zeros=True, has_minima=True),
    WeightScheme("int4", 32, has_minima=True, bits=4),
    WeightScheme("int8", 32, has_minima=True, bits=5),
    WeightScheme("int8", 16, bits=6),
]


def name_of(scheme: WeightScheme) -> str:
    extras = "-zeros" * scheme.has_zeros + "-minima" * scheme.has_minima
    return f"{scheme.name}-{scheme.group}{extras}{f'-bits{scheme.bits}' if scheme.bits else ''}"


def rows_of(scheme: WeightScheme, rows: int, columns: int, seed: int = 0) -> RoundedRows:
    """Integers of the whole range; scales and minima that float16 does not hold."""
    source = torch.Generator().manual_seed(seed)
    groups = -(-columns // scheme.group) if scheme.group else 1
    half = 1 << (scheme.bits or 8) - 1
    low, high = (0, 16) if scheme.name == "int4" else (-half, half)
    integers = torch.randint(low, high, (rows, columns), generator=source).to(torch.int8)
    scales = (torch.rand(rows, groups, generator=source) + 0.5) / 100
    zeros = torch.randint(0, 16, (rows, groups), generator=source).to(torch.uint8) if scheme.has_zeros else None
    minima = torch.randn(rows, groups, generator=source) / 10 if scheme.has_minima else None
    if not scheme.bits:
        return RoundedRows(integers, scales, zeros, minima)
    steps = (torch.rand(rows, 1 + scheme.has_minima, -(-columns // 256), generator=source) / 1000).half().float()
    place = torch.arange(groups) * scheme.group // 256
    multiples = torch.randint(-128, 128, (2, rows, groups), generator=source)
    scales = steps[:, 0, place] * multiples[0]
    if scheme.has_minima:
        minima = steps[:, 1, place] * multiples[1] - scales * (8 if scheme.name == "int4" else 16)
    return RoundedRows(integers, scales, None, minima, steps)


def dense_of(rows: RoundedRows, scheme: WeightScheme) -> Tensor:
    """float64 [rows, columns], by the definition."""
    columns = rows.integers.shape[1]
    group = torch.arange(columns) // (scheme.group or columns)
    zeros = (8 if scheme.name == "int4" else 0) if rows.zeros is None else rows.zeros[:, group].double()
    dense = rows.scales[:, group].double() * (rows.integers.double() - zeros)
    return dense if rows.minima is None else dense - rows.minima[:, group].double()


def sizes_of(rows: RoundedRows, scheme: WeightScheme) -> Tensor:
    """What a product adds up, without signs: the integers less 8 or their zeros times their scales, and the minima."""
    plain = rounding.dequantize(rows.integers, rows.scales, scheme, rows.zeros).double().abs()
    if rows.minima is None:
        return plain
    group = torch.arange(rows.integers.shape[1]) // (scheme.group or rows.integers.shape[1])
    return plain + rows.minima[:, group].double().abs()


def rounded_inputs(x: Tensor, scheme: WeightScheme) -> Tensor:
    """x [T, in] as the native kernels round it, one scale a token, or a token and group: float64."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    width = scheme.group or x.shape[1]
    for begin in range(0, x.shape[1], width):
        part = x[:, begin : begin + width]
        largest = part.abs().amax(1, keepdim=True)
        found[:, begin : begin + width] = (part * (torch.full_like(largest, 127) / largest)).round().double() * (
            largest / 127
        ).double()
    return found


def inputs(tokens: int, columns: int, seed: int = 1) -> Tensor:
    """Tokens of different sizes."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=source) * (torch.rand(tokens, 1, generator=source) * 3 + 0.1)
