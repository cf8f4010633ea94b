"""One random number for each output token, a pure function of (seed, index of the token): no state, no batch.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) built from the
finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants by
Stafford, variant 13): the seed is mixed into a key, the index steps by the golden gamma from it, and the sum is mixed
again. The top 53 bits make a uniform double in [0, 1).
"""

import numpy as np

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """seeds, indices: int64 [N] -> float64 [N] in [0, 1)."""
    with np.errstate(over="ignore"):
        keys = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
        bits = _mix(keys + _GOLDEN_GAMMA * (indices.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
