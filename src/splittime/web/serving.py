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
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import uvicorn

from splittime.web import http, log_limit
from splittime.web.connection import ConnectionProtocol, ManyAcceptingServer

BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
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


def listen(config: SocketConfig) -> socket.socket:
    """The listening socket. Raises OSError if the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
    listener.bind((config.host, config.port))
    listener.listen(BACKLOG)
    return listener


async def run(
    app: ServedApp,
    config: SocketConfig,
    drain: Callable[[], Awaitable[None]],
    *,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until a signal has drained it. drain: ends what is open. on_listening: is told the port."""
    listener = listen(config)
    server = make_server(app, config)
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if draining:
            os._exit(EXIT_AT_ONCE)
        draining.append(loop.create_task(_drain(drain, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    on_listening(listener.getsockname()[1])
    await server.serve(sockets=[listener])


async def _drain(drain: Callable[[], Awaitable[None]], server: ManyAcceptingServer) -> None:
    try:
        await drain()
    finally:
        server.should_exit = True
