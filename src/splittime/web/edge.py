"""The outermost ASGI layer: who may come in, what happens to the unforeseen, and to what a client sends unasked.

    names (`origin`) -> CORS, if pages of other origins are let in -> the key (`tenants`) -> the application

This is the one place where any exception is caught: it is logged with its trace and answered with 500, and the server
goes on. An exception after the response began closes the connection, which the client sees as a broken stream.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from splittime.core.errors import EngineError, RequestError
from splittime.web.http import (
    LINGER_BYTES,
    LINGER_S,
    AnswerAtOnce,
    Application,
    AtOnce,
    Message,
    Receive,
    Scope,
    Send,
    connection,
    header,
    respond_error,
    wants_html,
)
from splittime.web.origin import Names
from splittime.web.tenants import ANYBODY, TENANT, ApiKeys, Tenant, forbidden

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # probes have no key, and call by any name
READABLE_HEADERS = ("x-request-id", "server-timing", "retry-after", "endpoint-load-metrics")
LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}

log = logging.getLogger("splittime.server")


class Edge:
    """pages: paths of the files of pages. A browser asks for them, and for `/`, before it knows that there is a key."""

    def __init__(
        self,
        app: Application,
        names: Names,
        keys: ApiKeys,
        *,
        root_path: str = "",
        cors_origins: Sequence[str] = (),
        pages: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._names, self._keys, self._pages = app, names, keys, pages
        self._root = f"{root_path}/"
        self._inside: Application = self._keyed
        if cors_origins:
            self._inside = CORSMiddleware(
                self._keyed,  # type: ignore[arg-type]
                allow_origins=cors_origins,
                allow_methods=("GET", "HEAD", "POST", "PATCH"),
                allow_headers=("*",),
                expose_headers=READABLE_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        scope["path"] = self._own_path(scope["path"])
        bounded = BoundedBody(scope, receive, send)
        try:
            await self._named(scope, bounded)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if bounded.has_begun:
                raise
            failure = EngineError("the server failed; its log says why", code="internal_error")
            await respond_error(bounded.send, failure)
        await bounded.end()

    def _own_path(self, path: str) -> str:
        """Without the root path, which not every proxy takes away, and without slashes at its end: a redirect would
        have to know by what name, and over what, the client asked."""
        if path.startswith(self._root):  # without a root path this changes nothing
            path = "/" + path.removeprefix(self._root)
        return path.rstrip("/") or "/"

    async def _named(self, scope: Scope, bounded: "BoundedBody") -> None:
        try:
            self._check_names(scope)
        except RequestError as refusal:
            await respond_error(bounded.send, refusal)
        else:
            await self._inside(scope, bounded.receive, bounded.send)

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
        """Returns who asks; None if a key is wanted and there is no good one."""
        path = scope["path"]
        is_page = scope["method"] in ("GET", "HEAD") and (path in self._pages or (path == "/" and wants_html(scope)))
        if path in OPEN_PATHS or is_page:
            return ANYBODY
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        return self._keys.holder(scope, key.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b"")


class BoundedBody:
    """One request and its answer, with a bound on what a client sends that nobody asked for.

    Many answers are given before the request's body is there: routes that read none, refusals. To close such a
    connection at once would reset it, and the reset would overtake the answer; to let it be would hold it for as long
    as the client likes to send. So the answer goes out whole, and when the application has returned the rest of the
    body is read and dropped, for `LINGER_S` and `LINGER_BYTES` at most. A client that is done by then keeps its
    connection; any other loses it.

    `receive` and `send` are for the application; `end` is called when it has returned.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        is_empty = header(scope, b"content-length") in (None, "0")
        self._is_read = is_empty and header(scope, b"transfer-encoding") is None
        self._is_open = False  # the answer is all there, and its end is kept back
        self.has_begun = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.has_begun = True
        if not self._is_read and message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_open = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def end(self) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._drop_rest()
        await self._send(LAST)
        transport = connection(self._scope)
        if not self._is_read and transport is not None:
            transport.close()

    async def _drop_rest(self) -> None:
        num_bytes = 0
        while not self._is_read and num_bytes <= LINGER_BYTES:
            num_bytes += len((await self.receive()).get("body", b""))


def _unauthorized() -> RequestError:
    return RequestError(
        "no API key, or a wrong one", code="invalid_api_key", status=401, hint="send Authorization: Bearer KEY"
    )
