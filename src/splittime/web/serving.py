"""An application on a socket: uvicorn with uvloop and httptools, and our own way of ending.

uvicorn answers SIGTERM by waiting for every connection and then raising the signal again, which ends the process with
-15; its own time-out would cut streams without a word. So signals are ours: the first drains (nobody is admitted, open
requests finish within the grace time, the rest get an error event) and the process ends with 0; the second ends it at
once.

`SO_SNDBUF` bounds what the kernel takes in for a client that does not read; left alone it grows to megabytes.
TCP_NODELAY needs nothing: uvloop sets it on every connection (a test says so).
"""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import uvicorn

from splittime.web import http, log_limit
from splittime.web.accepting import ManyAcceptingServer
from splittime.web.connection import LEAVE_S, ConnectionProtocol
from splittime.web.places import places_of_process
from splittime.web.ports import bound

BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
STARTING_S = 0.01  # between looks whether the server has started
SHUTDOWN_S = 5  # for connections to close after the drain


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
    log_limit.install()
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
