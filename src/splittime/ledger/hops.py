"""Hops: what a client did for an answer beside asking for it (retrieval, reranking, tools), as it measured that itself.

A hop is a closed interval, in ns from the beginning of its trace by the clock `clock` of the client; hops of one clock
may be compared, hops of two never are (ADR 24). It is the client's word: part of no account, and in no sum of ours.

`HopBook` keeps the latest in memory, each tenant's apart, so that no tenant can push out another's: `MAX_TENANT_HOPS`
of a tenant, `MAX_TRACE_HOPS` of a trace, for `KEPT_S` after its latest came. Safe to use from several threads.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from splittime.core.errors import RequestError
from splittime.core.shares import KeptByOwner
from splittime.core.trace_context import MAX_TRACE_HOPS, HopKind

MAX_TENANT_HOPS = 16_384
KEPT_S = 3600


class Hop(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One hop. parent_id: the span that it lies in; empty for none. clock: a name of the one that both offsets are
    of. error: what ended it, in a word; empty if nothing did."""

    trace_id: str
    span_id: str
    name: str
    kind: HopKind
    clock: str
    begin_ns: int
    end_ns: int
    parent_id: str = ""
    error: str = ""
    tenant: str = ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


class HopCounts(msgspec.Struct, frozen=True):
    """Since start: hops kept, hops that were there already, and hops forgotten by bound or age."""

    kept: int = 0
    known: int = 0
    forgotten: int = 0


class HopBook:
    """max_hops: of one tenant. now_ns: for tests."""

    def __init__(
        self, max_hops: int = MAX_TENANT_HOPS, kept_s: float = KEPT_S, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._traces = KeptByOwner[dict[str, Hop]](most_of_owner=max_hops, kept_ns=int(kept_s * 1e9), clock=now_ns)
        self._num_kept = self._num_known = 0

    def add(self, hops: Sequence[Hop]) -> list[Hop]:
        """Keep hops of one tenant's trace, all or none. Returns those that are new.

        Raises `RequestError` if one differs from a hop of its span that is there, or if the trace is full.
        """
        if not hops:
            return []
        tenant, trace_id = hops[0].tenant, hops[0].trace_id
        with self._traces.lock:
            by_span = self._traces.get(tenant, trace_id) or {}
            new = _new_ones(by_span, hops)
            by_span |= {hop.span_id: hop for hop in new}
            self._traces.put(tenant, trace_id, by_span, len(by_span))
            self._num_kept, self._num_known = self._num_kept + len(new), self._num_known + len(hops) - len(new)
        return new

    def of_trace(self, trace_id: str, tenant: str | None = None) -> list[Hop]:
        """Returns the hops of a trace that are kept; of this tenant, if one is named."""
        with self._traces.lock:
            tenants = self._traces.owners_of(trace_id) if tenant is None else [tenant]
            return [hop for name in tenants for hop in (self._traces.get(name, trace_id) or {}).values()]

    def counts(self) -> HopCounts:
        return HopCounts(self._num_kept, self._num_known, self._traces.weight_forgotten)


def _new_ones(known: dict[str, Hop], hops: Iterable[Hop]) -> list[Hop]:
    new: dict[str, Hop] = {}
    for hop in hops:
        other = known.get(hop.span_id) or new.setdefault(hop.span_id, hop)
        if other != hop:
            message, hint = f"span {hop.span_id} is another hop's in this trace", "give each hop a span_id of its own"
            raise RequestError(message, code="span_taken", status=409, param="span_id", value=hop.span_id, hint=hint)
    if len(known) + len(new) > MAX_TRACE_HOPS:
        message, hint = f"a trace may have {MAX_TRACE_HOPS} hops", "post the long ones, or begin another trace"
        limit, count = MAX_TRACE_HOPS, len(known) + len(new)
        raise RequestError(message, code="too_many_hops", param="hops", value=count, limit=limit, hint=hint)
    return list(new.values())
