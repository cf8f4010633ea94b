"""How a sampler tells every backend how one token is drawn. It is apart from `kernels.api` so that the check of the
native kernels, which `splittime --version` makes, needs no torch."""

import numpy as np

DRAW = np.dtype(
    [("top_p", "f8"), ("uniform", "f8"), ("temperature", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("allowed", "i4")]
)
"""`StDraw` of csrc/splittime.h: temperature 0 is greedy, top_k and min_p are off at 0, top_p at 1,
uniform is in [0, 1). allowed: 0 for every token, else 1 + the line of bits that says which may be drawn."""


def has_bits(words: np.ndarray, count: int) -> np.ndarray:
    """words: uint32 [..., count / 32], the lowest bit first -> bool [..., count], whether each bit is set."""
    octets = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=count, bitorder="little").view(np.bool_)


def has_bit(words: np.ndarray, token_id: int) -> bool:
    """words: uint32 [count / 32], as above. Returns whether this token's bit is set."""
    return bool(words[token_id // 32] >> np.uint32(token_id % 32) & 1)


def one_bit(token_id: int, count: int) -> np.ndarray:
    """Returns so many bits, as above, of which this token's is set."""
    words = np.zeros(-(-count // 32), np.uint32)
    words[token_id // 32] = 1 << token_id % 32
    return words
