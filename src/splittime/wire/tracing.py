"""`splittime.trace`: measure what is done for an answer before and between its requests, and have it beside them.

    import splittime

    splittime.trace.to("http://127.0.0.1:8100")         # the gateway or server; else SPLITTIME_TRACE_URL

    @splittime.trace("search", kind="retrieval")        # or: async def
    def search(question): ...

    with splittime.trace("answer", kind="agent"):       # the outermost opens a trace, those inside are its hops
        found = search(question)
        with splittime.trace("ask", kind="request"):
            client.chat.completions.create(..., extra_headers=splittime.trace.headers())

Each hop is an interval of this process's monotonic clock, counted from its trace's beginning. When the outermost is
over, its hops are posted to `/ledger/hops` by a thread of its own, and `splittime explain ID` shows them around its
requests. Nothing here fails or holds up what it measures: what cannot be posted is dropped, counted (`num_dropped`) and
logged. Of an exception only its class is told. A thread begins a trace of its own, unless it joins one: `trace(...,
joins=...)` with the `traceparent` of another thread, process or host. Imports the standard library alone.
"""

import asyncio
import atexit
import contextlib
import functools
import inspect
import json
import logging
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar

from splittime.core import trace_context as traces

log = logging.getLogger("splittime.trace")

MAX_QUEUED = 1024
TIMEOUT_S = 5.0
LAST_S = 2.0
PATH = "/ledger/hops"
REFUSAL_BYTES = 2048


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None  # the key is for the address that it was given for


class HopPost:
    """`put` never waits and never raises. num_dropped: hops that could not be posted."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._key: str | None = None
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._is_sending = self._is_failing = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.num_dropped = 0

    def to(self, url: str | None, key: str | None) -> None:
        """Post there from now on; None: nowhere. Raises `ValueError` for what is no http address."""
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("url is as http://127.0.0.1:8100, without a path")
        self._url, self._key = url.rstrip("/").removesuffix("/v1") if url is not None else None, key or None

    def put(self, body: dict[str, Any]) -> None:
        if self._url is None:
            return
        if self._pid != os.getpid():
            self._begin_anew()
        with self._changed:
            if len(self._waiting) < MAX_QUEUED:
                self._waiting.append(body)
                self._require_thread()
                self._changed.notify_all()
                return
        self.note_dropped(len(body["hops"]), f"{MAX_QUEUED} posts wait already")

    def note_dropped(self, count: int, why: str) -> None:
        """Count hops that are lost, and log the first of an outage."""
        if count:
            self.num_dropped += count
            if not self._is_failing:
                log.warning("hops are dropped: %s", why)
            self._is_failing = True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or is being sent. Returns False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._is_sending), timeout_s)

    def _begin_anew(self) -> None:
        """In a forked process: no thread came along, and what waited is the parent's to post."""
        self._pid, self._thread, self._is_sending = os.getpid(), None, False
        self._waiting, self._changed = deque(), threading.Condition()

    def _require_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="splittime-hops", daemon=True)
            self._thread.start()
            atexit.register(self.flush, LAST_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                body, self._is_sending = self._waiting.popleft(), True
            self._send(body)
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()

    def _send(self, body: dict[str, Any]) -> None:
        begin_s = time.monotonic()
        try:
            request = urllib.request.Request(f"{self._url}{PATH}", json.dumps(body, ensure_ascii=False).encode())
            request.add_header("Content-Type", "application/json")
            if self._key is not None:
                request.add_unredirected_header("Authorization", f"Bearer {self._key}")
            with self._opener.open(request, timeout=TIMEOUT_S):
                self._is_failing = False
        except urllib.error.HTTPError as error:
            self.note_dropped(len(body["hops"]), f"{self._url} answered {error.code}: {_words(error)}")
        except Exception as error:  # whatever it is: it is no fault of what was measured
            took_s = time.monotonic() - begin_s
            self.note_dropped(len(body["hops"]), f"{self._url} could not be asked in {took_s:.1f} s: {error}")


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(REFUSAL_BYTES))["error"]["message"])
    except Exception:  # no answer of ours
        return str(error.reason)


Call = TypeVar("Call", bound=Callable[..., Any])
now_ns = time.monotonic_ns
HEADER = "traceparent"


