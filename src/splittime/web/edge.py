"""The outermost ASGI layer: who may come in, what happens to the unforeseen, and to what a client sends unasked.

    names and pages (`Names`) -> CORS, if pages of other origins are let in -> the key (`tenants`) -> the application

This is the one place where any exception is caught: it is logged with its trace and answered with 500, and the server
goes on. An exception after the response began closes the connection, which the client sees as a broken stream.

A browser lets every page send requests to 127.0.0.1. What keeps a page of another site from reading a server without a
key, or from putting it to sleep, are headers that a page cannot write:

- `Host` is the name in the page's own address. A page that has its name lead to 127.0.0.1 after it was loaded (DNS
  rebinding) is of the same origin for the browser, and calls the server by that name. So a server on loopback takes
  only the names that it listens on, and those of `allowed_hosts`. A server on another address asks for a key, which no
  rebound page has: it takes any name, unless `allowed_hosts` says which. The port is not compared.
- `Origin` is the page that asks. It must be this server's own, which is where `Host` leads, port included, or one of
  `cors_origins`. Programs send none.
- Without `Origin`, `Sec-Fetch-Site` says whether the page is another's (`same-site` is: another port of this machine).
  It may link here, no more.

Probes (`/health`, `/ready`, `/ping`) are taken by any name, as Kubernetes has only a pod's address; they tell nothing.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware

from splittime.core.errors import ConfigError, EngineError, RequestError
from splittime.web import http
from splittime.web.tenants import ANYBODY, TENANT, ApiKeys, Tenant, forbidden

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # probes have no key, and call by any name
READABLE_HEADERS = ("x-request-id", "server-timing", "retry-after", "endpoint-load-metrics")
LAST: http.Message = {"type": "http.response.body", "body": b"", "more_body": False}
ANY = "*"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = ("GET", "HEAD")
FROM_WHERE = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
OTHER_SITES = ("cross-site", "same-site")
MAX_QUOTED_CHARS = 64
KEPT_HOSTS = 1024

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+?)\.?)(?::\d{1,5})?")
_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9._-]+|[0-9a-f:.]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@]+")

log = logging.getLogger("splittime.server")


class Edge:
    """pages: paths of the files of pages. A browser asks for them, and for `/`, before it knows that there is a key.
    aliases: other names of paths. spelled: what makes of a `send` one that spells errors as those that ask for paths of
    this beginning read them."""

    def __init__(
        self,
        app: http.Application,
        names: "Names",
        keys: ApiKeys,
        *,
        root_path: str = "",
        cors_origins: Sequence[str] = (),
        pages: frozenset[str] = frozenset(),
        aliases: Mapping[str, str] | None = None,
        spelled: Mapping[str, Callable[[http.Send], http.Send]] | None = None,
    ) -> None:
        self._app, self._names, self._keys, self._pages = app, names, keys, pages
        self._aliases, self._spelled = aliases or {}, spelled or {}
        self._root = f"{root_path}/"
        self._inside: http.Application = self._keyed
        if cors_origins:
            self._inside = CORSMiddleware(
                self._keyed,  # type: ignore[arg-type]
                allow_origins=cors_origins,
                allow_methods=("GET", "HEAD", "POST", "PATCH", "DELETE"),
                allow_headers=("*",),
                expose_headers=READABLE_HEADERS,
            )

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        scope["path"] = self._own_path(scope["path"])
        for beginning, spell in self._spelled.items():
            send = spell(send) if scope["path"].startswith(beginning) else send
        bounded = BoundedBody(scope, receive, send)
        try:
            await self._named(scope, bounded)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if bounded.has_begun:
                raise
            failure = EngineError("the server failed; its log says why", code="internal_error")
            await http.respond_error(bounded.send, failure)
        await bounded.end()

    def _own_path(self, path: str) -> str:
        """Without the root path, which not every proxy takes away, and without slashes at its end: a redirect would
        have to know by what name, and over what, the client asked."""
        if path.startswith(self._root):  # without a root path this changes nothing
            path = "/" + path.removeprefix(self._root)
        path = path.replace("//", "/").rstrip("/") or "/"
        return self._aliases.get(path, path)

    async def _named(self, scope: http.Scope, bounded: "BoundedBody") -> None:
        try:
            self._check_names(scope)
        except RequestError as refusal:
            await http.respond_error(bounded.send, refusal)
        else:
            await self._inside(scope, bounded.receive, bounded.send)

    async def _keyed(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        path, tenant = scope["path"], self._holder(scope)
        if tenant is None:
            await http.respond_error(send, _unauthorized(), headers=[(b"www-authenticate", b"Bearer")])
        elif not tenant.may_ask_for(path):
            await http.respond_error(send, forbidden(tenant, path))
        else:
            scope[TENANT] = tenant
            await self._app(scope, receive, send)

    def at_once(self, scope: http.Scope, answer: http.AnswerAtOnce) -> http.AtOnce | None:
        """Returns what `answer` says to a request of which the head is known, if it may come in. None: take the
        ordinary way, as those that may not and pages of a browser always do."""
        try:
            self._check_names(scope)
            tenant = self._holder(scope)
            if http.header(scope, b"origin") is not None or tenant is None or not tenant.may_ask_for(scope["path"]):
                return None
            scope[TENANT] = tenant
            return answer(scope)
        except RequestError:
            return None
        except Exception:
            log.exception("%s %s failed before it had a task", scope["method"], scope["path"])
            return None

    def _check_names(self, scope: http.Scope) -> None:
        if scope["path"] not in OPEN_PATHS:
            self._names.check(scope)

    def _holder(self, scope: http.Scope) -> Tenant | None:
        """Returns who asks; None if a key is wanted and there is no good one."""
        path = scope["path"]
        is_page = scope["method"] in ("GET", "HEAD") and (
            path in self._pages or (path == "/" and http.wants_html(scope))
        )
        if path in OPEN_PATHS or is_page:
            return ANYBODY
        scheme, _, key = (http.header(scope, b"authorization") or "").partition(" ")
        given = key.strip(" ") if scheme.lower() == "bearer" else http.header(scope, b"x-api-key") or ""
        return self._keys.holder(scope, given.encode("latin-1"))


class BoundedBody:
    """One request and its answer, with a bound on what a client sends that nobody asked for.

    Many answers are given before the request's body is there: routes that read none, refusals. To close such a
    connection at once would reset it, and the reset would overtake the answer; to let it be would hold it for as long
    as the client likes to send. So the answer goes out whole, and when the application has returned the connection
    reads past the rest of the body. A client that is done in time keeps its connection; any other loses it.

    `receive` and `send` are for the application; `end` is called when it has returned.
    """

    def __init__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        is_empty = http.header(scope, b"content-length") in (None, "0")
        self._is_read = is_empty and http.header(scope, b"transfer-encoding") is None
        self._is_open = False  # the answer is all there, and its end is kept back
        self.has_begun = False

    async def receive(self) -> http.Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: http.Message) -> None:
        self.has_begun = True
        if not self._is_read and message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_open = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def end(self) -> None:
        if not self._is_open:
            return
        transport = http.connection(self._scope)
        skip_body = getattr(transport and transport.get_protocol(), "skip_body", None)
        if skip_body is not None:  # in another's server nobody has one
            skip_body(self._scope)
            while not self._is_read:
                await self.receive()
        await self._send(LAST)


def _unauthorized() -> RequestError:
    return RequestError(
        "no API key, or a wrong one", code="invalid_api_key", status=401, hint="send Authorization: Bearer KEY"
    )


# ---- names and pages


class Names:
    """Checks both of each request. Raises `ConfigError` for names that could match nothing."""

    def __init__(self, host: str, allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()) -> None:
        _check_all("allowed_hosts", allowed_hosts, _PATTERN, "a host name without port, *.example, or *")
        _check_all("cors_origins", cors_origins, _ORIGIN, "an origin such as https://app.example:8443, or *")
        self._is_any_host = ANY in allowed_hosts or not (allowed_hosts or http.is_loopback(host))
        self._hosts = {*LOOPBACK_NAMES, host.lower(), *map(str.lower, allowed_hosts)}
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._is_own_host = lru_cache(KEPT_HOSTS)(self._looks_like_ours)
        self._is_any_origin = ANY in cors_origins
        self._origins = frozenset(map(str.lower, cors_origins))

    def check(self, scope: http.Scope) -> None:
        """Raises `RequestError` (403) for a request that some other site's page sent."""
        sent = _origin_headers(scope)
        hosts, origins = sent.get(b"host", ()), sent.get(b"origin", ())
        own_address = (scope.get("server") or ("",))[0]  # the address that this very connection came to
        if len(hosts) > 1 or not self._is_own_host("".join(hosts), own_address):
            raise _wrong_host(", ".join(hosts))
        if self._is_any_origin:
            return
        if not origins and _is_led_from_elsewhere(scope["method"], sent):
            raise _cross_site(None)
        if origins and self._is_foreign(", ".join(origins), "".join(hosts)):
            raise _cross_site(", ".join(origins))

    def _looks_like_ours(self, given: str, own_address: str) -> bool:
        match = _HOST.fullmatch(given.lower())
        if self._is_any_host or match is None:
            return self._is_any_host
        name = match[1] or match[2]
        return name in self._hosts or name == own_address or name.endswith(self._suffixes)

    def _is_foreign(self, origin: str, host: str) -> bool:
        return origin.lower() not in self._origins and _authority(origin.lower()) != host.lower()


