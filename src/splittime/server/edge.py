"""The outermost ASGI layer: when a request was first seen, who may come in, and what happens to the unforeseen.

This is the one place where any exception is caught: it is logged with its trace and answered with 500, and the server
goes on. An exception after the response began closes the connection, which the client sees as a broken stream.
"""

import hmac
import logging
import time

from splittime.core.errors import EngineError, RequestError
from splittime.server.dashboard.files import is_page
from splittime.server.http import START_NS, Message, Receive, Scope, Send, header, respond_error

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes have no key

log = logging.getLogger("splittime.server")


class Edge:
    def __init__(self, app, api_key: str | None) -> None:  # type: ignore[no-untyped-def]
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault(START_NS, time.monotonic_ns())
        if not self._may_enter(scope):
            await respond_error(send, _unauthorized(), headers=[(b"www-authenticate", b"Bearer")])
            return
        if _is_from_elsewhere(scope):
            await respond_error(send, _cross_site())
            return
        await self._guarded(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in OPEN_PATHS or is_page(scope):
            return True
        given = header(scope, b"authorization") or ""
        return hmac.compare_digest(given.encode("latin-1"), self._expected)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noticing_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noticing_send)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise
            await respond_error(send, EngineError("the server failed; its log says why", code="internal_error"))


def _is_from_elsewhere(scope: Scope) -> bool:
    """A browser says that a page of another site makes it ask for a change. Such a page cannot read the answer (there
    is no CORS here), but could put a keyless server of its visitor's machine to sleep."""
    return scope["method"] != "GET" and header(scope, b"sec-fetch-site") == "cross-site"


def _cross_site() -> RequestError:
    message = "a page of another site may not ask this server for anything but to look"
    return RequestError(message, code="cross_site", status=403, hint="ask from this server's own page, or a program")


def _unauthorized() -> RequestError:
    return RequestError(
        "no API key, or a wrong one", code="invalid_api_key", status=401, hint="send Authorization: Bearer KEY"
    )
