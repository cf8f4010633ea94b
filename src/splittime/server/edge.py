"""The outermost ASGI layer: when a request was first seen, who may come in, and what happens to the unforeseen.

    names (`origin`) -> CORS, if pages of other origins are let in -> the key -> the application

This is the one place where any exception is caught: it is logged with its trace and answered with 500, and the server
goes on. An exception after the response began closes the connection, which the client sees as a broken stream.
"""

import hmac
import logging
import time

from starlette.middleware.cors import CORSMiddleware

from splittime.core.errors import EngineError, RequestError
from splittime.server.config import ServerConfig
from splittime.server.dashboard.files import is_page
from splittime.server.http import (
    START_NS,
    AnswerAtOnce,
    Application,
    AtOnce,
    Message,
    Receive,
    Scope,
    Send,
    header,
    respond_error,
)
from splittime.server.origin import Names

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes have no key, and call by any name
READABLE_HEADERS = ("x-request-id", "server-timing", "retry-after", "endpoint-load-metrics")

log = logging.getLogger("splittime.server")


class Edge:
    """Raises `ConfigError` for settings that could let nobody in."""

    def __init__(self, app: Application, config: ServerConfig) -> None:
        self._app = app
        self._names = Names(config)
        self._key = config.api_key.encode() if config.api_key is not None else None
        self._inside: Application = self._keyed
        if config.cors_origins:
            self._inside = CORSMiddleware(
                self._keyed,  # type: ignore[arg-type]
                allow_origins=config.cors_origins,
                allow_methods=("GET", "HEAD", "POST", "PATCH"),
                allow_headers=("*",),
                expose_headers=READABLE_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault(START_NS, time.monotonic_ns())
        try:
            self._check_names(scope)
        except RequestError as refusal:
            await respond_error(send, refusal)
            return
        await self._inside(scope, receive, send)

    async def _keyed(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may_enter(scope):
            await self._guarded(scope, receive, send)
        else:
            await respond_error(send, _unauthorized(), headers=[(b"www-authenticate", b"Bearer")])

    def at_once(self, scope: Scope, answer: AnswerAtOnce) -> AtOnce | None:
        """What `answer` says to a request of which the head is known, if it may come in. None: take the ordinary way,
        as those that may not and pages of a browser always do."""
        try:
            self._check_names(scope)
            if header(scope, b"origin") is not None or not self._may_enter(scope):
                return None
            return answer(scope)
        except RequestError:
            return None
        except Exception:
            log.exception("%s %s failed before it had a task", scope["method"], scope["path"])
            return None

    def _check_names(self, scope: Scope) -> None:
        if scope["path"] not in OPEN_PATHS:
            self._names.check(scope)

    def _may_enter(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS or is_page(scope):
            return True
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        is_right = hmac.compare_digest(given.strip(" ").encode("latin-1"), self._key)
        return is_right and scheme.lower() == "bearer"

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


def _unauthorized() -> RequestError:
    return RequestError(
        "no API key, or a wrong one", code="invalid_api_key", status=401, hint="send Authorization: Bearer KEY"
    )
