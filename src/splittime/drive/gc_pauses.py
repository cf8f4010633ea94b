"""Garbage collector pauses, controlled and measured.

A full collection walks every live object: 100 ms and more in a large heap, when nobody expects it. `freeze_heap` moves
what start-up made out of the collector's sight and makes the young generation rarer; `GcPauses` adds up what is left,
and keeps the latest long ones with their times, for a diagnosis to hold against the gaps that requests saw.
"""

import gc

from splittime.core.clock import Clock

YOUNG_GENERATION = 10_000
"""Allocations between young collections; CPython's default of 700 costs a pass every few steps."""
YOUNG_PER_MIDDLE = 4
"""Young collections between two of the middle generation. What a hundred open streams hold survives each young one:
with 20 of 20,000 a middle one had up to 400,000 objects to look at."""
LONG_NS = 1_000_000
MAX_KEPT = 64


def freeze_heap() -> None:
    """Call once, after warm-up: collect, then take all that survives out of later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_GENERATION, YOUNG_PER_MIDDLE, 100)


class GcPauses:
    """Counts collections and their time from its creation to `close`.

    latest: (begin, duration) in ns of the latest of `LONG_NS` and more, oldest first; never changed in place, so that
        any thread may read it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_ns = 0
        self.total_ns = 0
        self.longest_ns = 0
        self.num_collections = 0
        self.latest: tuple[tuple[int, int], ...] = ()
        gc.callbacks.append(self._on_gc)

    def summary(self) -> dict[str, float | int]:
        return {
            "collections": self.num_collections,
            "total_ms": self.total_ns / 1e6,
            "longest_ms": self.longest_ns / 1e6,
        }

    def close(self) -> None:
        gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin_ns = self._clock.now_ns()
            return
        pause_ns = self._clock.now_ns() - self._begin_ns
        self.total_ns += pause_ns
        self.longest_ns = max(self.longest_ns, pause_ns)
        self.num_collections += 1
        if pause_ns >= LONG_NS:
            self.latest = (*self.latest[1 - MAX_KEPT :], (self._begin_ns, pause_ns))
