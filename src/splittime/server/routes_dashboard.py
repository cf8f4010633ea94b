"""The page at `/` and what it asks for: `GET /dashboard/data?after=CURSOR` answers what is new since the last answer.

What is read of the ledger and of the requests in flight is taken in the event loop, in one turn, so that a record is in
exactly one answer and a request is either open or closed; what is made of it, in a thread beside. That thread is one,
whoever looks, and is started by the first look: a server that nobody looks at does nothing. It works in short turns
(`web.reading`).
An answer is bounded (`MAX_ROWS`, `MAX_STEPS`, `MAX_OPEN`) and says what it left out. The cursor is of this process: one
from before a restart gets everything anew, with `reset`.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import orjson

from splittime.core.errors import NotFound, RequestError
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger
from splittime.server import routes_info
from splittime.server.books import KeepsBooks, OpenBook
from splittime.server.dashboard import bins, files, rows
from splittime.server.service import Service
from splittime.web import http
from splittime.web.page_files import NO_STORE
from splittime.web.reading import in_short_turns

MAX_ROWS, MAX_STEPS, MAX_OPEN, MAX_STEPS_SEARCHED = 1_000, 8_000, 256, 16_384
USUAL_STEPS = 200  # the latest, that say how much a thread is usually off the processor
DIAGNOSED_FOR_S = 5.0  # a diagnosis is kept so long, whoever asks
PROCESS = secrets.token_hex(6)
WORDS = {
    "stages": {stage.value: meaning for stage, meaning in STAGE_MEANING.items()},
    "causes": {cause.value: meaning for cause, meaning in CAUSE_MEANING.items()},
}


_diagnoses: WeakKeyDictionary[Ledger, tuple[float, bytes]] = WeakKeyDictionary()  # when it was made, and its answer


class PageCursor(NamedTuple):
    """How many records, since the start, the page has."""

    accounts: int = 0
    steps: int = 0


class View(NamedTuple):
    """All that an answer is made from, as it was in one turn of the event loop."""

    head: dict[str, Any]
    now_ns: int
    accounts: list[ClosedAccount]
    steps: list[StepRecord]
    usual_off_share: float
    open_books: list[OpenBook]


@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="dashboard")


async def _respond(send: http.Send, work: Callable[..., bytes], *args: Any) -> None:
    body = await asyncio.get_running_loop().run_in_executor(_beside(), in_short_turns, work, *args)
    await http.respond(send, body, headers=NO_STORE)


async def index(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The page for a browser, a few words in JSON for everybody else."""
    if http.wants_html(scope):
        await files.send_file(scope, send, "index.html")
    else:
        await routes_info.index(service, scope, receive, send)


async def static(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await files.send_file(scope, send, scope[http.PATH_REST])


async def data(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What is new since the cursor, and how things are now."""
    view = _look(books, _read_cursor(http.query_of(scope, "after").get("after"), books))
    await _respond(send, _data, view)


async def one_request(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """A closed account with the steps of its time, and whose that time was."""
    await _respond(send, _waterfall, books.ledger, books.facts(), scope[http.PATH_REST])


async def findings(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the doctor says of the latest books."""
    await _respond(send, _findings, books.ledger, books.facts())


def _read_cursor(text: str | None, books: KeepsBooks) -> PageCursor | None:
    """None for a first look, and for a cursor of another process."""
    process, _, rest = (text or "").partition(".")
    if process != PROCESS:
        return None
    numbers = rest.split(".")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise RequestError("not a cursor of this page", param="after", value=(text or "")[:64])
    cursor, counts = PageCursor(*map(int, numbers)), books.ledger.counts()
    return cursor if cursor.accounts <= counts.accounts and cursor.steps <= counts.steps else None


def _look(books: KeepsBooks, after: PageCursor | None) -> View:
    ledger, counts = books.ledger, books.ledger.counts()
    since = after or PageCursor()
    num_accounts, num_steps = counts.accounts - since.accounts, counts.steps - since.steps
    accounts = ledger.accounts(None, min(num_accounts, MAX_ROWS))
    steps = ledger.steps(min(num_steps, MAX_STEPS))
    head = {
        "cursor": f"{PROCESS}.{counts.accounts}.{counts.steps}",
        "reset": after is None,
        "left_out": {"accounts": num_accounts - len(accounts), "steps": num_steps - len(steps)},
        "server": books.about(),
        "engine": msgspec.to_builtins(books.stats()),
        **({"words": WORDS} if after is None else {}),
    }
    usual = derive.usual_off_share(ledger.steps(USUAL_STEPS))
    return View(head, time.monotonic_ns(), accounts, steps, usual, list(islice(books.open_books(), MAX_OPEN)))


def _data(view: View) -> bytes:
    now_ns, since_ns = view.now_ns, view.now_ns - bins.HORIZON_S * bins.BIN_NS
    closed = bins.presence((bins.spans(account.intervals) for account in view.accounts), since_ns)
    still_open = bins.presence((rows.open_spans(book, now_ns) for book in view.open_books), since_ns)
    answer = {
        **view.head,
        "now_ns": now_ns,
        "now_unix_ms": time.time_ns() // 1_000_000,
        "horizon_s": bins.HORIZON_S,
        "rows": [rows.account_row(account) for account in view.accounts],
        "open": [rows.open_row(book, now_ns) for book in view.open_books],
        "presence": bins.presence_json(closed),
        "presence_open": bins.presence_json(still_open),
        "step_fields": ("at_s", *bins.SUMS, *bins.PEAKS),
        "step_bins": bins.step_bins(view.steps, since_ns, view.usual_off_share),
    }
    return orjson.dumps(answer, default=str)


def _waterfall(ledger: Ledger, facts: ServerFacts | None, request_id: str) -> bytes:
    from splittime.diagnose.attribution import meaning, owners_between
    from splittime.diagnose.books import make_books

    found = ledger.account(request_id)
    if not found:
        raise NotFound(f"no closed account of {request_id!r}", code="request_not_found", value=request_id)
    account = max(found, key=lambda account: account.end_ns)
    steps = ledger.steps(MAX_STEPS_SEARCHED)
    owners = owners_between(make_books(facts, (), steps, "the live ledger"), account, account.start_ns, account.end_ns)
    told = [(name, round(ns), meaning(name)) for name, ns in owners.items()]
    return orjson.dumps(rows.waterfall(account, steps) | {"owners": told})


def _findings(ledger: Ledger, facts: ServerFacts | None) -> bytes:
    made_at_s, answer = _diagnoses.get(ledger, (float("-inf"), b""))
    if time.monotonic() - made_at_s >= DIAGNOSED_FOR_S:
        answer = _diagnose(ledger, facts)
        _diagnoses[ledger] = (time.monotonic(), answer)
    return answer


def _diagnose(ledger: Ledger, facts: ServerFacts | None) -> bytes:
    from splittime.diagnose.books import (
        LIVE_ACCOUNTS,
        LIVE_STEPS,
        live_books,
    )  # here, so that a server's start does not wait for it
    from splittime.diagnose.doctor import diagnose

    accounts, steps = ledger.accounts(None, LIVE_ACCOUNTS), ledger.steps(LIVE_STEPS)
    return msgspec.json.encode(diagnose(live_books(facts, accounts, steps, "the live ledger")))
