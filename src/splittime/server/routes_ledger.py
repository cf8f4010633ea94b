"""`/ledger/...`: closed accounts and step records, as they are kept."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from splittime.core.errors import NotFound, Refused, RequestError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.export.chrome_trace import trace
from splittime.server.books import KeepsBooks
from splittime.web import http
from splittime.web.tenants import tenant_of

DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000


async def one_request(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The closed account of a request, by the id in its response or by its X-Request-Id. With several choices: that of
    the one that ended last, and all of them in `choices`."""
    request_id, tenant = scope[http.PATH_REST], tenant_of(scope)
    found = await _beside(books, books.ledger.account, request_id, tenant.sees)
    if not found:
        hint = "it never came or is no longer kept; GET /ledger/requests lists the latest"
        if books.is_open(request_id, tenant):
            hint = "it is still open"
        raise NotFound(f"no closed account of {request_id!r}", code="request_not_found", value=request_id, hint=hint)
    last = max(found, key=lambda account: account.end_ns)
    answer = account_json(last)
    if len(found) > 1:
        answer["choices"] = [account_json(account) for account in found]
    await http.respond_json(send, answer)


async def requests(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest accounts that the key may see, oldest first; with `slower_than_ms` only those that took longer."""
    wanted = http.query_of(scope, "slower_than_ms", "limit")
    slower_than_ms = _number(wanted, "slower_than_ms")
    body = await _beside(books, _accounts, books, slower_than_ms, _limit(wanted), tenant_of(scope).sees)
    await http.respond(send, body)


async def steps(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest steps, oldest first."""
    body = await _beside(books, _steps, books, _limit(http.query_of(scope, "limit")))
    await http.respond(send, body)


async def facts(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the server knows of itself, as `splittime.ledger.facts.ServerFacts`."""
    known = books.facts()
    if known is None:
        raise Refused("the engine is not ready yet", reason="not_ready", status=503)
    await http.respond(send, msgspec.json.encode(known))


async def trace_json(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest accounts and the steps in their time as a Chrome trace."""
    limit = _limit(http.query_of(scope, "limit"))
    body = await _beside(books, _trace, books, limit)
    disposition = (b"content-disposition", b'attachment; filename="trace.json"')
    await http.respond(send, body, headers=[disposition])


async def _beside(books: KeepsBooks, work: Callable[..., Any], *args: Any) -> Any:
    """Off the event loop: thousands of records take a tenth of a second, for which no token would be written."""
    return await asyncio.get_running_loop().run_in_executor(books.pool, work, *args)


def _accounts(books: KeepsBooks, slower_than_ms: float | None, limit: int, tenant: str | None) -> bytes:
    accounts = books.ledger.accounts(slower_than_ms, limit, tenant)
    return orjson.dumps({"accounts": [account_json(account) for account in accounts]})


def _steps(books: KeepsBooks, limit: int) -> bytes:
    return orjson.dumps({"steps": [msgspec.to_builtins(record) for record in books.ledger.steps(limit)]})


def _trace(books: KeepsBooks, limit: int) -> bytes:
    accounts: list[ClosedAccount] = books.ledger.accounts(None, limit)
    since_ns = min((account.start_ns for account in accounts), default=0)
    records = [record for record in books.ledger.steps(MAX_LIMIT) if record.end_ns >= since_ns]
    return trace(accounts, records)


def _limit(wanted: dict[str, str]) -> int:
    limit = _number(wanted, "limit")
    if limit is None:
        return DEFAULT_LIMIT
    if not 1 <= limit <= MAX_LIMIT or limit != int(limit):
        raise RequestError("limit out of range", param="limit", value=str(limit), limit=[1, MAX_LIMIT])
    return int(limit)


def _number(wanted: dict[str, Any], name: str) -> float | None:
    if name not in wanted:
        return None
    try:
        value = float(wanted[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise RequestError(f"{name} must be a number, 0 or above", param=name, value=wanted[name][:64])
    return value
