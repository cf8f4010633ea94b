"""What the paths of the ledger answer, from what was asked in the query: bodies, no sockets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from splittime.core.errors import NotFound, RequestError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.store import Ledger

DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000
QUERY = ("slower_than_ms", "limit")  # what may be asked of a list of accounts


def account_answer(found: Sequence[ClosedAccount], request_id: str, *, is_open: bool) -> dict[str, Any]:
    """Returns the closed account of a request; of several choices that of the one that ended last, with all of them in
    `choices`. Raises `NotFound` if there is none."""
    if not found:
        hint = "it never came or is no longer kept; GET /ledger/requests lists the latest"
        if is_open:
            hint = "it is still open"
        raise NotFound(f"no closed account of {request_id!r}", code="request_not_found", value=request_id, hint=hint)
    last = max(found, key=lambda account: account.end_ns)
    answer = account_json(last)
    if len(found) > 1:
        answer["choices"] = [account_json(account) for account in found]
    return answer


def accounts_body(ledger: Ledger, slower_than_ms: float | None, limit: int, tenant: str | None) -> bytes:
    """Returns the latest accounts, oldest first; of this tenant, if one is named."""
    accounts = ledger.accounts(slower_than_ms, limit, tenant)
    return orjson.dumps({"accounts": [account_json(account) for account in accounts]})


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
