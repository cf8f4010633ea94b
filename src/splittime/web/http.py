"""The pieces of HTTP that every route needs: reading a body within limits, answering in JSON, errors in OpenAI's form.

Plain ASGI throughout: nothing here buffers a stream or hides a disconnect.
"""

import asyncio
import ipaddress
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence, Sized
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from splittime.core.errors import ErrorInfo, NotFound, RequestError, SplittimeError, error_body
from splittime.core.trace_context import NO_TRACE, TraceContext, read_traceparent
from splittime.web import http

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_REQUEST_ID_CHARS = 128
START_NS = "splittime.start_ns"  # key in an ASGI scope: the first moment the application saw the request
UNSEEN_NS = "splittime.unseen_ns"  # and for how long it may have lain in the socket before that (`connection`)
PATH_REST = "splittime.path_rest"  # what of its path is a name
LINGER_S, LINGER_BYTES = 2.0, 16 * 2**20  # for what a client still sends after it was answered
TRANSPORT = "splittime.transport"  # key in an ASGI scope's extensions: the connection, to be aborted

DEADLINE_MS = (1, 10_000_000_000)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]+")
_NUMBER = re.compile(r"[0-9]{1,32}(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?")
Handler = Callable[[Any, http.Scope, http.Receive, http.Send], Awaitable[None]]


class AtOnce(NamedTuple):
    """An answer that can be given when a request's head has been read. on_written: called when it is in the socket."""

    status: int
    headers: Headers
    body: bytes
    on_written: Callable[[], None] = lambda: None


AnswerAtOnce = Callable[[Scope], AtOnce | None]


class Disconnected(Exception):
    """The client went away before its request was complete. Nobody is there to be told."""


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def receive_never() -> Message:
    """For who is told otherwise that the client has left."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing comes")


async def receive_nothing() -> Message:
    return {"type": "http.disconnect"}


async def send_nothing(message: Message) -> None:
    """Nobody is there to be sent anything."""


def header(scope: Scope, name: bytes) -> str | None:
    """A header's value (the first, if it is there twice)."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def headers(scope: Scope, name: bytes) -> list[str]:
    """All values of a header."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def wants_html(scope: Scope) -> bool:
    """A browser says so; a client of the API does not."""
    return "text/html" in (header(scope, b"accept") or "")


def flag(scope: Scope, name: str) -> bool:
    """A header that is on or off. Raises `RequestError` for what is neither."""
    given = header(scope, name.lower().encode())
    if given not in (None, "1", "true", "0", "false"):
        raise RequestError(f"{name} is 1 or 0, true or false", param=name, value=given[:64])
    return given in ("1", "true")


def query(scope: Scope) -> dict[str, str]:
    """Returns what is asked after the `?`, each name once."""
    pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    asked = dict(pairs)
    if len(asked) < len(pairs):
        raise RequestError("a name stands twice in the query", param=next(iter(asked))[:64])
    return asked


def query_of(scope: Scope, *known: str) -> dict[str, str]:
    """The query's values by name, where `known` are all the names that mean something."""
    asked = query(scope)
    for name, value in asked.items():
        if name not in known:
            message = f"{name[:64]!r} is not one of {', '.join(known)}"
            raise RequestError(message, param=name[:64], value=value[:64], limit=list(known))
    return asked


def connection(scope: Scope) -> Any:
    """Returns the transport of the request's connection; None where nobody has one."""
    return scope.get("extensions", {}).get(TRANSPORT)


def content_length(scope: Scope) -> int | None:
    value = header(scope, b"content-length")
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def new_request_id() -> str:
    return secrets.token_hex(12)


def request_id(scope: Scope) -> str:
    """`X-Request-Id`, or a new one."""
    given = header(scope, b"x-request-id")
    if given is None:
        return new_request_id()
    if len(given) > MAX_REQUEST_ID_CHARS or not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            "X-Request-Id may have letters, digits and . _ : - only",
            param="X-Request-Id",
            value=given[:MAX_REQUEST_ID_CHARS],
            limit=MAX_REQUEST_ID_CHARS,
        )
    return given


def trace_context(scope: Scope) -> TraceContext:
    """Returns what `traceparent` says; `NO_TRACE` where there is none, several, or one that is not valid."""
    given = headers(scope, b"traceparent")
    return read_traceparent(given[0]) if len(given) == 1 else NO_TRACE


def deadline_ns(scope: Scope, start_ns: int) -> int | None:
    """`X-Request-Deadline-Ms`, counted from arrival, as an instant."""
    return _instant_ns(scope, "X-Request-Deadline-Ms", start_ns)


def first_token_by_ns(scope: Scope, start_ns: int) -> int | None:
    """`x-llm-d-slo-ttft-ms`, llm-d's header, counted from arrival, as an instant."""
    return _instant_ns(scope, "x-llm-d-slo-ttft-ms", start_ns)


def _instant_ns(scope: Scope, name: str, start_ns: int) -> int | None:
    given = header(scope, name.lower().encode())
    if given is None:
        return None
    least, most = DEADLINE_MS
    ms = float(given) if _NUMBER.fullmatch(given) else math.nan
    if not least <= ms <= most:
        raise RequestError(
            f"{name} must be a number of milliseconds, {least} to {most}",
            param=name,
            value=given[:64],
            limit=[least, most],
            hint="count from the request's arrival, in digits such as 1500 or 2.5",
        )
    return start_ns + int(ms * 1e6)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises `RequestError` (413) as soon as it is known to be too long, (415) if it is compressed,
    `Disconnected`."""
    _check_encoding(scope)
    _check_size(content_length(scope) or 0, max_bytes)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        _check_size(size, max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_body_in_time(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """As `read_body`, from a client that must not take for ever: 408 after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read_body(scope, receive, max_bytes)
    except TimeoutError:
        message = "the body took too long to arrive"
        raise RequestError(message, code="body_timeout", status=408, limit=timeout_s) from None


