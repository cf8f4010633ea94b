"""The accounts to explain, with the others they are held against, from a ledger file or a running server's answers."""

import contextlib
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import EngineError, NotFound
from splittime.diagnose.books import LIVE_STEPS, Books, books_from_ledger, live_books, with_steps
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.hops import Hop
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import LedgerFile, open_readonly

MAX_OTHERS = 1_000


class AccountQuestion(NamedTuple):
    """Which accounts: one by its id, or the slowest so many."""

    request_id: str | None
    slowest: int | None


class FoundAccounts(msgspec.Struct, frozen=True):
    """What to explain, and the books to hold it against, with the steps in its time. hops: of the traces that the
    accounts are of."""

    accounts: list[ClosedAccount]
    books: Books
    hops: list[Hop] = []

    @property
    def simulated(self) -> str:
        """As in `ServerFacts`."""
        return "" if self.books.facts is None else self.books.facts.simulated


def accounts_from_file(path: Path, question: AccountQuestion) -> FoundAccounts:
    file = open_readonly(path)
    try:
        return _read(file, path, question)
    finally:
        file.close()


def accounts_from_server(
    base: str, question: AccountQuestion, get: Callable[[str], Any], get_operators: Callable[[str], Any]
) -> FoundAccounts:
    """get(url) returns a decoded answer; get_operators of what is the operator's to read, {} for others. Raises
    `EngineError` for what no splittime server answers."""
    asked = None
    if question.request_id is not None:
        asked = get(f"{base}/ledger/requests/{urllib.parse.quote(question.request_id, safe='')}")
    listed = get(f"{base}/ledger/requests?limit={MAX_OTHERS}")
    facts, steps = get_operators(f"{base}/ledger/facts"), get_operators(f"{base}/ledger/steps?limit={LIVE_STEPS}")
    try:
        told = msgspec.convert(facts, ServerFacts) if facts else None
        records = msgspec.convert(steps["steps"], list[StepRecord]) if steps else []
        books = live_books(told, [account_from_json(entry) for entry in listed["accounts"]], records, base)
        if asked is None:
            found = _slowest(books.accounts, question, base)
        else:
            found = [account_from_json(entry) for entry in asked.get("choices", [asked])]
        return FoundAccounts(found, books, _hops_from_server(base, found, get))
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
    books = books_from_ledger(file, f"ledger file {path.name}", MAX_OTHERS)
    request_id = question.request_id
    accounts = file.account(request_id) if request_id is not None else _slowest(books.accounts, question, str(path))
    if not accounts:
        raise NotFound(f"no request {request_id!r} in {path}", param="request_id", value=request_id)
    begin_ns = min(account.start_ns for account in accounts)
    end_ns = max(account.end_ns for account in accounts)
    hops = [hop for trace_id in _traces(accounts) for hop in file.hops(trace_id)]
    return FoundAccounts(accounts, with_steps(books, file.steps_between(begin_ns, end_ns)), hops)


def _slowest(others: Sequence[ClosedAccount], question: AccountQuestion, where: str) -> list[ClosedAccount]:
    """Returns those that were served, the slowest first."""
    served = [account for account in others if account.finish_reason != "refused"]
    if not served:
        raise NotFound(f"no request in {where} yet", param="slowest")
    return sorted(served, key=lambda account: account.start_ns - account.end_ns)[: question.slowest or 1]
