"""Tokens from logits on the device, with the meaning of `runner.sampler`: no sort, no host, and the same token whatever
the batch, since all sums are of integers (`weights`).

A row is cut in chunks, a program each, so that one row of 150,000 logits fills the card as well as 256 do. `draw` finds
each chunk's largest; the thresholds of top_k and top_p (`thresholds`: three launches, left out if the caller knows that
no row has such a filter); each chunk's sum of what is kept; the chunk and then the token where the cumulated sum passes
the uniform number (`pick`). Greedy rows take part in the first and last launch only. No launch depends on a value on
the device, so all of it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splittime.kernels.triton import thresholds
from splittime.kernels.triton.weights import (
    LEAST_KEY,
    MAX_VOCAB,
    Draws,
    given_uniform,
    is_greedy,
    largest_of,
    order_key,
    scale_of,
    uniform_of,
    weigh,
)


@dataclass(frozen=True)
class Chunks:
    """chunk: tokens a program, a whole number of blocks; block: of those, at once. listed: of a list of candidates, at
    once; ways: thresholds tried on them at once."""

    chunk: int
    block: int = 1024
    listed: int = 512
    ways: int = 16
    num_warps: int = 4

    def sizes(self, vocab: int) -> dict[str, int]:
        """The constants of every kernel: chunks of a row, and those rounded up to a power of two."""
        num_chunks = triton.cdiv(vocab, self.chunk)
        return {"NUM_CHUNKS": num_chunks, "CHUNKS": triton.next_power_of_2(num_chunks), "num_warps": self.num_warps}

    def cut(self, vocab: int) -> dict[str, int]:
        return {**self.sizes(vocab), "CHUNK": self.chunk, "BLOCK": self.block}


def chunks_of(num_rows: int, vocab: int) -> Chunks:
    """As short as makes no more than 512 programs, four a multiprocessor of an H200; of more logits, longer chunks save
    programs that each read the row's counts again. Three sizes only: each is compiled for itself."""
    elements = num_rows * vocab
    return Chunks(1024 if elements <= 512 * 1024 else 4096 if elements <= 4096 * 1024 else 8192)


def lines(max_rows: int, vocab: int) -> list[int]:
    """Numbers of rows that compile all that so many rows will need: the first of each size of `chunks_of`."""
    firsts: dict[Chunks, int] = {}
    for rows in range(1, max_rows + 1):
        firsts.setdefault(chunks_of(rows, vocab), rows)
    return list(firsts.values())


@dataclass(frozen=True, eq=False)
class _Counters:
    """What the search for thresholds adds up in each row; `scan` sets it to 0. listed: as large as the logits,
    because a row of equal logits is a list of all of them."""

    counts: Tensor
    masses: Tensor
    num_listed: Tensor
    listed: Tensor

    @staticmethod
    def of(logits: Tensor) -> "_Counters":
        rows, vocab = logits.shape
        shapes = ((thresholds.BINS.value, torch.int32), (2, torch.int64), (1, torch.int32), (vocab, torch.float32))
        return _Counters(*(logits.new_empty(rows, width, dtype=dtype) for width, dtype in shapes))


def argmax(logits: Tensor, chunks: Chunks | None = None) -> Tensor:
    """logits: float32 [N, vocab] -> int64 [N], the first of the largest of each row."""
    chunks, tokens = _checked(logits, chunks), logits.new_empty(len(logits), dtype=torch.int64)
    if len(logits):
        maxima, places = _scan(logits, None, chunks)
        choose_largest[(len(logits),)](maxima, places, tokens, logits.shape[1], **chunks.sizes(logits.shape[1]))
    return tokens


def draw(logits: Tensor, draws: Draws, filters: bool = True, chunks: Chunks | None = None) -> Tensor:
    """logits: float32 [N, vocab], finite or -inf -> int64 [N] token ids on the device; of a row of -inf the first,
    of one with NaN or infinity any.

    filters: False says that no row has top_k or top_p (they are then not looked at).
    """
    chunks, tokens = _checked(logits, chunks), logits.new_empty(len(logits), dtype=torch.int64)
    if not len(logits):
        return tokens
    rows, vocab = logits.shape
    cut, lines = chunks.cut(vocab), draws.pointers()
    counters = _Counters.of(logits) if filters else None
    maxima, places = _scan(logits, counters, chunks)
    floors = None if counters is None else _floors(logits, lines, maxima, counters, chunks)
    sums = maxima.new_empty(maxima.shape, dtype=torch.int64)
    sum_chunks[tuple(maxima.shape)](*lines, logits, logits.stride(0), maxima, floors, sums, vocab, **cut)
    pick[(rows,)](
        *lines, draws.seeds, draws.indices, logits, logits.stride(0), maxima, places, floors, sums, tokens, vocab, **cut
    )
    return tokens


def _checked(logits: Tensor, chunks: Chunks | None) -> Chunks:
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32"
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    assert 0 < logits.shape[1] <= MAX_VOCAB, f"a vocabulary of {logits.shape[1]} is not within 1 to {MAX_VOCAB}"
    return chunks or chunks_of(*logits.shape)


