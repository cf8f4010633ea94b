"""Embeddings that need no model: hashed n-grams of characters and words.

These measure *wording*, not meaning: two texts are near if they share letters and words.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

DIMENSIONS = 1024
MAX_CHARS = 4000
CHARS = (3, 4)  # lengths of n-grams of characters, over words with their borders
WORD_WEIGHT = 2.0  # of a word, or of two in a row, beside one n-gram of characters

Vector = NDArray[np.float32]


def embedded(text: str) -> Vector:
    """Returns a vector of length 1 (of length 0 for a text without a letter or digit)."""
    found = np.zeros(DIMENSIONS, dtype=np.float32)
    for (part, weight), times in Counter(_parts(text[:MAX_CHARS])).items():
        hashed = zlib.crc32(part.encode("utf-8", "surrogatepass"))
        sign = 1.0 if hashed & 0x80000000 else -1.0
        found[hashed % DIMENSIONS] += sign * weight * (1.0 + math.log(times))
    length = float(np.linalg.norm(found))
    return found / length if length else found


def _parts(text: str) -> Iterator[tuple[str, float]]:
    words = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    for word in words:
        framed = f"<{word}>"
        for size in CHARS:
            yield from ((framed[at : at + size], 1.0) for at in range(len(framed) - size + 1))
        yield f"w {word}", WORD_WEIGHT
    yield from ((f"w {one} {two}", WORD_WEIGHT) for one, two in pairwise(words))
