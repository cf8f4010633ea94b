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
import contextlib
import functools
import inspect
import os
import secrets
import threading
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar

from splittime.core.trace_context import (
    MAX_HOP_NAME_CHARS,
    MAX_TRACE_HOPS,
    NO_TRACE,
    HopKind,
    TraceContext,
    read_traceparent,
)
from splittime.wire.hop_post import HopPost

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
            if len(self._closed) >= MAX_TRACE_HOPS - 1 and not is_outermost:  # the outermost always has a place
                self.num_beyond += 1
                return []
            self._closed.append(hop)
            if not self._is_over:
                return []
            due, self._closed = self._closed, []
            return due


class OpenHop:
    """A hop between its beginning and its end: `with`, `async with`, or over each call of a function."""

    def __init__(self, tracer: "Tracer", name: str, kind: HopKind, joins: TraceContext) -> None:
        self._tracer, self.name, self.kind, self._joins = tracer, name, kind, joins
        self._own: _OwnTrace | None = None
        self._token: Token[OpenHop | None] | None = None
        self._begin_ns = 0
        self._parent_id = self.span_id = ""
        self._is_outermost = False

    @property
    def context(self) -> TraceContext:
        """The trace and the span that a request made now lies in. Raises `RuntimeError` before the hop has begun."""
        if self._own is None:
            raise RuntimeError("the hop has not begun: enter it with `with`")
        return TraceContext(self._own.trace_id, self.span_id)

    def __enter__(self) -> "OpenHop":
        if self._own is not None:
            raise RuntimeError("a hop is measured once: call splittime.trace(...) for each")
        above = _CURRENT.get()
        if self._joins != NO_TRACE or above is None:
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
            self._tracer.post.note_dropped(self._own.num_beyond, f"a trace has more than {MAX_TRACE_HOPS} hops")

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
        told |= {"error": error[:MAX_HOP_NAME_CHARS]} if error else {}
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

    def __call__(self, name: Any, kind: str = HopKind.OTHER.value, *, joins: str | None = None) -> Any:
        """Returns a hop to be entered or to decorate with; given a function, the function measured by its own name.

        joins: a `traceparent` that another thread, process or host was given. Raises `ValueError` for a name or a kind
        that is none.
        """
        if callable(name):
            return self(name.__name__[:MAX_HOP_NAME_CHARS], kind, joins=joins)(name)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_HOP_NAME_CHARS or not name.isprintable():
            raise ValueError(f"a hop's name is printable and of 1 to {MAX_HOP_NAME_CHARS} characters: {name!r}")
        if kind not in HopKind.__members__.values():
            raise ValueError(f"no kind {kind!r}: {', '.join(HopKind)}")
        return OpenHop(self, name, HopKind(kind), read_traceparent(joins))

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