def _scan(logits: Tensor, counters: _Counters | None, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """-> each chunk's largest logit, float32 [N, chunks], and its first place, int32."""
    rows, vocab = logits.shape
    cut = chunks.cut(vocab)
    del cut["CHUNKS"]
    maxima = logits.new_empty(rows, cut["NUM_CHUNKS"])
    places = torch.empty_like(maxima, dtype=torch.int32)
    zeroed = (None,) * 3 if counters is None else (counters.counts, counters.masses, counters.num_listed)
    scan[tuple(maxima.shape)](
        logits, logits.stride(0), maxima, places, *zeroed, vocab, BINS=thresholds.BINS.value, **cut
    )
    return maxima, places


def _floors(logits: Tensor, lines: tuple[Tensor, ...], maxima: Tensor, counters: _Counters, chunks: Chunks) -> Tensor:
    """int32 [N], `weights.order_key` of the least logit that top_k and top_p keep."""
    (rows, vocab), cut = logits.shape, chunks.cut(logits.shape[1])
    read, grid = (*lines, logits, logits.stride(0), maxima, counters.counts), tuple(maxima.shape)
    floors = maxima.new_empty(rows, dtype=torch.int32)
    lists = (counters.masses, counters.num_listed, counters.listed)
    thresholds.count_bins[grid](*read, vocab, **cut)
    thresholds.gather_bracket[grid](*read, *lists, vocab, **cut)
    thresholds.find_floors[(rows,)](
        *lines, maxima, counters.counts, *lists, floors, vocab,
        BLOCK=chunks.listed, WAYS=chunks.ways, **chunks.sizes(vocab),
    )  # fmt: skip
    return floors


@triton.jit
def scan(
    logits, stride, maxima, places, counts, masses, num_listed, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The largest logit of a chunk and its first place; the row's counters are set to 0, unless they are None."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, place = tl.full([BLOCK], -float("inf"), tl.float32), chunk * CHUNK + tl.arange(0, BLOCK)
    for begin in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        line = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
        place = tl.where(line > best, ids, place)
        best = tl.maximum(best, line)
    most = tl.max(best, axis=0)
    tl.store(maxima + row * NUM_CHUNKS + chunk, most)
    tl.store(places + row * NUM_CHUNKS + chunk, tl.min(tl.where(best == most, place, vocab), axis=0))
    if counts is not None:  # noqa: SIM102 (known when it is compiled, unlike the next)
        if chunk == 0:
            tl.store(counts + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            tl.store(masses + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int64))
            tl.store(num_listed + row, 0)


@triton.jit
def _first_largest(maxima, places, row, vocab, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
    found = tl.load(maxima + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=-float("inf"))
    place = tl.load(places + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=2**31 - 1)
    return tl.minimum(tl.min(tl.where(found == most, place, 2**31 - 1), axis=0), vocab - 1)


@triton.jit
def choose_largest(maxima, places, tokens, vocab, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens + row, _first_largest(maxima, places, row, vocab, NUM_CHUNKS, CHUNKS).to(tl.int64))


@triton.jit
def _kept(line, ids, vocab, floor, most, inverse, min_p):
    """The weights of these tokens, 0 for those that are filtered out."""
    logits = tl.load(line + ids, mask=ids < vocab, other=-float("inf"))
    return tl.where(order_key(logits) >= floor, weigh(logits, most, inverse, min_p), 0)


@triton.jit
def sum_chunks(
    doubles, floats, ints, logits, stride, maxima, floors, sums, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums: int64 [N, NUM_CHUNKS], what is kept of each chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_greedy(floats, row) == 0:
        most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
        inverse, min_p = scale_of(floats, row)
        floor = LEAST_KEY if floors is None else tl.load(floors + row)
        found = tl.zeros([BLOCK], tl.int64)
        is_kept = order_key(tl.load(maxima + row * NUM_CHUNKS + chunk)) >= floor  # else nothing of the chunk is
        end = tl.where(is_kept, tl.minimum((chunk + 1) * CHUNK, vocab), 0)
        for begin in range(chunk * CHUNK, end, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            found += _kept(logits + row * stride, ids, vocab, floor, most, inverse, min_p)
        tl.store(sums + row * NUM_CHUNKS + chunk, tl.sum(found, axis=0))


@triton.jit
def pick(
    doubles, floats, ints, seeds, indices, logits, stride, maxima, places, floors, sums, tokens, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token at which the cumulated weight passes the uniform number's share of all. Whatever the logits are,
    it is a token of the vocabulary: the next step may look it up before the host knows that they were not finite."""
    row = tl.program_id(0).to(tl.int64)
    token = _first_largest(maxima, places, row, vocab, NUM_CHUNKS, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    is_drawn = is_greedy(floats, row) == 0
    found = tl.load(sums + row * NUM_CHUNKS + chunks, mask=(chunks < NUM_CHUNKS) & is_drawn, other=0)
    total = tl.sum(found, axis=0)
    if total > 0:
        uniform = given_uniform(doubles, row)
        if seeds is not None:
            uniform = uniform_of(tl.load(seeds + row), tl.load(indices + row))
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        chunk = tl.sum((tl.cumsum(found, axis=0) <= target).to(tl.int32), axis=0)
        below = tl.sum(tl.where(chunks < chunk, found, 0), axis=0)
        most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
        inverse, min_p = scale_of(floats, row)
        floor = LEAST_KEY if floors is None else tl.load(floors + row)
        token = chunk * CHUNK
        for begin in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            weights = _kept(logits + row * stride, ids, vocab, floor, most, inverse, min_p)
            token += tl.sum((below + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
            below += tl.sum(weights, axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))
