"""How much worse a candidate may be, and what an interval says of that.

A margin is chosen before the run, by what a user would not accept, and not by what was measured. The defaults lie where
published work on quantised models puts the border between formats that people use and formats that they leave. The
README of llama.cpp's perplexity tool has perplexity up by 0.2 % at 6 bits, 0.4 % at 5, 1.2 to 3.6 % at 4 and 4 to 9 %
at 3 (Llama 2 70B), and a mean KL of 0.0014 at 8 bits and 0.011 at 5 (Llama 3 8B).

A candidate that claims 8 bits is held to 8 bits' standard (`EIGHT_BITS`), several times what such formats cost when
they work: one broken scale among thousands may cost no more than honest 4 bits do, and is a defect all the same.

    PASS          the whole interval is within the margin
    FAIL          the whole interval is beyond it
    INCONCLUSIVE  the interval holds the margin, or there is too little to make an interval of

PASS of all needs PASS of each, so many checks make a wrong PASS no likelier (an intersection-union test: Berger 1982).
A wrong FAIL does become likelier with more checks, by at most 2.5 % each.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from splittime.core.errors import ConfigError
from splittime.stats.paired import BootstrapEstimate

MIN_DOCUMENTS, MIN_TOKENS, MIN_QUESTIONS = 10, 1000, 50
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT JUDGED"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2, "NOT JUDGED": 2}


class Margins(msgspec.Struct, frozen=True, kw_only=True):
    """perplexity: candidate's over base's. kl, kl_p99: nats. top1: share of tokens whose likeliest successor is the
    same. accuracy: share of questions. needle: nats of each token of the answer."""

    perplexity: float = 1.05
    kl: float = 0.05
    kl_p99: float = 0.5
    top1: float = 0.85
    accuracy: float = 0.02
    needle: float = 0.1

    def validate(self) -> None:
        """Raise `ConfigError` naming the first margin that no figure could have."""
        for name, low, high in (
            *(("perplexity", 1.0, math.inf), ("kl", 0.0, math.inf), ("kl_p99", 0.0, math.inf)),
            *(("top1", 0.0, 1.0), ("accuracy", 0.0, 1.0), ("needle", 0.0, math.inf)),
        ):
            value = getattr(self, name)
            if not (low <= value <= high) or math.isinf(value):
                message = f"the margin of {name} is {value:g}, must be from {low:g} to {high:g}"
                raise ConfigError(message, param=f"margin_{name}", value=value, limit=[low, high])


EIGHT_BITS = Margins(perplexity=1.01, kl=0.01, kl_p99=0.1, top1=0.95)


def standard(claims: Sequence[str], stored_bits: int | None = None) -> Margins:
    """For a candidate with these claims, as in `model.Reads`. stored_bits: of its weights in its files, which kernels
    may widen and then claim nothing."""
    has_eight = stored_bits == 8 or bool(claims)
    return EIGHT_BITS if has_eight and not any(claim.endswith("int4") for claim in claims) else Margins()


class MarginRule(msgspec.Struct, frozen=True):
    """is_ceiling: the figure must be at most `limit`, else at least. unit: "nats", "ratio", "share" or "bytes"."""

    figure: str
    is_ceiling: bool
    unit: str
    reason: str


RULES = {
    "perplexity": MarginRule(
        *("perplexity ratio", True, "ratio"),
        "4-bit formats cost 1 to 4 %, 3-bit formats 4 to 9 %; 8 bits a tenth of a per cent",
    ),
    "kl": MarginRule(
        *("KL, mean", True, "nats"),
        "perplexity can stay the same while answers change, KL cannot: 0.001 is usual for 8 bits, 0.01 for 5",
    ),
    "kl_p99": MarginRule(
        *("KL, 99th percentile", True, "nats"),
        "ten times the mean's margin: one token in a hundred is one in each few sentences",
    ),
    "top1": MarginRule(
        *("same likeliest token", False, "share"),
        "a greedy answer leaves the base's at the first token that differs: below this, at every seventh",
    ),
    "accuracy": MarginRule(
        *("right answers, difference", False, "share"),
        "two questions of a hundred: less is hardly told apart with the thousand questions that sets have",
    ),
    "needle": MarginRule(*("needle, log-probability", False, "nats"), "0.1 nats is a tenth of the token's probability"),
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A figure held against its margin. where: which text, length or file. note: why there is no verdict, or more."""

    rule: str
    where: str
    figure: str
    unit: str
    estimate: BootstrapEstimate
    limit: float
    is_ceiling: bool
    verdict: Verdict
    note: str = ""


def judge(
    rule: str, where: str, estimate: BootstrapEstimate, limit: float, thin: str = "", is_bound: bool = False
) -> Check:
    """thin: why there is too little to judge by, if so. is_bound: the true figure may be larger; it can only FAIL."""
    kind = RULES[rule]
    verdict, note = _verdict(estimate, limit, kind.is_ceiling), thin
    if thin:
        verdict = "INCONCLUSIVE"
    elif is_bound and verdict != "FAIL":
        verdict, note = "NOT JUDGED", "a lower bound of the true figure: the server tells the likeliest tokens only"
    return Check(
        rule=rule,
        where=where,
        figure=kind.figure,
        unit=kind.unit,
        estimate=estimate,
        limit=limit,
        is_ceiling=kind.is_ceiling,
        verdict=verdict,
        note=note,
    )


def _verdict(estimate: BootstrapEstimate, limit: float, is_ceiling: bool) -> Verdict:
    low, high = (estimate.low, estimate.high) if is_ceiling else (-estimate.high, -estimate.low)
    border = limit if is_ceiling else -limit
    if high <= border:
        return "PASS"
    return "FAIL" if low > border else "INCONCLUSIVE"


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """FAIL if any failed, PASS if all that could be judged passed and any could."""
    judged = [verdict for verdict in verdicts if verdict != "NOT JUDGED"]
    if "FAIL" in judged:
        return "FAIL"
    return "PASS" if judged and all(verdict == "PASS" for verdict in judged) else "INCONCLUSIVE"
