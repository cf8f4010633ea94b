"""What a scheme usually costs, beside which a candidate's cost is judged: more than `UNUSUAL` times as much is noted.

A broken scale among many may cost less than the margin, and still several times what the scheme costs when it works. By
how much a scheme that works costs, models differ twofold and more: so the best yardstick is the base itself, rounded to
nearest at loading, over part of the same texts (`Gate`). Where that cannot be had, `known` has the most that was seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splittime.stats.paired import BootstrapEstimate

USUAL_KL = {"weights.int8": 0.0019, "weights.int4": 0.061, "kv.int8": 0.0020}
"""Mean KL, nats, of each claim carried out right: the largest of rounding to nearest that BENCHMARKS.md has of the
packaged model, two babyllamas and (8 bits only) stories260K. Larger models have less."""
UNUSUAL = 2.0


@dataclass(frozen=True)
class Usual:
    """kl: the mean, in nats. whose: the rest of the sentence "times the 0.002 that"."""

    kl: float
    whose: str


def known(claims: Sequence[str]) -> Usual | None:
    """For a candidate with these claims, as in `model.Reads`; None where one was never measured, or there is none."""
    kl = sum(USUAL_KL.get(claim, math.inf) for claim in claims)
    if not claims or math.isinf(kl):
        return None
    return Usual(kl, f"{' and '.join(claims)} cost at most on the models that it was measured on")


def measured(claims: Sequence[str], kl: float) -> Usual:
    return Usual(kl, f"{' and '.join(claims)} cost the base when it is rounded to nearest")


def unusual(usual: Usual | None, kl: BootstrapEstimate) -> str:
    """A sentence where the whole interval is beyond `UNUSUAL` times what is usual, else ""."""
    if usual is None or kl.low <= UNUSUAL * usual.kl:
        return ""
    return (
        f"mean KL is {kl.value:.2g} nats, {kl.value / usual.kl:.1f} times the {usual.kl:.2g} that {usual.whose}: "
        "look for a broken scale"
    )
