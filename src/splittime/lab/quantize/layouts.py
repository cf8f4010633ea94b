"""From integers to the tensors of published checkpoints. b: bits, n = 32 / b integers in a word, lowest bits first.

    pack-quantized   weight_packed int32 [out, in / n], words along a row; weight_scale [out, groups];
                     weight_shape int64 [2] (compressed-tensors)
    int-quantized    weight int8 [out, in], integers less 2^(b-1); weight_scale [out, 1] (compressed-tensors)
    float-quantized  weight e4m3 [out, in]; weight_scale [out, 1] (compressed-tensors)
    gptq             qweight int32 [in / n, out], words down a column; qzeros int32 [groups, out / n], zero points less
                     one; scales float16 [groups, out]; g_idx int32 [in] (GPTQModel's "gptq", formerly AutoGPTQ's)
    awq              qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], nibble i of word k holding output
                     8 k + (0, 2, 4, 6, 1, 3, 5, 7)[i]; scales float16 [groups, out] (AutoAWQ's "gemm")

`models.weights.formats` reads them for the server; `unpack` here reads back what this process wrote.
"""

import numpy as np
import torch
from torch import Tensor

from splittime.lab.quantize.grid import Grid, Rounded, RoundedFloats

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LAYOUTS = {
    "int8": "pack-quantized",
    "fp8": "float-quantized",
    "w4a16": "pack-quantized",
    "w8a8": "int-quantized",
    "awq": "awq",
    "gptq": "gptq",
}
SUFFIXES = {
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
    "int-quantized": ("weight", "weight_scale"),
    "float-quantized": ("weight", "weight_scale"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}
Tensors = dict[str, Tensor]  # by suffix


def pack(layout: str, rounded: Rounded | RoundedFloats, grid: Grid) -> Tensors:
    """The tensors of one weight, by the last part of their names."""
    scales = rounded.scales.to(grid.scale_dtype)
    if isinstance(rounded, RoundedFloats):
        return {"weight": rounded.floats, "weight_scale": scales}
    integers, bits = rounded.integers, grid.bits
    if layout == "pack-quantized":
        shape = torch.tensor(integers.shape, dtype=torch.int64)
        return {"weight_packed": to_words(integers, bits), "weight_scale": scales, "weight_shape": shape}
    if layout == "int-quantized":
        signed = (integers.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return {"weight": signed, "weight_scale": scales}
    zeros = rounded.zeros.t().contiguous()
    by_group = scales.t().contiguous()
    if layout == "gptq":
        words = to_words(integers, bits).t().contiguous()
        zero_words = to_words((zeros.to(torch.int16) - 1).bitwise_and_(grid.top).to(torch.uint8), bits)
        groups = rounded.group_of.to(torch.int32)
        return {"qweight": words, "qzeros": zero_words, "scales": by_group, "g_idx": groups}
    order = torch.tensor(AWQ_ORDER)
    words, zero_words = (
        to_words(rows.unflatten(1, (-1, 8))[..., order].flatten(1), bits) for rows in (integers.t(), zeros)
    )
    return {"qweight": words, "qzeros": zero_words, "scales": by_group}


def unpack(layout: str, tensors: Tensors, grid: Grid) -> Rounded | RoundedFloats:
    """Returns what `pack` was given."""
    if layout == "float-quantized":
        return RoundedFloats(tensors["weight"], tensors["weight_scale"].float())
    bits, half = grid.bits, 2 ** (grid.bits - 1)
    if layout in ("pack-quantized", "int-quantized"):
        scales = tensors["weight_scale"].float()
        if layout == "int-quantized":
            integers = (tensors["weight"].to(torch.int16) + half).to(torch.uint8)
        else:
            integers = from_words(tensors["weight_packed"], bits)[:, : int(tensors["weight_shape"][1])]
        zeros = torch.full_like(scales, half, dtype=torch.uint8)
        return Rounded(integers, scales, zeros, _groups(integers.shape[1], grid))
    scales = tensors["scales"].t().float().contiguous()
    if layout == "gptq":
        integers = from_words(tensors["qweight"].t().contiguous(), bits)
        zeros = from_words(tensors["qzeros"], bits).add_(1).bitwise_and_(grid.top)
        return Rounded(integers, scales, zeros.t().contiguous(), tensors["g_idx"].long())
    place = torch.tensor(AWQ_ORDER).argsort()
    integers, zeros = (
        from_words(tensors[name], bits).unflatten(1, (-1, 8))[..., place].flatten(1).t().contiguous()
        for name in ("qweight", "qzeros")
    )
    return Rounded(integers, scales, zeros, _groups(integers.shape[1], grid))


def _groups(in_features: int, grid: Grid) -> Tensor:
    return torch.arange(in_features) // grid.width(in_features)


def to_words(integers: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n] -> int32 [rows, words], the last word filled up with zeros."""
    values = integers.contiguous().numpy()
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % (32 // bits))))
    if bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(values).view("<i4").astype(np.int32, copy=False))


def from_words(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]."""
    values = words.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        values = np.stack((values & 15, values >> 4), axis=-1).reshape(len(values), -1)
    return torch.from_numpy(values.copy())
