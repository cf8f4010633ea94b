"""`/ledger/hops`: the body that a client posts its hops in, and what is answered. Bodies, no sockets."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from splittime.api.decode import decode_body
from splittime.api.schema import Strict
from splittime.core.errors import NotFound, RequestError
from splittime.core.trace_context import (
    CLOCK,
    HOP_NAME,
    MAX_HOP_NAME_CHARS,
    MAX_HOP_OFFSET_NS,
    MAX_TRACE_HOPS,
    SPAN_ID,
    TRACE_ID,
    HopKind,
)
from splittime.ledger.hops import Hop
from splittime.ledger.store import Ledger

MAX_HOPS_BYTES = 256 * 1024  # 256 hops of 1,024 bytes
SpanId = Annotated[str, Meta(pattern=SPAN_ID)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_HOP_OFFSET_NS)]
Shown = Annotated[str, Meta(max_length=MAX_HOP_NAME_CHARS, pattern=HOP_NAME)]


class HopEntry(Strict, kw_only=True):
    """One hop that is over. begin_ns: from the beginning of the trace; both times by the body's `clock`."""

    span_id: SpanId
    name: Annotated[str, Meta(min_length=1, max_length=MAX_HOP_NAME_CHARS, pattern=HOP_NAME)]
    begin_ns: Nanoseconds
    duration_ns: Nanoseconds
    kind: HopKind = HopKind.OTHER
    parent_id: SpanId | None = None
    error: Shown = ""


class HopsBody(Strict, kw_only=True):
    """Hops of one trace, by one clock: a process that joins the trace elsewhere posts by a clock of its own name."""

    trace_id: Annotated[str, Meta(pattern=TRACE_ID)]
    clock: Annotated[str, Meta(pattern=CLOCK)]
    hops: Annotated[list[HopEntry], Meta(min_length=1, max_length=MAX_TRACE_HOPS)]


def keep_hops(ledger: Ledger, body: bytes, tenant: str) -> dict[str, Any]:
    """Keep the hops of a body under this tenant, all or none. Returns what is answered. Raises `RequestError`."""
    told = decode_body(body, HopsBody)
    hops = [_hop(told, number, tenant) for number in range(len(told.hops))]
    new = ledger.add_hops(hops)
    return {"trace_id": told.trace_id, "kept": new, "known": len(hops) - new}


def _hop(told: HopsBody, number: int, tenant: str) -> Hop:
    entry, param = told.hops[number], f"hops[{number}]"
    if entry.parent_id == entry.span_id:
        raise RequestError(f"{param} lies in itself", param=f"{param}.parent_id", value=entry.parent_id)
    return Hop(
        trace_id=told.trace_id,
        span_id=entry.span_id,
        name=entry.name,
        kind=entry.kind,
        clock=told.clock,
        begin_ns=entry.begin_ns,
        end_ns=entry.begin_ns + entry.duration_ns,
        parent_id=entry.parent_id or "",
        error=entry.error,
        tenant=tenant,
    )


def hops_answer(ledger: Ledger, trace_id: str, tenant: str | None) -> dict[str, Any]:
    """Returns the hops of a trace, of this tenant if one is named. Raises `NotFound` if none are kept."""
    found = ledger.hops(trace_id, tenant) if re.fullmatch(TRACE_ID, trace_id) else []
    if not found:
        hint = "hops are posted to /ledger/hops, and kept for a time"
        raise NotFound(f"no hops of trace {trace_id[:64]!r}", code="trace_not_found", value=trace_id[:64], hint=hint)
    return {"trace_id": trace_id, "hops": [msgspec.to_builtins(hop) for hop in found]}