def _check_encoding(scope: Scope) -> None:
    for value in headers(scope, b"content-encoding"):
        if any(coding.strip().lower() != "identity" for coding in value.split(",")):
            raise RequestError(
                "bodies are taken as they are, without an encoding",
                code="unsupported_encoding",
                status=415,
                param="Content-Encoding",
                value=value[:64],
                limit="identity",
                hint="send the body uncompressed",
            )


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise RequestError(
            f"the body has more than {limit} bytes", code="body_too_large", status=413, value=size, limit=limit
        )


async def respond(
    send: Send,
    body: bytes | memoryview,
    *,
    status: int = 200,
    content_type: bytes = b"application/json",
    headers: Headers | None = None,
    until_taken: bool = False,
) -> None:
    """until_taken: returns when the system has taken all of it, since the end of it, sent apart, waits for that."""
    sized = _sized(body, content_type, headers)
    await send({"type": "http.response.start", "status": status, "headers": sized})
    await send({"type": "http.response.body", "body": body, "more_body": until_taken})
    if until_taken:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _sized(body: Sized, content_type: bytes = b"application/json", headers: Headers | None = None) -> Headers:
    return [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]


async def respond_json(send: Send, value: Any, headers: Headers | None = None) -> None:
    await respond(send, orjson.dumps(value, default=str), headers=headers)


def notice_headers(notices: Sequence[str]) -> Headers:
    """Returns one header of all notices: who passes on an answer may keep one of each name."""
    return [(b"x-splittime-notice", "; ".join(notices).encode("latin-1"))] if notices else []


async def respond_error(send: Send, error: SplittimeError | ErrorInfo, headers: Headers | None = None) -> None:
    """Answer with an error: status, body, and `Retry-After` if it says when to come back."""
    status, body, more = _error_parts(error, headers)
    await respond(send, body, status=status, headers=more)


def error_at_once(error: SplittimeError, headers: Headers, on_written: Callable[[], None]) -> AtOnce:
    """Returns what `respond_error` answers, for a caller that can give it before there is a task."""
    status, body, more = _error_parts(error, headers)
    return AtOnce(status, _sized(body, headers=more), body, on_written)


def json_at_once(value: Any) -> AtOnce:
    body = orjson.dumps(value)
    return AtOnce(200, _sized(body), body)


def _error_parts(error: SplittimeError | ErrorInfo, headers: Headers | None) -> tuple[int, bytes, Headers]:
    info = error if isinstance(error, ErrorInfo) else error.info
    body = error_body(error) if isinstance(error, ErrorInfo) else error.to_body()
    more = list(headers or ())
    if info.retry_after_s is not None:
        more.append((b"retry-after", b"%d" % max(1, math.ceil(info.retry_after_s))))
    if info.status == 408:
        more.append((b"connection", b"close"))
    return info.status, _error_json(body), more


def _error_json(body: dict[str, Any]) -> bytes:
    """An error quotes what was sent, which may be a number that orjson cannot write."""
    try:
        return orjson.dumps(body, default=str)
    except TypeError:
        return json.dumps(body, default=str).encode()


def error_event(info: ErrorInfo) -> bytes:
    """An error inside a stream."""
    return b"data: " + _error_json(error_body(info)) + b"\n\n"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class PathTable:
    """paths: method, path and handler each. A name in braces stands for the rest of a path, or for what is before its
    end: `http.PATH_REST` in the scope. owner: what every handler is given first. hints: by path, for those that a
    client of another API asks for. listed_at: where all paths are listed."""

    def __init__(
        self, paths: Iterable[tuple[str, str, Handler]], owner: Any, hints: Mapping[str, str], listed_at: str
    ) -> None:
        self._owner, self._hints, self._listed_at = owner, hints, listed_at
        self._methods: dict[str, dict[str, Handler]] = {}  # by path; "HEAD" is answered as "GET"
        folders: dict[tuple[str, str], str] = {}
        for method, path, handler in paths:
            start, brace, rest = path.partition("{")
            end = rest.partition("}")[2]
            handlers = self._methods.setdefault(start + brace + end, {})
            handlers |= {method: handler} | ({"HEAD": handler} if method == "GET" else {})
            folders |= {(start, end): start + brace + end} if brace else {}
        self._folders = tuple(sorted(folders.items(), key=lambda each: -len(each[0][1])))

    async def answer(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Lead a request to its handler; what that raises for the client to know is answered here."""
        path, method = scope["path"], scope["method"]
        scope[http.PATH_REST] = ""  # also for "/folder/{", which is in the table as a folder
        handlers = self._methods.get(path)
        if handlers is None:
            for (start, end), name in self._folders:
                if path.startswith(start) and path.endswith(end):
                    handlers, scope[http.PATH_REST] = self._methods[name], path[len(start) : len(path) - len(end)]
                    break
        try:
            if handlers is None:
                hint = self._hints.get(path, f"{self._listed_at} lists all paths")
                raise NotFound(f"no such path: {path}", hint=hint)
            if method in handlers:
                await handlers[method](self._owner, scope, receive, send)
            else:
                await _refuse_method(scope, sorted(handlers), send)
        except SplittimeError as error:
            await http.respond_error(send, error)
        except http.Disconnected:
            pass


async def _refuse_method(scope: http.Scope, allowed: list[str], send: http.Send) -> None:
    listed, message = ", ".join(allowed), f"{scope['path']} is not for {scope['method']}"
    error = RequestError(message, code="method_not_allowed", status=405, value=scope["method"], hint=f"use {listed}")
    await http.respond_error(send, error, headers=[(b"allow", listed.encode())])
