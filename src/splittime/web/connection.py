"""One connection: the only file that uses the internals of uvicorn's protocol (a test lists them).

`ConnectionProtocol` is uvicorn's HTTP protocol, extended by what ASGI has no word for.

With a write buffer limit of 0 uvloop gives bytes to the kernel when they are written, not at the end of the event
loop's turn, and a send blocks as soon as the kernel has no room: so "written" means what it says, and no stream's bytes
wait for 63 others. `TRANSPORT` lets a slow reader be cut off without waiting for it to read. Over TLS uvloop has a
buffer of its own, of 64 KiB: there "written" means encrypted, and on its way.

What can be answered from a request's head alone is answered in the parser's callback (`at_once`): a refusal by a full
queue, `/health`. That costs a fifth of a task with its ASGI scope and layers. The body of such a request is read past,
never kept: the connection is aborted if that takes longer than `LINGER_S` or `LINGER_BYTES`, or if the body was too
long to be worth it. Whoever pipelines, or does not read, takes the ordinary way, which knows how to wait.

uvicorn keeps a head of any length, and takes trailers, the fields behind a body in chunks, for fields of the head. Here
a head has a bound, as has what comes between and behind chunks, and trailers are dropped. A head that two readers would
read in two ways is refused, and nothing behind it is read.

The kernel says how long a request had lain in its socket before its head was read: `tcpi_last_data_recv` of Linux'
TCP_INFO, a few ms coarse. It costs 2 us a request. Data that came after the head makes it shorter, never longer.

Where a process may open no more files, a connection that waits for a request gives its place to a newcomer: the one
that has waited longest, and first one that has never shown a key.
"""

import asyncio
import resource
import socket
import struct
import time
from collections import deque
from functools import partial
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from splittime.web import http
from splittime.web.tenants import ANYBODY, TENANT

LEAST_TLS_BYTES = 1  # with 0 uvloop's TLS asks for a pause at each write, and never goes on
MAX_SKIPPED_BYTES = 64 * 1024  # of a body that nobody reads; a longer one costs its sender the connection
MAX_HEAD_BYTES = 64 * 1024  # beside what comes in one piece with its begin, which is 256 KiB at most
FRAMING_BYTES = 8  # around each byte of a body in chunks; chunks of one byte need five
CLOSE = (b"connection", b"close")
LEAVE_S = 1.0  # for requests of those who had just come in at a port that others go on to listen at
VERSIONS = ("1.0", "1.1")
TCP_INFO = getattr(socket, "TCP_INFO", None)
LAST_DATA_RECV = struct.Struct("=I")
LAST_DATA_RECV_AT = 8 + 11 * 4  # struct tcp_info, linux/tcp.h: 8 bytes of state, then 32-bit numbers, of which the 12th
LEAST_UNSEEN_MS = 8  # two of the kernel's ticks: less may be none
MOST_FILES = 2**16
KEPT_FILES = 64  # for what a process has open beside connections
PART = 3 / 4  # of the rest: a gateway has connections to upstreams too


class GivesWay(Protocol):
    """A connection."""

    def give_way(self) -> None:
        """End it at once."""
        ...


class Places:
    """most: connections that there may be."""

    def __init__(self, most: int) -> None:
        self._most, self._num_open = most, 0
        self._strangers: dict[GivesWay, None] = {}  # that wait, longest first
        self._known: dict[GivesWay, None] = {}

    def enter(self, one: GivesWay) -> None:
        self._num_open += 1
        if self._num_open > self._most:
            first = next(iter(self._strangers or self._known), None)
            if first is not None:
                self.begin(first)
                first.give_way()
        self.wait(one, is_known=False)

    def wait(self, one: GivesWay, *, is_known: bool) -> None:
        """Says that this one has no request at work from now on. is_known: it has shown a key."""
        self.begin(one)
        (self._known if is_known else self._strangers)[one] = None

    def begin(self, one: GivesWay) -> None:
        """Says that this one has a request at work."""
        self._strangers.pop(one, None)
        self._known.pop(one, None)

    def leave(self, one: GivesWay) -> None:
        self._num_open -= 1
        self.begin(one)


