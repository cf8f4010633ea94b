"""A splittime server's own book of a run's requests, fetched after the load: accounts, steps and facts.

`fetch` gives back the arm with them. An account closes just after the last byte that the client read, so what is
missing is asked for again, for as long as more come within `PATIENCE_S`. What stays missing is a note: the ring that a
server without a ledger file keeps its accounts in is bounded.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from splittime.bench.book.records import Arm, Outcome
from splittime.bench.book.requests import sent_as
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.wire.scrape import get_json
from splittime.wire.target import Target

MAX_LIMIT = 10_000  # of /ledger/requests and /ledger/steps
MARGIN = 200  # accounts of others that may lie between ours
LIST_TIMEOUT_S = 120.0  # thousands of accounts are tens of megabytes
MAX_LIST_BYTES = 512 * 2**20
PATIENCE_S = 2.0
PAUSE_S = 0.05
AT_ONCE = 8

Accounts = dict[str, list[ClosedAccount]]


def by_request(accounts: Sequence[ClosedAccount]) -> Accounts:
    """Accounts by the id that was sent, several where there are several choices; of two with one name the later."""
    latest = {account.request_id: account for account in accounts}
    found: Accounts = {}
    for account in latest.values():
        found.setdefault(sent_as(account), []).append(account)
    return found


async def fetch(session: aiohttp.ClientSession, arm: Arm, target: Target, outcomes: Sequence[Outcome]) -> Arm:
    """Never raises: what cannot be had is a note."""
    wanted = [outcome.request_id for outcome in outcomes if outcome.sent_ns is not None]
    found = await _accounts(session, target, wanted)
    accounts = tuple(account for request_id in wanted for account in found.get(request_id, ()))
    steps, step_notes = await _steps(session, target, accounts)
    facts = converted(await get_json(session, target, "/ledger/facts"), ServerFacts)
    missing = len(wanted) - len(found)
    notes = [*arm.notes, *step_notes]
    if missing:
        hint = "start the server with --ledger-file, which keeps more than its memory does"
        notes.append(f"The server has no account of {missing} of {len(wanted)} requests; if they were served, {hint}.")
    return msgspec.structs.replace(arm, accounts=accounts, steps=steps, facts=facts, notes=tuple(notes))


async def _accounts(session: aiohttp.ClientSession, target: Target, wanted: Sequence[str]) -> Accounts:
    """The latest accounts in one GET; then one by one, as long as more come or patience lasts."""
    limit = min(MAX_LIMIT, len(wanted) + MARGIN)
    listed = await get_json(session, target, f"/ledger/requests?limit={limit}", LIST_TIMEOUT_S, MAX_LIST_BYTES)
    accounts, ours = _read_all(listed), set(wanted)
    found = {name: choices for name, choices in by_request(accounts).items() if name in ours}
    if len(accounts) == limit:
        found.pop(sent_as(accounts[0]), None)  # the list may begin in the middle of its choices
    until = time.monotonic() + PATIENCE_S
    while missing := [name for name in wanted if name not in found]:
        for start in range(0, len(missing), AT_ONCE):
            names = missing[start : start + AT_ONCE]
            answers = await asyncio.gather(*(_one(session, target, name) for name in names))
            came = {name: choices for name, choices in zip(names, answers, strict=True) if choices}
            found.update(came)
            if came:
                until = time.monotonic() + PATIENCE_S
            elif time.monotonic() > until:
                return found
        await asyncio.sleep(PAUSE_S)
    return found


async def _one(session: aiohttp.ClientSession, target: Target, request_id: str) -> list[ClosedAccount]:
    answer = await get_json(session, target, f"/ledger/requests/{quote(request_id, safe='')}", PATIENCE_S)
    if not isinstance(answer, dict):
        return []
    return _read_all({"accounts": answer.get("choices", [answer])})


def _read_all(listed: Any) -> list[ClosedAccount]:
    """Returns what of a server's answer is accounts; [] if it is not what is expected of one."""
    try:
        return [account_from_json(entry) for entry in listed["accounts"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # msgspec's errors are ValueErrors
        return []


async def _steps(
    session: aiohttp.ClientSession, target: Target, accounts: Sequence[ClosedAccount]
) -> tuple[tuple[StepRecord, ...], list[str]]:
    """The steps in the accounts' time, and a note if the first of them are no longer kept."""
    if not accounts:
        return (), []
    listed = await get_json(session, target, f"/ledger/steps?limit={MAX_LIMIT}", LIST_TIMEOUT_S, MAX_LIST_BYTES)
    records = converted(listed.get("steps") if isinstance(listed, dict) else None, list[StepRecord]) or []
    begin_ns, end_ns = min(a.start_ns for a in accounts), max(a.end_ns for a in accounts)
    during = tuple(step for step in records if step.end_ns > begin_ns and step.begin_ns < end_ns)
    first = min((step_id for account in accounts for step_id in account.token_steps), default=0)
    if during and during[0].step_id > first and len(records) == MAX_LIMIT:
        return during, [f"The server gave its last {MAX_LIMIT:,} steps; the run's first ones are not among them."]
    return during, []


def converted(data: Any, to: Any) -> Any:
    """Returns None for data of another kind."""
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError:
        return None