class _OwnTrace:
    """What of a trace is measured by this clock: one outermost hop, and all that is opened inside it."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id, self.clock, self.start_ns = trace_id, secrets.token_hex(8), now_ns()
        self._closed: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._is_over = False
        self.num_beyond = 0

    def take(self, hop: dict[str, Any], is_outermost: bool) -> list[dict[str, Any]]:
        """Keep a closed hop. Returns what is to be posted now: all of it with the outermost, and what is later."""
        with self._lock:
            self._is_over = self._is_over or is_outermost
            if len(self._closed) >= traces.MAX_TRACE_HOPS - 1 and not is_outermost:  # the outermost always has a place
                self.num_beyond += 1
                return []
            self._closed.append(hop)
            if not self._is_over:
                return []
            due, self._closed = self._closed, []
            return due


class OpenHop:
    """A hop between its beginning and its end: `with`, `async with`, or over each call of a function."""

    def __init__(self, tracer: "Tracer", name: str, kind: traces.HopKind, joins: traces.TraceContext) -> None:
        self._tracer, self.name, self.kind, self._joins = tracer, name, kind, joins
        self._own: _OwnTrace | None = None
        self._token: Token[OpenHop | None] | None = None
        self._begin_ns = 0
        self._parent_id = self.span_id = ""
        self._is_outermost = False

    @property
    def context(self) -> traces.TraceContext:
        """The trace and the span that a request made now lies in. Raises `RuntimeError` before the hop has begun."""
        if self._own is None:
            raise RuntimeError("the hop has not begun: enter it with `with`")
        return traces.TraceContext(self._own.trace_id, self.span_id)

    def __enter__(self) -> "OpenHop":
        if self._own is not None:
            raise RuntimeError("a hop is measured once: call splittime.trace(...) for each")
        above = _CURRENT.get()
        if self._joins != traces.NO_TRACE or above is None:
            self._own, self._is_outermost = _OwnTrace(self._joins.trace_id or secrets.token_hex(16)), True
            self._parent_id = self._joins.span_id
        else:
            self._own, self._parent_id = above._own, above.span_id
        self.span_id = secrets.token_hex(8)
        self._token = _CURRENT.set(self)
        self._begin_ns = now_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = now_ns()
        assert self._own is not None, "entered"
        assert self._token is not None, "entered"
        with contextlib.suppress(ValueError):  # closed in another context, as an async generator may be
            _CURRENT.reset(self._token)
        hop = self._as_json(end_ns, "" if kind is None else kind.__name__)
        due = self._own.take(hop, self._is_outermost)
        if due:
            self._tracer.post.put({"trace_id": self._own.trace_id, "clock": self._own.clock, "hops": due})
        if self._is_outermost:
            self._tracer.post.note_dropped(self._own.num_beyond, f"a trace has more than {traces.MAX_TRACE_HOPS} hops")

    async def __aenter__(self) -> "OpenHop":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Call) -> Call:
        """Returns the function, each call of which is a hop. Raises `TypeError` for a generator."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__name__} yields: put `with splittime.trace(...)` around the loop over it")
        if asyncio.iscoroutinefunction(function):

            @functools.wraps(function)
            async def measured(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def measured(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return function(*args, **kwargs)

        return measured  # type: ignore[return-value]

    def _again(self) -> "OpenHop":
        return OpenHop(self._tracer, self.name, self.kind, self._joins)

    def _as_json(self, end_ns: int, error: str) -> dict[str, Any]:
        assert self._own is not None, "entered"
        told = {"span_id": self.span_id, "name": self.name, "kind": self.kind.value}
        told |= {"parent_id": self._parent_id} if self._parent_id else {}
        told |= {"error": error[: traces.MAX_HOP_NAME_CHARS]} if error else {}
        start_ns = self._own.start_ns
        return told | {"begin_ns": self._begin_ns - start_ns, "duration_ns": end_ns - self._begin_ns}


_CURRENT: ContextVar[OpenHop | None] = ContextVar("splittime_hop", default=None)


class Tracer:
    """What `splittime.trace` is. url, api_key: where hops are posted; default: of the environment."""

    def __init__(self) -> None:
        self.post = HopPost()
        self.to(os.environ.get("SPLITTIME_TRACE_URL"), os.environ.get("SPLITTIME_API_KEY"))

    def to(self, url: str | None, api_key: str | None = None) -> None:
        """Post to this gateway or server from now on; None: measure, pass `traceparent` on, and post nothing.

        Raises `ValueError` for what is no http address.
        """
        self.post.to(url, api_key)

    def __call__(self, name: Any, kind: str = traces.HopKind.OTHER.value, *, joins: str | None = None) -> Any:
        """Returns a hop to be entered or to decorate with; given a function, the function measured by its own name.

        joins: a `traceparent` that another thread, process or host was given. Raises `ValueError` for a name or a kind
        that is none.
        """
        if callable(name):
            return self(name.__name__[: traces.MAX_HOP_NAME_CHARS], kind, joins=joins)(name)
        if not isinstance(name, str) or not 0 < len(name) <= traces.MAX_HOP_NAME_CHARS or not name.isprintable():
            raise ValueError(f"a hop's name is printable and of 1 to {traces.MAX_HOP_NAME_CHARS} characters: {name!r}")
        if kind not in traces.HopKind.__members__.values():
            raise ValueError(f"no kind {kind!r}: {', '.join(traces.HopKind)}")
        return OpenHop(self, name, traces.HopKind(kind), traces.read_traceparent(joins))

    def headers(self) -> dict[str, str]:
        """Returns the headers of a request that is made now; {} outside of any hop."""
        open_hop = _CURRENT.get()
        return {} if open_hop is None else {HEADER: open_hop.context.traceparent}

    def mark(self, request: Any) -> None:
        """Put `traceparent` into the headers of a request that is about to be sent: an event hook for httpx."""
        headers: MutableMapping[str, str] = request.headers
        headers.update(self.headers())

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what is over has been posted or dropped. Returns False if that took longer than `timeout_s`."""
        return self.post.flush(timeout_s)

    @property
    def num_dropped(self) -> int:
        """Hops that were measured and are not with the server."""
        return self.post.num_dropped


trace = Tracer()
