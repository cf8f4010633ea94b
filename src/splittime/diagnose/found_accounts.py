"""The accounts to explain, with the others they are held against, from a ledger file or a running server's answers."""

import contextlib
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import EngineError, NotFound
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.hops import Hop
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import LedgerFile, open_readonly

MAX_OTHERS = 1_000


class AccountQuestion(NamedTuple):
    """Which accounts: one by its id, or the slowest so many."""

    request_id: str | None
    slowest: int | None


class FoundAccounts(msgspec.Struct, frozen=True):
    """What to explain, what to hold it against, and the steps in its time. simulated: as in `ServerFacts`. hops: of the
    traces that the accounts are of."""

    accounts: list[ClosedAccount]
    others: list[ClosedAccount]
    steps: list[StepRecord]
    simulated: str = ""
    hops: list[Hop] = []


def accounts_from_file(path: Path, question: AccountQuestion) -> FoundAccounts:
    file = open_readonly(path)
    try:
        return _read(file, path, question)
    finally:
        file.close()


def accounts_from_server(
    base: str, question: AccountQuestion, get: Callable[[str], Any], latest_steps: Callable[[], Any]
) -> FoundAccounts:
    """get(url) returns a decoded answer. Raises `EngineError` for what no splittime server answers."""
    asked = None
    if question.request_id is not None:
        asked = get(f"{base}/ledger/requests/{urllib.parse.quote(question.request_id, safe='')}")
    listed = get(f"{base}/ledger/requests?limit={MAX_OTHERS}")
    steps = latest_steps()
    try:
        others = [account_from_json(entry) for entry in listed["accounts"]]
        records = msgspec.convert(steps["steps"], list[StepRecord])
        if asked is None:
            found = _slowest(others, question, base)
        else:
            found = [account_from_json(entry) for entry in asked.get("choices", [asked])]
        return FoundAccounts(found, others, records, hops=_hops_from_server(base, found, get))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise EngineError(f"what {base} answered is no account: {error}", hint="Is it a splittime server?") from None


def _hops_from_server(base: str, accounts: list[ClosedAccount], get: Callable[[str], Any]) -> list[Hop]:
    """Returns the hops of the accounts' traces; none were posted of most."""
    hops: list[Hop] = []
    for trace_id in _traces(accounts):
        with contextlib.suppress(NotFound):
            hops += msgspec.convert(get(f"{base}/ledger/hops/{trace_id}")["hops"], list[Hop])
    return hops


def _traces(accounts: Iterable[ClosedAccount]) -> list[str]:
    return list(dict.fromkeys(account.trace_id for account in accounts if account.trace_id))


def _read(file: LedgerFile, path: Path, question: AccountQuestion) -> FoundAccounts:
    others = file.accounts(limit=MAX_OTHERS)
    request_id = question.request_id
    accounts = file.account(request_id) if request_id is not None else _slowest(others, question, str(path))
    if not accounts:
        raise NotFound(f"no request {request_id!r} in {path}", param="request_id", value=request_id)
    begin_ns = min(account.start_ns for account in accounts)
    end_ns = max(account.end_ns for account in accounts)
    facts = file.facts()
    simulated = "" if facts is None else facts.simulated
    hops = [hop for trace_id in _traces(accounts) for hop in file.hops(trace_id)]
    return FoundAccounts(accounts, others, file.steps_between(begin_ns, end_ns), simulated, hops)


def _slowest(others: list[ClosedAccount], question: AccountQuestion, where: str) -> list[ClosedAccount]:
    """Returns those that were served, the slowest first."""
    served = [account for account in others if account.finish_reason != "refused"]
    if not served:
        raise NotFound(f"no request in {where} yet", param="slowest")
    return sorted(served, key=lambda account: account.start_ns - account.end_ns)[: question.slowest or 1]
