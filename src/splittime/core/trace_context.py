"""W3C's `traceparent`, and the kinds of hops: what a client, a gateway and a server say alike. Standard library alone.

    00-<trace: 32 hex digits>-<span: 16 hex digits>-<flags>

A trace is all that was done for one answer to a user; a span is one part of it. A header that is no `traceparent` is as
none (W3C Trace Context, section 3.2.2.3): tracing never fails a request.
"""

import re
from enum import StrEnum
from typing import NamedTuple

END = r"$(?!\n)"  # the very end, also where `$` stands before a last newline
TRACE_ID, SPAN_ID = rf"^[0-9a-f]{{32}}{END}", rf"^[0-9a-f]{{16}}{END}"
HOP_NAME, CLOCK = rf"^[^\x00-\x1f\x7f]*{END}", rf"^[A-Za-z0-9._:-]{{1,64}}{END}"
MAX_TRACE_HOPS = 256
MAX_HOP_NAME_CHARS = 64
MAX_HOP_OFFSET_NS = 24 * 3600 * 1_000_000_000
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.{0,256})?")
_SAMPLED = "01"


class HopKind(StrEnum):
    """What a hop did."""

    RETRIEVAL = "retrieval"
    RERANK = "rerank"
    EMBEDDING = "embedding"
    TOOL = "tool"
    GUARD = "guard"
    AGENT = "agent"
    REQUEST = "request"
    OTHER = "other"


class TraceContext(NamedTuple):
    """The trace that a request is of, and the span that it lies in."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED}"


NO_TRACE = TraceContext("", "")


def read_traceparent(value: str | None) -> TraceContext:
    """Returns what the header says; `NO_TRACE` for none, and for one that is not valid."""
    match = _TRACEPARENT.fullmatch(value or "")
    if match is None or match[1] == "ff" or (match[1] == "00" and match[4]):
        return NO_TRACE
    if not match[2].strip("0") or not match[3].strip("0"):
        return NO_TRACE
    return TraceContext(match[2], match[3])
