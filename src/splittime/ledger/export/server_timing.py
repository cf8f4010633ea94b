"""The `Server-Timing` header (W3C): where the time up to now went, for browsers' network panels and for `curl -i`.

    Server-Timing: tokenize;dur=0.412, queue;dur=12.040;desc="kv_blocks", prefill;dur=31.700, total;dur=44.152

Durations are milliseconds; a cause goes into `desc`. Repeated stages are added up, so the header stays short.
"""

from collections.abc import Iterable

from splittime.ledger.account import StageInterval
from splittime.ledger.stages import Cause, Stage


def header(intervals: Iterable[StageInterval], start_ns: int) -> str:
    """The header's value. `total` runs from `start_ns` to the end of the last interval."""
    totals_ns: dict[tuple[Stage, Cause | None], int] = {}
    end_ns = start_ns
    for interval in intervals:
        key = (interval.stage, interval.cause)
        totals_ns[key] = totals_ns.get(key, 0) + interval.duration_ns
        end_ns = interval.end_ns
    entries = [_entry(stage.value, ns, cause) for (stage, cause), ns in totals_ns.items()]
    return ", ".join([*entries, _entry("total", end_ns - start_ns, None)])


def _entry(name: str, duration_ns: int, cause: Cause | None) -> str:
    entry = f"{name};dur={duration_ns / 1e6:.3f}"
    return f'{entry};desc="{cause.value}"' if cause is not None else entry
