"""Hops: what a client did for an answer beside asking for it (retrieval, reranking, tools), as it measured that itself.

A hop is a closed interval, in ns from the beginning of its trace by the clock `clock` of the client; hops of one clock
may be compared, hops of two never are (ADR 24). It is the client's word: part of no account, and in no sum of ours.

`HopBook` keeps the latest in memory, each tenant's apart, so that no tenant can push out another's: `MAX_TENANT_HOPS`
of a tenant, `MAX_TRACE_HOPS` of a trace, for `KEPT_S` after its latest came. Safe to use from several threads.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from splittime.core.errors import RequestError
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


class _KeptTrace:
    __slots__ = ("by_span", "latest_ns")

    def __init__(self) -> None:
        self.by_span: dict[str, Hop] = {}
        self.latest_ns = 0


class HopBook:
    """max_hops: of one tenant. now_ns: for tests."""

    def __init__(
        self,
        max_hops: int = MAX_TENANT_HOPS,
        kept_s: float = KEPT_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._max_hops, self._kept_ns, self._now_ns = max_hops, int(kept_s * 1e9), now_ns
        self._lock = threading.Lock()
        self._tenants: dict[str, OrderedDict[str, _KeptTrace]] = {}
        self._sizes: dict[str, int] = {}
        self._kept = self._known = self._forgotten = 0

    def add(self, hops: Sequence[Hop]) -> list[Hop]:
        """Keep hops of one tenant's trace, all or none. Returns those that are new.

        Raises `RequestError` if one differs from a hop of its span that is there, or if the trace is full.
        """
        if not hops:
            return []
        tenant, trace_id = hops[0].tenant, hops[0].trace_id
        with self._lock:
            traces = self._tenants.setdefault(tenant, OrderedDict())
            self._forget_old(tenant, traces)
            kept = traces.get(trace_id) or _KeptTrace()
            new = _new_ones(kept.by_span, hops)
            traces[trace_id] = kept
            traces.move_to_end(trace_id)
            kept.by_span |= {hop.span_id: hop for hop in new}
            kept.latest_ns = self._now_ns()
            self._sizes[tenant] = self._sizes.get(tenant, 0) + len(new)
            self._kept, self._known = self._kept + len(new), self._known + len(hops) - len(new)
            self._forget_beyond(tenant, traces)
        return new

    def of_trace(self, trace_id: str, tenant: str | None = None) -> list[Hop]:
        """Returns the hops of a trace that are kept; of this tenant, if one is named."""
        with self._lock:
            for name, traces in self._tenants.items():
                self._forget_old(name, traces)
            asked = self._tenants if tenant is None else {tenant: self._tenants.get(tenant, OrderedDict())}
            found = [traces[trace_id].by_span.values() for traces in asked.values() if trace_id in traces]
            return list(chain.from_iterable(found))

    def counts(self) -> HopCounts:
        return HopCounts(self._kept, self._known, self._forgotten)

    def _forget_old(self, tenant: str, traces: OrderedDict[str, _KeptTrace]) -> None:
        until_ns = self._now_ns() - self._kept_ns
        while traces and next(iter(traces.values())).latest_ns < until_ns:
            self._forget_first(tenant, traces)

    def _forget_beyond(self, tenant: str, traces: OrderedDict[str, _KeptTrace]) -> None:
        while self._sizes[tenant] > self._max_hops and len(traces) > 1:
            self._forget_first(tenant, traces)

    def _forget_first(self, tenant: str, traces: OrderedDict[str, _KeptTrace]) -> None:
        _, first = traces.popitem(last=False)
        self._sizes[tenant] -= len(first.by_span)
        self._forgotten += len(first.by_span)


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