def _origin_headers(scope: http.Scope) -> dict[bytes, list[str]]:
    """Returns what a browser says of where a request comes from. One pass, as refused requests are checked too."""
    sent: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        if name in FROM_WHERE:
            sent.setdefault(name, []).append(value.decode("latin-1"))
    return sent


def _is_led_from_elsewhere(method: str, sent: dict[bytes, list[str]]) -> bool:
    """Does another site's page ask for more than a link does?"""
    is_linked = method in SAFE_METHODS and sent.get(b"sec-fetch-mode") == ["navigate"]
    return not is_linked and any(site in OTHER_SITES for site in sent.get(b"sec-fetch-site", ()))


def _authority(origin: str) -> str | None:
    """Returns host and port, as `Host` has them of a page of this origin; None for the origin `null`."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:  # no address at all
        return None


def _check_all(name: str, values: Sequence[str], pattern: re.Pattern[str], wanted: str) -> None:
    for value in values:
        if not pattern.fullmatch(value.lower()):
            hint = "give the flag once for each; the environment variable has spaces between them"
            raise ConfigError(f"{name}: {value!r} is not {wanted}", param=name, value=value, hint=hint)


def _wrong_host(given: str) -> RequestError:
    message = f"this server is not called {given[:MAX_QUOTED_CHARS]!r}: only by the names it listens on"
    hint = "use its own address, or start it with --allowed-hosts NAME"
    return RequestError(
        message, code="host_not_allowed", status=403, param="Host", value=given[:MAX_QUOTED_CHARS], hint=hint
    )


def _cross_site(origin: str | None) -> RequestError:
    message = "a page of another site may link to this server, no more"
    value = None if origin is None else origin[:MAX_QUOTED_CHARS]
    hint = "ask from this server's own page or a program, or start it with --cors-origins ORIGIN"
    return RequestError(message, code="cross_site", status=403, param="Origin", value=value, hint=hint)
