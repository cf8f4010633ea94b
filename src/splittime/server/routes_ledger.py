"""`/ledger/...`: closed accounts and step records, as they are kept."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from splittime.api.ledger_answers import (
    MAX_HOPS_BYTES,
    MAX_LIMIT,
    QUERY,
    account_body,
    accounts_body,
    hops_body,
    keep_hops,
    limit_of,
    number_of,
    written,
)
from splittime.core.errors import Refused
from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.chrome_trace import trace
from splittime.server.books import KeepsBooks
from splittime.web import http
from splittime.web.reading import in_short_turns
from splittime.web.tenants import tenant_of

HOPS_TIMEOUT_S = 10.0  # for a client to send its hops


async def one_request(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The closed account of a request, by the id in its response or by its X-Request-Id. With several choices: that of
    the one that ended last, and all of them in `choices`."""
    request_id, tenant = scope[http.PATH_REST], tenant_of(scope)
    is_open = books.is_open(request_id, tenant)
    await http.respond(send, await _beside(books, account_body, books.ledger, request_id, tenant.sees, is_open))


async def requests(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest accounts that the key may see, oldest first; with `slower_than_ms` only those that took longer."""
    wanted = http.query_of(scope, *QUERY)
    slower_than_ms = number_of(wanted, "slower_than_ms")
    body = await _beside(books, accounts_body, books.ledger, slower_than_ms, limit_of(wanted), tenant_of(scope).sees)
    await http.respond(send, body)


async def steps(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest steps, oldest first."""
    body = await _beside(books, _steps, books, limit_of(http.query_of(scope, "limit")))
    await http.respond(send, body)


async def facts(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the server knows of itself, as `splittime.ledger.facts.ServerFacts`."""
    known = books.facts()
    if known is None:
        raise Refused("the engine is not ready yet", reason="not_ready", status=503)
    await http.respond(send, msgspec.json.encode(known))


async def post_hops(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Keep a client's own hops beside the requests of its trace."""
    body = await http.read_body_in_time(scope, receive, MAX_HOPS_BYTES, HOPS_TIMEOUT_S)
    await http.respond_json(send, keep_hops(books.ledger, body, tenant_of(scope).name))


async def hops(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The hops of a trace that the key may see."""
    body = await _beside(books, hops_body, books.ledger, scope[http.PATH_REST], tenant_of(scope).sees)
    await http.respond(send, body)


async def trace_json(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest accounts and the steps in their time as a Chrome trace."""
    limit = limit_of(http.query_of(scope, "limit"))
    body = await _beside(books, _trace, books, limit)
    disposition = (b"content-disposition", b'attachment; filename="trace.json"')
    await http.respond(send, body, headers=[disposition])


async def _beside(books: KeepsBooks, work: Callable[..., bytes], *args: Any) -> bytes:
    """Off the event loop: thousands of records take a tenth of a second, for which no token would be written."""
    return await asyncio.get_running_loop().run_in_executor(books.pool, in_short_turns, work, *args)


def _steps(books: KeepsBooks, limit: int) -> bytes:
    return orjson.dumps({"steps": written(msgspec.to_builtins(record) for record in books.ledger.steps(limit))})


def _trace(books: KeepsBooks, limit: int) -> bytes:
    accounts: list[ClosedAccount] = books.ledger.accounts(None, limit)
    since_ns = min((account.start_ns for account in accounts), default=0)
    records = [record for record in books.ledger.steps(MAX_LIMIT) if record.end_ns >= since_ns]
    return trace(accounts, records)
