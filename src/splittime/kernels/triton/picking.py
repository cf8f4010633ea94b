"""The first launch of a draw and the last two: each chunk's largest logit; what each chunk weighs, and the token at
which the cumulated weight passes the uniform number. `sampling` launches them, and says what a chunk is.
"""

import triton
import triton.language as tl

from splittime.kernels.triton.weights import (
    LEAST_KEY,
    given_uniform,
    is_greedy,
    largest_of,
    order_key,
    scale_of,
    uniform_of,
    weigh,
)


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
