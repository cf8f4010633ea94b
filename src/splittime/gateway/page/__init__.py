"""The gateway's page at `/`: `GET /dashboard/data`, and the files that it loads.

It has the form and most scripts of the server's page, whose files it gives out beside its own.

What is read of the accounts is read by a thread beside the event loop, and an answer is kept for `KEPT_S`: many pages
that look cost what one does. Only an operator's key may ask for it, as it tells of every tenant: how things are now,
and where the time went of requests that ended of late.

All is bounded: at most `MAX_ACCOUNTS` of the latest accounts are read, `MAX_SLOWEST` are shown, and upstreams, tenants,
rules and reasons are the config's. Nothing of a prompt or a key is in it. Durations are in ns.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from heapq import nlargest
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import msgspec

from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING, Cause, Stage
from splittime.ledger.store import Ledger
from splittime.web import http
from splittime.web.page_files import NO_STORE, PageFiles
from splittime.web.reading import in_short_turns

DATA = "/dashboard/data"
KEPT_S = 0.5
FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parents[1]
SHARED = (
    *("api.js", "app.css", "bar.js", "dom.js", "format.js", "icon.svg"),
    *("poll.js", "standing.js", "theme.js", "words.js"),
)
INDEX = "gateway.html"


class PageAnswers:
    """The latest answer, and who makes the next one: one asking at a time. state_of: returns how things are at an
    instant, and is called in the event loop."""

    def __init__(self, state_of: Callable[[int], dict[str, Any]], ledger: Ledger, pool: ThreadPoolExecutor) -> None:
        self._state_of, self._ledger, self._pool = state_of, ledger, pool
        self._lock = asyncio.Lock()
        self._made_ns: int | None = None
        self._answer = b""

    async def latest(self) -> bytes:
        async with self._lock:
            at_ns = time.monotonic_ns()
            if self._made_ns is None or at_ns - self._made_ns > KEPT_S * 1e9:
                now, loop = self._state_of(at_ns), asyncio.get_running_loop()
                self._answer = await loop.run_in_executor(self._pool, in_short_turns, self._make, now, at_ns)
                self._made_ns = at_ns
            return self._answer

    def _make(self, now: dict[str, Any], at_ns: int) -> bytes:
        accounts = self._ledger.accounts(None, MAX_ACCOUNTS)
        recent = recently(accounts, at_ns)
        return msgspec.json.encode({"cursor": "", "now_ns": at_ns, "words": WORDS, "now": now, "recent": recent})


class HasPage(Protocol):
    """A gateway, as far as its page is asked for."""

    page_answers: PageAnswers


async def send_data(gateway: HasPage, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """How things are, and where the time of the latest requests went."""
    http.query_of(scope, "after")  # the server's page says how far it has read; here each answer is whole
    await http.respond(send, await gateway.page_answers.latest(), headers=NO_STORE)


async def send_file(gateway: HasPage, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await page().send(scope, send, scope[http.PATH_REST])


async def send_page(scope: http.Scope, send: http.Send) -> None:
    await page().send(scope, send, INDEX)


@cache
def page() -> PageFiles:
    shared = [PACKAGE / "server" / "dashboard" / name for name in SHARED]
    return PageFiles([PACKAGE / "present" / "assets" / "colours.css", *shared, *sorted(FOLDER.iterdir())])


RECENT_S = 60
MAX_ACCOUNTS = 2_000
MAX_SLOWEST = 12
MAX_TEXT_CHARS = 200
WORDS = {
    "stages": {stage.value: meaning for stage, meaning in STAGE_MEANING.items()},
    "causes": {cause.value: meaning for cause, meaning in CAUSE_MEANING.items()},
    "before": "reading and checking",
}

StageNs = tuple[Stage, Cause | None, int]


def key_of(stage: Stage, cause: Cause | None) -> str:
    """`route:upstream_slots`, or `upstream` where there is no cause."""
    return stage.value if cause is None else f"{stage.value}:{cause.value}"


def recently(accounts: Sequence[ClosedAccount], at_ns: int) -> dict[str, Any]:
    """Returns where the time went of those that ended within the latest `RECENT_S` and were not refused."""
    ended = [one for one in accounts if one.end_ns > at_ns - RECENT_S * 1_000_000_000 and not one.is_refused]
    is_cut = len(accounts) >= MAX_ACCOUNTS and len(ended) > 0 and accounts[0].end_ns > at_ns - RECENT_S * 1_000_000_000
    return {
        "seconds": RECENT_S,
        "requests": len(ended),
        "is_cut": is_cut,
        "e2e_ns": derive.percentiles([derive.e2e_ns(one) for one in ended], (50, 99)),
        "stages": _stages([_own_stages(one) for one in ended]),
        "nested": _stages([told for one in ended if (told := _nested_stages(one))]),
        "tokens": _tokens_by_tenant(ended),
        "first_byte_ns": _first_bytes(ended),
        "slowest": [_row(one) for one in nlargest(MAX_SLOWEST, ended, key=derive.e2e_ns)],
    }


def _own_stages(account: ClosedAccount) -> Mapping[str, int]:
    return _sums((one.stage, one.cause, one.end_ns - one.begin_ns) for one in account.intervals)


def _nested_stages(account: ClosedAccount) -> Mapping[str, int]:
    """Returns what its upstreams said of their own time; {} of those that keep no accounts."""
    told = chain.from_iterable(attempt.nested for attempt in account.attempts)
    return _sums((one.stage, one.cause, one.end_ns - one.begin_ns) for one in told)


def _sums(stages: Iterable[StageNs]) -> Mapping[str, int]:
    sums: Counter[str] = Counter()
    for stage, cause, lasted_ns in stages:
        sums[key_of(stage, cause)] += lasted_ns
    return sums


def _stages(books: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Returns each stage's time in all books, in how many it is, and its p99 among those."""
    values: dict[str, list[int]] = {}
    for book in books:
        for key, lasted_ns in book.items():
            if lasted_ns:
                values.setdefault(key, []).append(lasted_ns)
    return [
        {"key": key, "ns": sum(of_key), "requests": len(of_key), "p99_ns": derive.percentile(of_key, 99)}
        for key, of_key in values.items()
    ]


def _tokens_by_tenant(accounts: Iterable[ClosedAccount]) -> dict[str, int]:
    """Returns the tokens that answers told, of prompts and outputs."""
    sums: Counter[str] = Counter()
    for account in accounts:
        sums[account.tenant] += account.prompt_tokens + account.output_tokens
    return dict(sums)


def _first_bytes(accounts: Iterable[ClosedAccount]) -> dict[str, float | None]:
    """Returns the median time to the first byte of an answer, by upstream."""
    values: dict[str, list[int]] = {}
    for attempt in chain.from_iterable(account.attempts for account in accounts):
        if attempt.first_byte_ns is not None:
            values.setdefault(attempt.upstream, []).append(attempt.first_byte_ns - attempt.begin_ns)
    return {upstream: derive.percentile(of_one, 50) for upstream, of_one in values.items()}


def _row(account: ClosedAccount) -> dict[str, Any]:
    return {
        "id": account.request_id[:MAX_TEXT_CHARS],
        "model": account.model[:MAX_TEXT_CHARS],
        "tenant": account.tenant,
        "upstreams": [attempt.upstream for attempt in account.attempts],
        "finish_reason": account.finish_reason[:MAX_TEXT_CHARS],
        "degraded": account.degraded,
        "e2e_ns": derive.e2e_ns(account),
        "stages": list(_own_stages(account).items()),
    }
