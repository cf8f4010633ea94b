"""The least logit that top_k and top_p keep in each row, exactly, without a sort and without the host.

Three launches. `count_bins` counts how many of a row's tokens lie in each of 256 bins, by how far they are below the
largest: an eighth of a nat each. From the counts alone follows the bin in which the top_k threshold lies, and, since a
bin's tokens weigh between its two edges, a few bins within which the top_p threshold must lie (`_bracket`).
`gather_bracket` copies just those bins' logits to a list, in no particular order, and sums exactly what it leaves out.
`find_floors` then searches the bits of a float over the list, a program a row: usually some dozens of tokens, thousands
where 100,000 tokens are likely. Worst case, all logits alike in one bin, the list is the row: slower, and still exact.

top_p is sought as `1 - top_p`, from the least likely up, since a bound of a sum is worth most where the sum is small.
"""

import triton
import triton.language as tl

from splittime.kernels.triton.weights import LEAST_KEY, filters_of, is_greedy, largest_of, order_key, scale_of, weigh

BINS = tl.constexpr(256)
_BINS_PER_NAT = tl.constexpr(8.0)  # a weight is 0 beyond 29.2 nats, bin 233
_NOTHING = tl.constexpr(255)  # the bin of what weighs nothing
_UNIT_WEIGHT = tl.constexpr(2.0**-42)
_SLACK = tl.constexpr(1e-3)  # well above what rounding in float32 does to the bounds


@triton.jit
def is_filtered(doubles, floats, ints, row):
    top_k, top_p = filters_of(doubles, ints, row)
    return ((top_k > 0) | (top_p < 1.0)) & (is_greedy(floats, row) == 0)


@triton.jit
def _bin_of(logits, weights, most, inverse_temperature):
    """Not less for a lower logit."""
    distance = tl.minimum((most - logits) * inverse_temperature * _BINS_PER_NAT, _NOTHING - 1.0)
    return tl.where(weights > 0, distance, _NOTHING * 1.0).to(tl.int32)


@triton.jit
def count_bins(
    doubles, floats, ints, logits, stride, maxima, counts, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add this chunk's tokens to counts, int32 [N, BINS]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_filtered(doubles, floats, ints, row):
        most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
        inverse, min_p = scale_of(floats, row)
        found = tl.zeros([BINS], tl.int32)
        for begin in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocab), BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            line = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
            found += tl.histogram(_bin_of(line, weigh(line, most, inverse, min_p), most, inverse), BINS)
        bins = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + bins, found, mask=(found > 0) & (bins < _NOTHING), sem="relaxed")


