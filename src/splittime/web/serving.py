"""An application on a socket: uvicorn with uvloop and httptools, and our own way of ending.

uvicorn answers SIGTERM by waiting for every connection and then raising the signal again, which ends the process with
-15; its own time-out would cut streams without a word. So signals are ours: the first drains (nobody is admitted, open
requests finish within the grace time, the rest get an error event) and the process ends with 0; the second ends it at
once.

`SO_SNDBUF` bounds what the kernel takes in for a client that does not read; left alone it grows to megabytes.
TCP_NODELAY needs nothing: uvloop sets it on every connection (a test says so).

The server that accepts connections: many in a turn of its loop, and those that wait at a port that it leaves.

Log lines that any client can cause are few: a storm of bad requests must not fill a disk, or take the loop's time.

Of each kind (a logger and its message before the values are put in) `BURST` lines in `WINDOW_S` are written. How many
more there were is said in one line when the window ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import uvicorn

from splittime.web import http
from splittime.web.connection import CLOSE, LEAVE_S, ConnectionProtocol, places_of_process
from splittime.web.ports import bound

ACCEPTS_PER_TURN = 16
HANDSHAKE_S = 5.0  # of TLS: until then a connection has a descriptor, and no place that it could give to a newcomer
BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
STARTING_S = 0.01  # between looks whether the server has started
SHUTDOWN_S = 5  # for connections to close after the drain
BURST = 5
WINDOW_S = 10.0
LOGGERS = ("uvicorn.error", "splittime.server")


class ManyAcceptingServer(uvicorn.Server):
    """Leaves signals alone, and accepts many connections in a turn of the event loop. libuv accepts one from each
    listening socket, so there are several that share one queue. With a single one, a client that came while turns were
    long waited for as many turns as there were newcomers before it."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        own = list(sockets or ())
        await super().serve([*own, *(one.dup() for one in own for _ in range(ACCEPTS_PER_TURN - 1))])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does for sockets, with a bound of our own on handshakes."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self._protocol, sock=one, backlog=self.config.backlog, **self._tls())
            for one in sockets or ()
        ]
        self.started = True

    def _tls(self) -> dict[str, Any]:
        return {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S} if self.config.ssl else {}

    def leave(self, listener: socket.socket) -> None:
        """Stop listening where others go on to, and serve whoever the system has let in there. Each answer from here on
        ends its connection: the next one leads to the others. listener: one more of that address, and the last."""
        address, loop = listener.getsockname(), asyncio.get_running_loop()
        for one in self.servers:
            if one.sockets and one.sockets[0].getsockname() == address:
                one.close()
        waiting = _accepted(listener, self.config.backlog)
        listener.close()
        self.config.encoded_headers.append(CLOSE)
        self.server_state.default_headers.append(CLOSE)
        for open_one in self.server_state.connections:
            cast(ConnectionProtocol, open_one).end_soon()
        adopting = (loop.connect_accepted_socket(self._protocol, one, **self._tls()) for one in waiting)
        self._adopted = asyncio.gather(*adopting, return_exceptions=True)

    def _protocol(self) -> asyncio.Protocol:
        """Returns the protocol of one more connection, as uvicorn makes it."""
        made = self.config.http_protocol_class
        return cast(
            asyncio.Protocol,
            made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state),  # type: ignore[call-arg]
        )

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def _accepted(listener: socket.socket, most: int) -> list[socket.socket]:
    """Returns the connections that wait there, without waiting for any."""
    listener.setblocking(False)
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):  # there is no other, or no descriptor for it
        while len(found) < most:
            found.append(listener.accept()[0])
    for one in found:
        one.setblocking(False)
    return found


class ServedApp(Protocol):
    """An ASGI application that can answer some requests by their head alone."""

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None: ...

    def at_once(self, scope: http.Scope) -> http.AtOnce | None: ...


class SocketConfig(Protocol):
    """What is asked of a configuration here."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def body_timeout_s(self) -> float: ...
    @property
    def slow_reader_s(self) -> float: ...
    @property
    def send_buffer_bytes(self) -> int: ...


def make_server(app: ServedApp, config: SocketConfig) -> ManyAcceptingServer:
    limit_log_lines()
    protocol = partial(
        ConnectionProtocol,
        head_s=config.body_timeout_s,
        stall_s=config.slow_reader_s + STALL_MORE_S,
        at_once=app.at_once,
        places=places_of_process(),
    )
    return ManyAcceptingServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            host=config.host,
            port=config.port,
            loop="uvloop",
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )


def listen(config: SocketConfig, shared_port: int | None = None) -> socket.socket:
    """The listening socket: at the config's port, or at one that others share. Raises OSError if the address is
    taken."""
    listener = bound(config.host, shared_port or config.port, shares=shared_port is not None)
    if config.send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
    listener.listen(BACKLOG)
    return listener


async def run(
    app: ServedApp,
    config: SocketConfig,
    drain: Callable[[], Awaitable[None]],
    *,
    shared_port: int | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until a signal has drained it. drain: ends what is open. shared_port: beside its own, one that others
    share (`ports`); a drain begins with leaving it to them. on_listening: is told its own port."""
    listener = listen(config)
    shared = [] if shared_port is None else [listen(config, shared_port)]
    server = make_server(app, config)
    last = [one.dup() for one in shared]  # not served, so that it can be emptied when the others are closed
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if draining:
            os._exit(EXIT_AT_ONCE)
        draining.append(loop.create_task(_drain(drain, server, last)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    on_listening(listener.getsockname()[1])
    await server.serve(sockets=[listener, *shared])


async def _drain(
    drain: Callable[[], Awaitable[None]], server: ManyAcceptingServer, shared: Sequence[socket.socket]
) -> None:
    try:
        for listener in shared:
            await _leave(server, listener)
    finally:
        try:
            await drain()
        finally:
            server.should_exit = True


async def _leave(server: ManyAcceptingServer, listener: socket.socket) -> None:
    """Leave the port of this listener, and serve for a while who has come in there."""
    while not server.started:  # else it would begin to listen there
        await asyncio.sleep(STARTING_S)
    server.leave(listener)
    await asyncio.sleep(LEAVE_S)


class LogWindow:
    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.num_written = self.num_left_out = 0


class LogLimit(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], LogWindow] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or hasattr(record, "num_left_out"):
            return True
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        window = self._windows.get(kind)
        if window is None or now_s - window.begin_s >= WINDOW_S:
            self._close(kind)
            window = self._windows[kind] = LogWindow(now_s)
        if window.num_written < BURST:
            window.num_written += 1
            return True
        window.num_left_out += 1
        if window.num_left_out == 1:
            _call_later(WINDOW_S - (now_s - window.begin_s), lambda: self._close(kind))
        return False

    def _close(self, kind: tuple[str, str]) -> None:
        """Close a window, and log how many lines it left out, if any."""
        window = self._windows.pop(kind, None)
        if window is not None and window.num_left_out:
            (name, text), more = kind, {"num_left_out": window.num_left_out}
            words = "%d more lines like %r were left out in %g s"
            logging.getLogger(name).warning(words, window.num_left_out, text, WINDOW_S, extra=more)


def _call_later(delay_s: float, work: Callable[[], None]) -> None:
    """In the event loop, if there is one here; else the next line of the kind closes the window."""
    try:
        asyncio.get_running_loop().call_later(delay_s, work)
    except RuntimeError:
        return


def limit_log_lines() -> None:
    """Add the filter to each logger, once a process, however many servers it makes."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, LogLimit) for each in logger.filters):
            logger.addFilter(LogLimit())
