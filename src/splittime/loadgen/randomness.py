"""Where all chance in a schedule comes from: streams of PCG64, one for each purpose, named by the seed and words.

Streams of different names are independent, so that another rate draws the same prompts, and more warm-up leaves what is
measured as it was. Distributions are drawn by inversion of uniform numbers (`distributions`), so that the same seed at
another rate or mean gives the same ranks.
"""

from hashlib import blake2b

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def bit_stream(seed: int, *name: str) -> PCG64:
    """The same bits for the same seed and name, on every machine."""
    words = blake2b("\0".join(name).encode(), digest_size=16).digest()
    return PCG64(SeedSequence([seed, *np.frombuffer(words, dtype="<u4").tolist()]))


def stream(seed: int, *name: str) -> Generator:
    return Generator(bit_stream(seed, *name))


def spread(rng: Generator, count: int) -> Floats:
    """Uniform numbers in [0, 1) in random order, exactly one in each of `count` equal parts: they reach both ends."""
    return np.asarray((rng.permutation(count) + rng.random(count)) / max(1, count))


def uniform(rng: Generator, count: int, evenly: bool) -> Floats:
    return spread(rng, count) if evenly else rng.random(count)
