"""A start as a book: parts that touch, from the making of a process to its readiness, and sum to the time between with
`==`. What no part was told for is `unattributed`."""

from collections.abc import Iterable

from splittime.core.sleep import Part

UNATTRIBUTED = "unattributed"


def start_book(started_ns: int, ready_ns: int, told: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts from `started_ns` to `ready_ns`. told: in any order. Of two that overlap the earlier has what
    they share, and what lies outside the start is in no part."""
    parts: list[Part] = []
    at_ns = started_ns
    for name, begin_ns, end_ns in sorted(told, key=lambda part: part[1:]):
        begin_ns, end_ns = max(begin_ns, at_ns), min(end_ns, ready_ns)
        if begin_ns >= end_ns:
            continue
        if at_ns < begin_ns:
            parts.append((UNATTRIBUTED, at_ns, begin_ns))
        parts.append((name, begin_ns, end_ns))
        at_ns = end_ns
    if at_ns < ready_ns:
        parts.append((UNATTRIBUTED, at_ns, ready_ns))
    return tuple(parts)