@triton.jit
def _bracket(counts, row, top_k, top_p):
    """-> first and last of the bins where the top_p threshold may lie (none if it is off), the bin of the top_k
    threshold (`_NOTHING` if it keeps all), and how many tokens there are down to that bin and with it."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + row * BINS + bins)
    so_far = tl.cumsum(count, axis=0)
    total = tl.sum(count, axis=0)
    has_k = (top_k > 0) & (top_k < total)
    bin_k = tl.where(has_k, tl.sum((so_far < top_k).to(tl.int32), axis=0), _NOTHING)
    is_whole = (bins <= bin_k) & ((so_far <= top_k) | (has_k == 0))
    heaviest = tl.exp(bins.to(tl.float32) * (-1 / _BINS_PER_NAT))
    lightest = tl.maximum(tl.exp((bins + 1).to(tl.float32) * (-1 / _BINS_PER_NAT)) - _UNIT_WEIGHT, 0.0)
    upper = tl.where(bins <= bin_k, count * heaviest * (1 + _SLACK), 0.0).to(tl.float64)
    lower = tl.where(is_whole, count * lightest * (1 - _SLACK), 0.0).to(tl.float64)
    surely_more = tl.cumsum(lower, axis=0, reverse=True) > (1 - top_p) * tl.sum(upper, axis=0)
    perhaps_more = tl.cumsum(upper, axis=0, reverse=True) > (1 - top_p) * tl.sum(lower, axis=0)
    first = tl.maximum(tl.sum(surely_more.to(tl.int32), axis=0) - 1, 0)
    last = tl.maximum(tl.sum(perhaps_more.to(tl.int32), axis=0) - 1, 0)
    is_off = top_p >= 1.0
    reached = tl.sum(tl.where(bins <= bin_k, count, 0), axis=0)
    return tl.where(is_off, BINS, first), tl.where(is_off, -1, last), bin_k, reached


@triton.jit
def gather_bracket(
    doubles, floats, ints, logits, stride, maxima, counts, masses, num_listed, listed, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append this chunk's tokens of the brackets to listed, float32 [N, vocab], and add to masses, int64 [N, 2], the
    weights above the bracket of top_p, and those of all that top_k may keep and is not listed."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_filtered(doubles, floats, ints, row):
        most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
        inverse, min_p = scale_of(floats, row)
        top_k, top_p = filters_of(doubles, ints, row)
        first, last, bin_k, _ = _bracket(counts, row, top_k, top_p)
        best = tl.load(maxima + row * NUM_CHUNKS + chunk)
        best_bin = _bin_of(best, weigh(best, most, inverse, min_p), most, inverse)
        end = tl.where(
            best_bin <= bin_k, tl.minimum((chunk + 1) * CHUNK, vocab), 0
        )  # all are below the top_k threshold
        above, rest = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for begin in range(chunk * CHUNK, end, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            line = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
            weights = weigh(line, most, inverse, min_p)
            bins = _bin_of(line, weights, most, inverse)
            is_listed = (weights > 0) & (((bins >= first) & (bins <= last)) | (bins == bin_k))
            above += tl.where(bins < first, weights, 0)
            rest += tl.where((bins <= bin_k) & (is_listed == 0), weights, 0)
            num = tl.sum(is_listed.to(tl.int32), axis=0)
            if num > 0:
                place = tl.atomic_add(num_listed + row, num, sem="relaxed")
                rank = tl.cumsum(is_listed.to(tl.int32), axis=0)
                tl.store(listed + row * vocab + place + rank - 1, line, mask=is_listed)
        tl.atomic_add(masses + row * 2, tl.sum(above, axis=0), sem="relaxed")
        tl.atomic_add(masses + row * 2 + 1, tl.sum(rest, axis=0), sem="relaxed")


@triton.jit
def _sums_from(line, num, keys, most, inverse, min_p, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns, int64 [WAYS], how many of the `num` logits at `line` are at or above each of `keys`, int32 [WAYS], or
    what they weigh."""
    found = tl.zeros(keys.shape, tl.int64)
    for begin in range(0, num, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        logits = tl.load(line + places, mask=places < num, other=-float("inf"))
        each = tl.where(places < num, 1, 0).to(tl.int64) if COUNTS else weigh(logits, most, inverse, min_p)
        is_found = order_key(logits)[:, None] >= keys[None, :]
        found += tl.sum(tl.where(is_found, each[:, None], 0), axis=0)
    return found


@triton.jit
def _highest(
    low, high, target, line, num, most, inverse, min_p,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The highest key in [low, high] from which on the list's sum reaches `target`; low if none does. Each round tries
    WAYS keys: a round is mostly waiting, for the list and for the other warps."""
    while low < high:
        step = (high - low + WAYS - 1) // WAYS
        keys = tl.minimum(low + step * (tl.arange(0, WAYS) + 1), high).to(tl.int32)
        sums = _sums_from(line, num, keys, most, inverse, min_p, COUNTS, BLOCK)
        num_reached = tl.sum((sums >= target).to(tl.int32), axis=0)
        high = tl.where(num_reached < WAYS, tl.minimum(low + step * (num_reached + 1), high) - 1, high)
        low = tl.minimum(low + step * num_reached, high)
    return low


@triton.jit
def find_floors(
    doubles, floats, ints, maxima, counts, masses, num_listed, listed, floors, vocab,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """floors: int32 [N], `order_key` of the least logit that is kept."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.full([], LEAST_KEY, tl.int64)
    num = tl.load(num_listed + row)
    if is_filtered(doubles, floats, ints, row) & (num > 0):
        most = largest_of(maxima, row, NUM_CHUNKS, CHUNKS)
        inverse, min_p = scale_of(floats, row)
        top_k, top_p = filters_of(doubles, ints, row)
        _, _, bin_k, reached = _bracket(counts, row, top_k, top_p)
        line = listed + row * vocab
        least, highest = _ends(line, num, BLOCK)
        if bin_k != _NOTHING:
            wanted = top_k - (reached - num)
            floor = _highest(least, highest, wanted, line, num, most, inverse, min_p, True, BLOCK, WAYS)
        if top_p < 1.0:
            keys = tl.full([WAYS], 0, tl.int32) + floor.to(tl.int32)
            listed_mass = tl.max(_sums_from(line, num, keys, most, inverse, min_p, False, BLOCK), axis=0)
            total = tl.load(masses + row * 2 + 1) + listed_mass
            target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64) - tl.load(masses + row * 2)
            low = tl.maximum(least, floor)
            floor = _highest(low, highest, target, line, num, most, inverse, min_p, False, BLOCK, WAYS)
    tl.store(floors + row, floor.to(tl.int32))


@triton.jit
def _ends(line, num, BLOCK: tl.constexpr):
    """The lowest and highest key of the `num` logits at `line`, int64."""
    least, highest = tl.full([BLOCK], 2**31 - 1, tl.int32), tl.full([BLOCK], -(2**31), tl.int32)
    for begin in range(0, num, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        keys = order_key(tl.load(line + places, mask=places < num, other=0.0))
        least = tl.minimum(least, tl.where(places < num, keys, 2**31 - 1))
        highest = tl.maximum(highest, tl.where(places < num, keys, -(2**31)))
    return tl.min(least, axis=0).to(tl.int64), tl.max(highest, axis=0).to(tl.int64)
