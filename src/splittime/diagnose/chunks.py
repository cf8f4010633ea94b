"""What the chunks of many streams, by the client's clock, tell of the steps of a server that keeps no records of them.

A server gives each running request a token a step, so the gaps between a stream's chunks are steps, and:

    split(outcomes, prefill_ns) -> Gaps     quiet ones, and those in which another request's prompt was computed
    steps_per_prompt(outcomes, prefill_ns)  how many steps that computation took: the chunks that other streams got
    gain_of_more(quiet, running)            what twice the requests at once would serve more: a step of b requests
                                            takes a + c * b, so b requests in it bring b / (a + c * b)

prefill_ns: how long the server says that the computation of a prompt takes, ending with its first chunk. Instants that
are compared are all the client's own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy

from splittime.bench.book.records import Outcome
from splittime.diagnose.rules.evidence import Span, median, overlap_ns, union

MIN_GAPS = 20  # fewer make no median
MIN_BATCHES = 3  # different numbers of streams, to draw a line through
SPREAD = 2.0  # from the fewest to the most of them
MAX_PROMPTS = 300  # to count the steps of: enough for a median


class Gap(NamedTuple):
    request_id: str
    begin_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


class Gaps(NamedTuple):
    quiet: list[Gap]
    during: list[Gap]

    @property
    def quiet_ns(self) -> float | None:
        """A usual one. Where there are hardly any, the tenth percentile of all."""
        if len(self.quiet) >= MIN_GAPS:
            return _by_time(self.quiet)
        every = sorted(gap.ns for gap in self.quiet + self.during)
        return float(every[len(every) // 10]) if len(every) >= MIN_GAPS else None

    @property
    def during_ns(self) -> float | None:
        return _by_time(self.during) if len(self.during) >= MIN_GAPS else None


def _by_time(gaps: Sequence[Gap]) -> float:
    """The median by time, not by number: half of the time lies in gaps that are no longer. One gap of two seconds is
    more of a stream's life than ten of 50 ms beside it."""
    ordered = sorted(gap.ns for gap in gaps)
    half, passed = sum(ordered) / 2, 0
    for ns in ordered:
        passed += ns
        if passed >= half:
            return float(ns)
    return 0.0


def prefill_span(outcome: Outcome, prefill_ns: float) -> Span:
    """The last so many ns before its first chunk, none of them before it was sent."""
    first_ns = outcome.chunk_ns[0]
    return max(outcome.sent_ns or 0, int(first_ns - prefill_ns)), first_ns


def split(outcomes: Sequence[Outcome], prefill_ns: float) -> Gaps:
    """A gap of which at least half lies in some prefill is `during`; of its own request's there is none in it."""
    spans = union(prefill_span(o, prefill_ns) for o in outcomes if o.chunk_ns)
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    found = Gaps([], [])
    for outcome in outcomes:
        for before, after in pairwise(outcome.chunk_ns):
            near = spans[bisect_right(ends, before) : bisect_left(begins, after)]
            part = found.during if overlap_ns(before, after, near) * 2 >= max(1, after - before) else found.quiet
            part.append(Gap(outcome.request_id, before, after))
    return found


def stalled_ns(gaps: Gaps) -> dict[str, float]:
    """By request, what its gaps while others' prompts were computed took beyond a quiet one."""
    lost: dict[str, float] = {}
    for gap in gaps.during:
        lost[gap.request_id] = lost.get(gap.request_id, 0.0) + max(0.0, gap.ns - (gaps.quiet_ns or gap.ns))
    return lost


def steps_per_prompt(outcomes: Sequence[Outcome], prefill_ns: float) -> float | None:
    """The median; None where too few prompts were computed while another stream had its tokens."""
    streams = [o for o in outcomes if len(o.chunk_ns) > 1]
    counts = []
    for outcome in streams[:: max(1, len(streams) // MAX_PROMPTS)]:
        begin_ns, end_ns = prefill_span(outcome, prefill_ns)
        beside = [o.chunk_ns for o in streams if o.chunk_ns[0] <= begin_ns and o.chunk_ns[-1] >= end_ns]
        if beside:
            counts.append(max(bisect_right(at, end_ns) - bisect_right(at, begin_ns) for at in beside))
    return median(counts) if len(counts) >= MIN_BATCHES else None


def gain_of_more(quiet: Sequence[Gap], outcomes: Sequence[Outcome], at_once: float) -> float | None:
    """Requests served by twice as many at once, over those served now; None where the number hardly changed."""
    firsts = sorted(o.chunk_ns[0] for o in outcomes if o.chunk_ns)
    lasts = sorted(o.chunk_ns[-1] for o in outcomes if o.chunk_ns)
    by_batch: dict[int, list[int]] = {}
    for gap in quiet:
        batch = bisect_right(firsts, gap.begin_ns) - bisect_right(lasts, gap.begin_ns)
        by_batch.setdefault(batch, []).append(gap.ns)
    steps = {batch: median(found) or 0.0 for batch, found in by_batch.items() if batch and len(found) >= MIN_GAPS}
    if len(steps) < MIN_BATCHES or max(steps) < SPREAD * min(steps):
        return None
    each, fixed = numpy.polyfit(list(steps), list(steps.values()), 1)
    each, fixed = max(0.0, float(each)), max(0.0, float(fixed))
    return 2 * (fixed + each * at_once) / max(1.0, fixed + 2 * each * at_once)
