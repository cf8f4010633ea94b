"""Tokens from logits on the device, with the meaning of `runner.sampler`: no sort, no host, and the same token whatever
the batch, since all sums are of integers (`weights`).

A row is cut in chunks, a program each, so that one row of 150,000 logits fills the card as well as 256 do. `draw` finds
each chunk's largest; the thresholds of top_k and top_p (`thresholds`: three launches, left out if the caller knows that
no row has such a filter); each chunk's sum of what is kept; the chunk and then the token where the cumulated sum passes
the uniform number (`picking`). Greedy rows take part in the first and last launch only. No launch depends on a value on
the device, so all of it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from splittime.kernels.triton import picking, thresholds
from splittime.kernels.triton.weights import MAX_VOCAB, Draws


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
    """What the search for thresholds adds up in each row; `picking.scan` sets it to 0. listed: as large as the logits,
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
        picking.choose_largest[(len(logits),)](maxima, places, tokens, logits.shape[1], **chunks.sizes(logits.shape[1]))
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
    picking.sum_chunks[tuple(maxima.shape)](*lines, logits, logits.stride(0), maxima, floors, sums, vocab, **cut)
    picking.pick[(rows,)](
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
    picking.scan[tuple(maxima.shape)](
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
