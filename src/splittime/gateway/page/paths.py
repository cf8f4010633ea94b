"""`GET /dashboard/data` and the page's files. Who looks at `/` with a browser gets the page.

What is read of the accounts is read by a thread beside the event loop, and an answer is kept for `KEPT_S`: many pages
that look cost what one does. Only an operator's key may ask for it, as it tells of every tenant.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from splittime.gateway.page import data
from splittime.web import http
from splittime.web.page_files import NO_STORE
from splittime.web.short_turns import in_short_turns

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService
from functools import cache
from pathlib import Path

from splittime.web.page_files import PageFiles

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
    """The latest answer, and who makes the next one: one asking at a time."""

    def __init__(self, gateway: "GatewayService") -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._made_ns: int | None = None
        self._answer = b""

    async def latest(self) -> bytes:
        async with self._lock:
            at_ns = time.monotonic_ns()
            if self._made_ns is None or at_ns - self._made_ns > KEPT_S * 1e9:
                now, loop = data.state_now(self._gateway, at_ns), asyncio.get_running_loop()
                self._answer = await loop.run_in_executor(self._gateway.pool, in_short_turns, self._make, now, at_ns)
                self._made_ns = at_ns
            return self._answer

    def _make(self, now: dict[str, Any], at_ns: int) -> bytes:
        accounts = self._gateway.ledger.accounts(None, data.MAX_ACCOUNTS)
        recent = data.recently(accounts, at_ns)
        return msgspec.json.encode({"cursor": "", "now_ns": at_ns, "words": data.WORDS, "now": now, "recent": recent})


async def send_data(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """How things are, and where the time of the latest requests went."""
    http.query_of(scope, "after")  # the server's page says how far it has read; here each answer is whole
    await http.respond(send, await gateway.page_answers.latest(), headers=NO_STORE)


async def send_file(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await page().send(scope, send, scope[http.PATH_REST])


async def send_page(scope: http.Scope, send: http.Send) -> None:
    await page().send(scope, send, INDEX)


@cache
def page() -> PageFiles:
    shared = [PACKAGE / "server" / "dashboard" / name for name in SHARED]
    return PageFiles([PACKAGE / "present" / "assets" / "colours.css", *shared, *sorted(FOLDER.iterdir())])
