"""The outermost ASGI layer: who may come in, and what happens to the unforeseen.

    names (`origin`) -> CORS, if pages of other origins are let in -> the key -> the application

This is the one place where any exception is caught: it is logged with its trace and answered with 500, and the server
goes on. An exception after the response began closes the connection, which the client sees as a broken stream. What a
client sends that nobody reads is `exchange`'s.
"""

import logging

from starlette.middleware.cors import CORSMiddleware

from splittime.core.errors import EngineError, RequestError
from splittime.server.config import ServerConfig
from splittime.server.dashboard.files import is_page
from splittime.server.exchange import Exchange
from splittime.server.http import (
    AnswerAtOnce,
    Application,
    AtOnce,
    Receive,
    Scope,
    Send,
    header,
    respond_error,
)
from splittime.server.keys import Keys
from splittime.server.origin import Names
from splittime.server.tenants import ANYBODY, TENANT, Tenant, forbidden

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # probes have no key, and call by any name
READABLE_HEADERS = ("x-request-id", "server-timing", "retry-after", "endpoint-load-metrics")

log = logging.getLogger("splittime.server")


class Edge:
    """Raises `ConfigError` for settings that could let nobody in."""

    def __init__(self, app: Application, config: ServerConfig, keys: Keys) -> None:
        self._app, self._keys = app, keys
        self._names = Names(config)
        self._root = f"{config.root_path}/"
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
        scope["path"] = self._own_path(scope["path"])
        exchange = Exchange(scope, receive, send)
        try:
            await self._named(scope, exchange)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if exchange.has_begun:
                raise
            failure = EngineError("the server failed; its log says why", code="internal_error")
            await respond_error(exchange.send, failure)
        await exchange.end()

    def _own_path(self, path: str) -> str:
        """Without the root path, which not every proxy takes away, and an API's without slashes at its end: a redirect
        would have to know by what name, and over what, the client asked."""
        if path.startswith(self._root):  # without a root path this changes nothing
            path = "/" + path.removeprefix(self._root)
        return path.rstrip("/") if path.startswith("/v1/") else path

    async def _named(self, scope: Scope, exchange: Exchange) -> None:
        try:
            self._check_names(scope)
        except RequestError as refusal:
            await respond_error(exchange.send, refusal)
        else:
            await self._inside(scope, exchange.receive, exchange.send)

    async def _keyed(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, tenant = scope["path"], self._holder(scope)
        if tenant is None:
            await respond_error(send, _unauthorized(), headers=[(b"www-authenticate", b"Bearer")])
        elif not tenant.may_ask_for(path):
            await respond_error(send, forbidden(tenant, path))
        else:
            scope[TENANT] = tenant
            await self._app(scope, receive, send)

    def at_once(self, scope: Scope, answer: AnswerAtOnce) -> AtOnce | None:
        """What `answer` says to a request of which the head is known, if it may come in. None: take the ordinary way,
        as those that may not and pages of a browser always do."""
        try:
            self._check_names(scope)
            tenant = self._holder(scope)
            if header(scope, b"origin") is not None or tenant is None or not tenant.may_ask_for(scope["path"]):
                return None
            scope[TENANT] = tenant
            return answer(scope)
        except RequestError:
            return None
        except Exception:
            log.exception("%s %s failed before it had a task", scope["method"], scope["path"])
            return None

    def _check_names(self, scope: Scope) -> None:
        if scope["path"] not in OPEN_PATHS:
            self._names.check(scope)

    def _holder(self, scope: Scope) -> Tenant | None:
        if scope["path"] in OPEN_PATHS or is_page(scope):
            return ANYBODY
        return self._keys.holder(scope, _given_key(scope))


def _given_key(scope: Scope) -> bytes:
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    return key.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""


def _unauthorized() -> RequestError:
    return RequestError(
        "no API key, or a wrong one", code="invalid_api_key", status=401, hint="send Authorization: Bearer KEY"
    )