def places_of_process() -> Places:
    """Returns as many as the system gives, of which a process has fewer until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    open_at_once = most if soft == resource.RLIM_INFINITY else soft
    return Places(max(1, int((open_at_once - KEPT_FILES) * PART)))


class Answered:
    """Stands where uvicorn keeps the request at work, once that has been answered."""

    response_complete = True
    message_event = asyncio.Event()


ANSWERED = Answered()


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's protocol. It also ends what would hold a connection for ever: a client that does not send a request's
    head within `head_s`, and one that takes nothing of an answer for `stall_s` (streams have their own, shorter limit,
    and their own words). And what would fill the memory: one that sends more than `MAX_HEAD_BYTES` that are in no body.

    at_once: the answer to a request of which only the head is known, or None if the application has to look at it.
    """

    def __init__(
        self, *args: Any, head_s: float, stall_s: float, at_once: http.AnswerAtOnce, places: Places, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._head_s, self._stall_s, self._at_once, self._places = head_s, stall_s, at_once, places
        self._version, self._upgrades = "", False  # as the head says
        self._refusal: tuple[int, str] | None = None  # of a head that nobody is to read on behind
        self._room = MAX_HEAD_BYTES  # for bytes of this request that are in no body
        self._skip_timer: asyncio.TimerHandle | None = None  # runs while the body of an answered request comes in
        self._num_skipped = 0  # bytes of it
        self._ends = False  # after that body
        self._cycles: deque[RequestResponseCycle] = deque()  # requests of this connection that are not answered yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0 if self.scheme == "http" else LEAST_TLS_BYTES, low=0)
        self._head_timer = self.loop.call_later(self._head_s, transport.abort)
        self._places.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._places.leave(self)
        self._tell_all()
        self._head_timer = ended(self._head_timer)
        self._skip_timer = ended(self._skip_timer)
        self._stall_timer = ended(self._stall_timer)

    def data_received(self, data: bytes) -> None:
        self._room -= len(data)
        super().data_received(data)
        if self._room < 0 and not self.transport.is_closing():
            self.send_400_response("The request has too much that is in no body.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._room = MAX_HEAD_BYTES
        self._unset_keepalive_if_required()  # it may have come in one piece with a request that was answered at once
        self.scope["extensions"] = {http.TRANSPORT: self.transport}  # type: ignore[dict-item]
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self.transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_timer = ended(self._head_timer)
        self._places.begin(self)
        self._refusal = self._refused()
        if self._refusal is not None:
            raise ValueError("the parser reads no further, and tells `data_received`")
        self.scope[http.START_NS] = time.monotonic_ns()  # type: ignore[literal-required]
        self.scope[http.UNSEEN_NS] = unseen_ns(self.transport.get_extra_info("socket"))  # type: ignore[literal-required]
        answer = self._at_once(self._head()) if self._may_answer_at_once() else None
        if answer is not None:
            self._answer(answer)
            return
        super().on_headers_complete()
        if self._version == "1.0":  # which knows no chunks
            self.cycle.chunked_encoding = False
            self.cycle.send = partial(_send_bare, self.cycle)  # type: ignore[method-assign]
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)

    def _refused(self) -> tuple[int, str] | None:
        """Returns why nothing is to be read of this request, and with which status."""
        self._version, self._upgrades = self.parser.get_http_version(), self.parser.should_upgrade()
        if self._version not in VERSIONS:
            return 505, "This server speaks HTTP/1.1 only."
        if self._upgrades and self._has_body():  # the parser would take that body for the next request
            return 400, "This server speaks HTTP/1.1 only: send the request without Upgrade."
        codings = [value for name, value in self.scope["headers"] if name == b"transfer-encoding"]
        if len(codings) > 1:
            return 400, "The request has more than one Transfer-Encoding."
        if codings and codings[0].strip().lower() != b"chunked":
            return 501, "The one Transfer-Encoding that is read is chunked."
        return None

    def _has_body(self) -> bool:
        scope = cast(http.Scope, self.scope)
        return http.header(scope, b"transfer-encoding") is not None or http.header(scope, b"content-length") not in (
            None,
            "0",
        )

    # ---- answers at once

    def _may_answer_at_once(self) -> bool:
        """No request of this connection is being served, and the client takes what it is given."""
        is_free = self.cycle is None or self.cycle.response_complete
        is_open = not (self.flow.write_paused or self.transport.is_closing())
        return is_free and is_open and not self._upgrades

    def _head(self) -> http.Scope:
        """The scope, with what `at_once` asks for. A path that needs more than these lines is not answered at once."""
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["path"] = self.root_path + self.url.decode("latin-1")
        return cast(http.Scope, self.scope)

    def _answer(self, answer: http.AtOnce) -> None:
        """Write it; from here on the request's body is read past."""
        self._ends = not (self._keeps_alive() and self._is_worth_skipping())
        fields = [*self.server_state.default_headers, *answer.headers]
        if CLOSE in fields:
            self._ends = True
        elif self._ends:
            fields.append(CLOSE)
        self._write(answer.status, fields, answer.body)
        answer.on_written()
        self.server_state.total_requests += 1
        self.cycle = ANSWERED  # type: ignore[assignment]
        self._skip()

    def _write(self, status: int, fields: http.Headers, body: bytes) -> None:
        lines = b"".join([b"%b: %b\r\n" % pair for pair in fields])
        self.transport.write(b"".join((STATUS_LINE[status], lines, b"\r\n", body)))

    def _keeps_alive(self) -> bool:
        return self._version != "1.0" and self.parser.should_keep_alive()

    def _is_worth_skipping(self) -> bool:
        """Is what comes before the connection's next request short, and sure to come?"""
        scope = cast(http.Scope, self.scope)
        if self.expect_100_continue or http.header(scope, b"transfer-encoding") is not None:
            return False
        return (http.content_length(scope) or 0) <= MAX_SKIPPED_BYTES

    def skip_body(self, scope: http.Scope) -> None:
        """Read past what is still to come of a request's body, whose answer is all there but its end. Whoever waits for
        the body hears when it is over, or the connection is."""
        if scope is self.scope and self.cycle.more_body:
            self._skip()

    def _skip(self) -> None:
        self._num_skipped = 0
        self._skip_timer = self.loop.call_later(http.LINGER_S, self.transport.abort)

    def on_body(self, body: bytes) -> None:
        self._room += len(body) * FRAMING_BYTES
        if self._skip_timer is None:
            super().on_body(body)
            return
        self._num_skipped += len(body)
        if self._num_skipped > http.LINGER_BYTES:
            self.transport.abort()

    def on_message_complete(self) -> None:
        self._skip_timer = ended(self._skip_timer)
        if self.cycle is not ANSWERED:
            super().on_message_complete()
        elif self._ends:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._wait()

    def on_response_complete(self) -> None:
        if not (self.pipeline or self.transport.is_closing()):
            self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        """The next request may come, or another connection in place of this one."""
        holder = cast(http.Scope, self.scope).get(TENANT, ANYBODY)
        self._places.wait(self, is_known=holder is not ANYBODY)

    # ---- endings

    def give_way(self) -> None:
        self.transport.abort()

    def end_soon(self) -> None:
        """End the connection with the answer to its latest request; where it waits for one, `LEAVE_S` from now."""
        self._ends = True
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(LEAVE_S, self.timeout_keep_alive_handler)
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        status, words = self._refusal or (400, msg)
        length = (b"content-length", b"%d" % len(words))
        told = [(b"content-type", b"text/plain; charset=utf-8"), length, CLOSE]
        self._write(status, [*self.server_state.default_headers, *told], words.encode("ascii"))
        self.transport.close()
        self._tell_all()

    def _tell_all(self) -> None:
        """uvicorn tells only the last of pipelined requests that the client is gone, which is not the one at work."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = ended(self._stall_timer)

    def _watch_stall(self, num_bytes: int) -> None:
        self._stall_timer = self.loop.call_later(self._stall_s, self._check_stall, num_bytes)

    def _check_stall(self, num_bytes_before: int) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes >= num_bytes_before:
            self.transport.abort()
        else:
            self._watch_stall(num_bytes)


def ended(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stops a timer, if there is one; returns what stands in its place."""
    if timer is not None:
        timer.cancel()
    return None


async def _send_bare(cycle: RequestResponseCycle, message: Any) -> None:
    """Sends bytes of which nothing says how many there are: the connection's end is theirs."""
    cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


def unseen_ns(connection: socket.socket | None) -> int:
    """Returns how long the data being read now lay in its socket; 0 below `LEAST_UNSEEN_MS`, or if nobody can say."""
    if TCP_INFO is None or connection is None:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, LAST_DATA_RECV_AT + LAST_DATA_RECV.size)
    except OSError:  # it is closed already
        return 0
    if len(info) < LAST_DATA_RECV_AT + LAST_DATA_RECV.size:
        return 0
    (ms,) = LAST_DATA_RECV.unpack_from(info, LAST_DATA_RECV_AT)
    return ms * 1_000_000 if ms >= LEAST_UNSEEN_MS else 0
