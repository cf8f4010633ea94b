"""The books on vLLM's own HTTP server: `vllm serve ... --middleware splittime.attach.middleware.WithBooks`.

An ASGI layer around vLLM's application. It answers `/`, `/ledger/...` and `/dashboard/...` itself (`routes`), watches
each request that may ask for tokens (`visits`), and lets all else through untouched.
"""

import atexit
import logging
import os
from typing import Any

from splittime.attach import mail
from splittime.attach.command import ledger_of
from splittime.attach.engine_client import watch
from splittime.attach.joining import Joining
from splittime.attach.routes import AttachedBooks, BookRoutes
from splittime.attach.visits import WatchedRequest
from splittime.web import http

log = logging.getLogger("splittime.attach")


class WithBooks:
    """The layer. vLLM makes one for each API process."""

    def __init__(self, app: http.Application) -> None:
        if mail.FOLDER not in os.environ:
            told = "the engine was started without %s: no account will be complete. Does VLLM_PLUGINS name splittime?"
            log.error(told, mail.FOLDER)
        mail.name_folder()
        self._app = app
        self._books: AttachedBooks | None = None
        self._routes: BookRoutes | None = None
        self._receiver: mail.Receiver | None = None
        self._has_tried = False

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if not self._has_tried and "app" in scope:
            self._begin(scope["app"].state)
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http" or self._routes is None or self._books is None:
            await self._app(scope, receive, send)
        elif self._routes.answers(scope):
            await self._routes(scope, receive, send)
        elif scope["method"] == "POST":
            await WatchedRequest(self._books, scope, receive, send).serve(self._app)
        else:
            await self._app(scope, receive, send)

    def _begin(self, state: Any) -> None:
        """The engine's client is there: from now on its calls are watched, and the engine's mail is read. A fault here
        leaves vLLM as it is without books."""
        client = getattr(state, "engine_client", None)
        if client is None:
            return
        self._has_tried = True
        try:
            index = getattr(client.engine_core, "client_index", 0)
            joining = Joining(lambda engine: ledger_of(index, engine))
            books = AttachedBooks(joining, state)
            self._receiver = mail.Receiver(index, joining.take, joining.join)
            routes = BookRoutes(books)
            atexit.register(self._end)
            watch(client)
        except Exception:
            log.exception("no books are kept of this server; it goes on without them")
            receiver, self._receiver = self._receiver, None
            if receiver is not None:
                receiver.close()
            return
        self._books, self._routes = books, routes

    async def _live(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Lets the application live, and ends the books with it."""
        try:
            await self._app(scope, receive, send)
        finally:
            self._end()

    def _end(self) -> None:
        """Close what is open, with all that is known by then. Called twice, it does nothing."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None and self._books is not None:
            for visit in list(self._books.visits):
                visit.close()
            receiver.close()
            self._books.joining.close()
