"""Which kernels the card ran, by torch's profiler: how long it was busy, and with what."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType

SHOWN = 12
Span = tuple[str, float, float]  # name, begin and end in microseconds


@contextmanager
def profiled(found: dict[str, Any]) -> Iterator[None]:
    """Puts `summary` of what ran meanwhile into `found`. Nothing where there is no card, or where the profiler may not
    look (it needs the driver's counters)."""
    if not torch.cuda.is_available():
        yield
        return
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    try:
        profiler.start()
    except RuntimeError as error:
        print(f"no profile: {error}", file=sys.stderr)
        yield
        return
    yield
    torch.cuda.synchronize()
    profiler.stop()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    found |= summary([(event.name, event.time_range.start, event.time_range.end) for event in events])


def summary(spans: list[Span]) -> dict[str, Any]:
    """idle: the share of the time from the first span's begin to the last one's end that none covers; the profiler's
    own work on the host is in it. kernels_ms: the longest, by name. Spans may overlap."""
    if not spans:
        return {}
    by_name: Counter[str] = Counter()
    for name, begin, end in spans:
        by_name[name[:80]] += end - begin  # type: ignore[assignment]
    whole = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    idle = 1 - covered([(begin, end) for _, begin, end in spans]) / whole if whole else 0.0
    return {"idle": idle, "ms": whole / 1e3, "kernels_ms": {name: us / 1e3 for name, us in by_name.most_common(SHOWN)}}


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of their union."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
