"""Answers of the ledger's paths, from what was asked in the query or posted (`/ledger/hops`): bodies, no sockets."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from splittime.api.decode import decode_body
from splittime.api.schema import Strict
from splittime.core import trace_context
from splittime.core.errors import NotFound, RequestError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.hops import Hop
from splittime.ledger.store import Ledger

DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000
QUERY = ("slower_than_ms", "limit")  # what may be asked of a list of accounts
MAX_HOPS_BYTES = 256 * 1024  # 256 hops of 1,024 bytes
SpanId = Annotated[str, Meta(pattern=trace_context.SPAN_ID)]
Nanoseconds = Annotated[int, Meta(ge=0, le=trace_context.MAX_HOP_OFFSET_NS)]
Shown = Annotated[str, Meta(max_length=trace_context.MAX_HOP_NAME_CHARS, pattern=trace_context.HOP_NAME)]


def account_answer(found: Sequence[ClosedAccount], request_id: str, *, is_open: bool) -> dict[str, Any]:
    """Returns the closed account of a request; of several choices that of the one that ended last, with all of them in
    `choices`. Raises `NotFound` if there is none."""
    if not found:
        why = "it runs still" if is_open else "it never came, or is kept no more; GET /ledger/requests lists the latest"
        raise NotFound(f"no ended request {request_id!r}: {why}", code="request_not_found", value=request_id)
    last = max(found, key=lambda account: account.end_ns)
    answer = account_json(last)
    if len(found) > 1:
        answer["choices"] = [account_json(account) for account in found]
    return answer


def account_body(ledger: Ledger, request_id: str, tenant: str | None, is_open: bool) -> bytes:
    """Returns it in JSON; of this tenant, if one is named. 128 choices of 1,000 tokens take 0.1 s."""
    answer = account_answer(ledger.account(request_id, tenant), request_id, is_open=is_open)
    if "choices" in answer:
        answer["choices"] = written(answer["choices"])
    return orjson.dumps(answer, default=str)


def written(answers: Iterable[object]) -> list[orjson.Fragment]:
    """Returns each in JSON by itself: one call for all of them would keep the lock, and the event loop waiting."""
    return [orjson.Fragment(orjson.dumps(answer, default=str)) for answer in answers]


def accounts_body(ledger: Ledger, slower_than_ms: float | None, limit: int, tenant: str | None) -> bytes:
    """Returns the latest accounts, oldest first; of this tenant, if one is named."""
    accounts = ledger.accounts(slower_than_ms, limit, tenant)
    return orjson.dumps({"accounts": written(account_json(account) for account in accounts)})


def limit_of(wanted: Mapping[str, str]) -> int:
    """Returns how many are asked for. Raises `RequestError` for no number, or one that is out of range."""
    limit = number_of(wanted, "limit")
    if limit is None:
        return DEFAULT_LIMIT
    if not 1 <= limit <= MAX_LIMIT or limit != int(limit):
        raise RequestError("limit out of range", param="limit", value=str(limit), limit=[1, MAX_LIMIT])
    return int(limit)


def number_of(wanted: Mapping[str, str], name: str) -> float | None:
    """Returns a number of the query, None if it is not there. Raises `RequestError` for anything else."""
    if name not in wanted:
        return None
    try:
        value = float(wanted[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise RequestError(f"{name} must be a number, 0 or above", param=name, value=wanted[name][:64])
    return value


class HopEntry(Strict, kw_only=True):
    """One hop that is over. begin_ns: from the beginning of the trace; both times by the body's `clock`."""

    span_id: SpanId
    name: Annotated[
        str, Meta(min_length=1, max_length=trace_context.MAX_HOP_NAME_CHARS, pattern=trace_context.HOP_NAME)
    ]
    begin_ns: Nanoseconds
    duration_ns: Nanoseconds
    kind: trace_context.HopKind = trace_context.HopKind.OTHER
    parent_id: SpanId | None = None
    error: Shown = ""


class HopsBody(Strict, kw_only=True):
    """Hops of one trace, by one clock: a process that joins the trace elsewhere posts by a clock of its own name."""

    trace_id: Annotated[str, Meta(pattern=trace_context.TRACE_ID)]
    clock: Annotated[str, Meta(pattern=trace_context.CLOCK)]
    hops: Annotated[list[HopEntry], Meta(min_length=1, max_length=trace_context.MAX_TRACE_HOPS)]


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


def hops_body(ledger: Ledger, trace_id: str, tenant: str | None) -> bytes:
    """Returns the hops of a trace in JSON, of this tenant if one is named. Raises `NotFound` if none are kept."""
    found = ledger.hops(trace_id, tenant) if re.fullmatch(trace_context.TRACE_ID, trace_id) else []
    if not found:
        hint = "hops are posted to /ledger/hops, and kept for a time"
        raise NotFound(f"no hops of trace {trace_id[:64]!r}", code="trace_not_found", value=trace_id[:64], hint=hint)
    return msgspec.json.encode({"trace_id": trace_id, "hops": found})
