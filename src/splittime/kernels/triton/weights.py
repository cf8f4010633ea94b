"""What a token weighs when one is drawn, as an integer, and what a row's draw is made of.

A token's probability over the largest one's, exp((logit - largest) / temperature), is kept in units of 2^-42 as int64.
Sums of integers are exact, so they are the same in any order: a row may be cut among programs as suits the card,
atomics may add in any order, and a row's token depends on nothing but its own logits and draw. 2^42 leaves room for a
vocabulary of two million; what weighs less than a unit (29.1 nats below the largest) is never drawn: with a vocabulary
of 128,000, 2^-25 of all at most.

A filter is a threshold on the logit, as in `runner.sampler`. Logits are compared by `order_key`.

The uniform number of (seed, index of the output) is `runner.sampler` on the device, bit for bit. A captured step
makes its random numbers from seeds and indices that lie on the device; the host owes it nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.draw import DRAW

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_BLOCK = tl.constexpr(128)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit
def uniform_of(seed, index):
    """seed, index: int64 -> float64 in [0, 1)."""
    key = _mix(seed.to(tl.uint64) + _GOLDEN_GAMMA)
    bits = _mix(key + _GOLDEN_GAMMA * (index.to(tl.uint64) + 1))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit(do_not_specialize=["num"])
def _uniforms(seeds, indices, y, num):
    rows = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    is_row = rows < num
    seed, index = tl.load(seeds + rows, mask=is_row, other=0), tl.load(indices + rows, mask=is_row, other=0)
    tl.store(y + rows, uniform_of(seed, index), mask=is_row)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """seeds, indices: int64 [N] on the device -> float64 [N] in [0, 1)."""
    y = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _uniforms[(triton.cdiv(len(seeds), _BLOCK.value),)](seeds, indices, y, len(seeds))
    return y


MAX_VOCAB = 1 << 21
LEAST_KEY = tl.constexpr(-(2**31))  # of no float: as a threshold it keeps all
_UNIT = tl.constexpr(float(2**42))
_MIN_TEMPERATURE = tl.constexpr(1e-5)  # `runner.sampler.MIN_TEMPERATURE`


def _place(name: str, width_bytes: int) -> tl.constexpr:
    """Returns where a field of `DRAW` is in a line, counted in elements of that width."""
    assert DRAW.fields is not None
    return tl.constexpr(DRAW.fields[name][1] // width_bytes)


_TOP_P, _UNIFORM = _place("top_p", 8), _place("uniform", 8)
_TEMPERATURE, _MIN_P, _TOP_K = _place("temperature", 4), _place("min_p", 4), _place("top_k", 4)
_DOUBLES, _FLOATS = tl.constexpr(DRAW.itemsize // 8), tl.constexpr(DRAW.itemsize // 4)


@dataclass(frozen=True, eq=False)
class Draws:
    """How the token of each of N rows is drawn, on the device. Temperature 0 is greedy.

    lines: uint8 [N, DRAW.itemsize], `DRAW`. seeds, indices: int64 [N], which make the uniform number in the
    place of the line's, unless they are None.
    """

    lines: Tensor
    seeds: Tensor | None = None
    indices: Tensor | None = None

    @staticmethod
    def of(draws: np.ndarray, device: torch.device) -> "Draws":
        """One copy to the device, which the host does not wait for."""
        lines = torch.from_numpy(draws.view(np.uint8).reshape(len(draws), DRAW.itemsize))
        return Draws((lines.pin_memory() if device.type == "cuda" else lines).to(device, non_blocking=True))

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lines as float64, float32 and int32: the first arguments of every kernel here."""
        return self.lines.view(torch.float64), self.lines.view(torch.float32), self.lines.view(torch.int32)


@triton.jit
def filters_of(doubles, ints, row):
    """-> top_k (off at 0), top_p (off at 1)."""
    return tl.load(ints + row * _FLOATS + _TOP_K), tl.load(doubles + row * _DOUBLES + _TOP_P)


@triton.jit
def is_greedy(floats, row):
    return tl.load(floats + row * _FLOATS + _TEMPERATURE) == 0.0


@triton.jit
def given_uniform(doubles, row):
    return tl.load(doubles + row * _DOUBLES + _UNIFORM)


@triton.jit
def scale_of(floats, row):
    """-> 1 / temperature, min_p."""
    temperature = tl.maximum(tl.load(floats + row * _FLOATS + _TEMPERATURE), _MIN_TEMPERATURE)
    return tl.math.div_rn(tl.full([], 1.0, tl.float32), temperature), tl.load(floats + row * _FLOATS + _MIN_P)


@triton.jit
def largest_of(maxima, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the largest of a row's logits, from its chunks' maxima [N, NUM_CHUNKS]."""
    chunks = tl.arange(0, CHUNKS)
    found = tl.load(maxima + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=-float("inf"))
    return tl.max(found, axis=0)


@triton.jit
def weigh(logits, most, inverse_temperature, min_p):
    """int64, 0 for what min_p leaves out, and for all where `most` is not finite."""
    weights = tl.exp((logits - most) * inverse_temperature)
    return (tl.where((logits <= most) & (weights >= min_p), weights, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def order_key(logits):
    """int32 in the order of the floats; both zeros are one."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
