"""The application on a socket: uvicorn with uvloop and httptools, and our own way of ending.

uvicorn answers SIGTERM by waiting for every connection and then raising the signal again, which ends the process with
-15; its own time-out would cut streams without a word. So signals are ours: the first drains (`Service.drain`: nobody
is admitted, open requests finish within the grace time, the rest get an error event) and the process ends with 0; the
second ends it at once.

Three things that ASGI has no word for are put into each connection here. With a write buffer limit of 0 uvloop gives
bytes to the kernel when they are written, not at the end of the event loop's turn, and a send blocks as soon as the
kernel has no room: so "written" means what it says, and no stream's bytes wait for 63 others. `TRANSPORT` lets a slow
reader be cut off without waiting for it to read. `SO_SNDBUF` bounds what the kernel takes in for a client that does not
read; left alone it grows to megabytes. TCP_NODELAY needs nothing: uvloop sets it on every connection (a test says so).
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from splittime.server.config import ServerConfig
from splittime.server.http import START_NS, TRANSPORT, UNSEEN_NS
from splittime.server.socket_wait import unseen_ns

BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
SHUTDOWN_S = 5  # for connections to close after the drain


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with the connection handed to the application, and writing at once.

    It also ends what would hold a connection for ever: a client that does not send a request's head within `head_s`,
    and one that takes nothing of an answer for `stall_s` (streams have their own, shorter limit, and their own words).
    """

    def __init__(self, *args: Any, head_s: float, stall_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_s, self._stall_s = head_s, stall_s
        self._cycles: list[RequestResponseCycle] = []  # requests of this connection that are not answered yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._head_timer = self.loop.call_later(self._head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell_all()
        self._stop_head_timer()
        self._stop_stall_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[dict-item]
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self.scope[START_NS] = time.monotonic_ns()  # type: ignore[literal-required]
        self.scope[UNSEEN_NS] = unseen_ns(self.transport.get_extra_info("socket"))  # type: ignore[literal-required]
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
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
        self._stop_stall_timer()

    def _watch_stall(self, num_bytes: int) -> None:
        self._stall_timer = self.loop.call_later(self._stall_s, self._check_stall, num_bytes)

    def _check_stall(self, num_bytes_before: int) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes >= num_bytes_before:
            self.transport.abort()
        else:
            self._watch_stall(num_bytes)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class DrainingServer(uvicorn.Server):
    """uvicorn's server; signals are handled by who runs it."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def make_server(app: Any, config: ServerConfig) -> DrainingServer:
    stall_s = config.slow_reader_s + STALL_MORE_S
    return DrainingServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            loop="uvloop",
            http=partial(ConnectionProtocol, head_s=config.body_timeout_s, stall_s=stall_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises OSError if the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
    listener.bind((config.host, config.port))
    listener.listen(BACKLOG)
    return listener


async def run(app: Any, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Serve until a signal has drained it. `on_listening` is told the port."""
    listener = listen(config)
    server = make_server(app, config)
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if draining:
            os._exit(EXIT_AT_ONCE)
        draining.append(loop.create_task(_drain(app, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    on_listening(listener.getsockname()[1])
    await server.serve(sockets=[listener])
    app.service.close()


async def _drain(app: Any, server: DrainingServer) -> None:
    try:
        await app.service.drain()
    finally:
        server.should_exit = True


def serve(app: Any, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Run to the end of the process's serving; returns after a drain."""
    uvloop.run(run(app, config, on_listening=on_listening))
