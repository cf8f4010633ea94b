"""Was what the model claims to keep in fewer bits read in those bits? By the counters of its kernels.

A gate that never ran the quantised path says nothing of it: prompts shorter than a chunk read nothing back from the
cache, a loader that falls back to the unpacked weights reads none of the packed ones. Either is a FAIL with its reason.
"""

from splittime.lab.quality.model import Reads

LEAST_SHARE = 0.9  # of what cannot but have been read; kernels may count without padding


def unread(name: str, reads: Reads | None) -> list[str]:
    """A sentence for each claim that the counters do not bear out."""
    if reads is None:
        return []
    weights = [claim for claim in reads.claims if claim.startswith("weights.")]
    silent = [claim for claim in reads.claims if reads.read.get(claim, 0) <= 0]
    reasons = [f"{name} claims {claim}, and its kernels read no byte of it" for claim in silent]
    if weights and not set(weights) & set(silent):
        reasons += _too_few(name, weights, reads, reads.weights_least)
    caches = [claim for claim in reads.claims if claim.startswith("kv.")]
    if caches and reads.kv_least == 0:
        reasons.append(f"{name} claims {caches[0]}, and no text was long enough to be read back from the cache")
    elif caches and not set(caches) & set(silent):
        reasons += _too_few(name, caches, reads, reads.kv_least)
    return reasons


def _too_few(name: str, claims: list[str], reads: Reads, least: int) -> list[str]:
    read = sum(reads.read.get(claim, 0) for claim in claims)
    if read >= LEAST_SHARE * least:
        return []
    said = " and ".join(claims)
    return [f"{name} claims {said}: {read:,} bytes were read, where the steps that were run need {least:,}"]
