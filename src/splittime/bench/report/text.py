"""How figures are written in a report: milliseconds with four digits, an interval as its two ends; and a line of it."""

import math
from collections.abc import Sequence

from splittime.present.tables import Sentence
from splittime.present.terminal import plain
from splittime.stats.intervals import Estimate, Interval

UNKNOWN = "-"
OUT_OF_REACH = ".."  # an end of an interval that so few requests do not tell


def digits(value: float, most: int = 3) -> str:
    """Four significant digits where there are that many after the point, thousands with commas."""
    if value == 0:
        return "0"
    decimals = min(most, max(0, 3 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def ms(duration_ns: float | None) -> str:
    return UNKNOWN if duration_ns is None else digits(duration_ns / 1e6)


def ends(interval: Interval | None, scale: float = 1.0, between: str = " ") -> str:
    """`47.00 52.10`; empty if there is no interval."""
    if interval is None:
        return ""
    low, high = (OUT_OF_REACH if end is None else digits(end * scale) for end in (interval.low, interval.high))
    return f"{low}{between}{high}"


def estimate(found: Estimate, scale: float = 1.0) -> str:
    """`367.4 [335.6-398.4]`"""
    shown = digits(found.value * scale)
    return f"{shown} [{ends(found.interval, scale, '-')}]" if found.interval else shown


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{digits(100 * share, 2)} %"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`"""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def sentence(name: str, text: str, style: str = "") -> Sentence:
    """Returns a sentence: its subject, and what is said of it, which may be a server's words."""
    return Sentence(plain(text.translate(_SPACES)), style, head=f"{name:<10}", indent=10)


_SPACES = dict.fromkeys(map(ord, "\t\n\v\f\r"), " ")
