"""The application on a socket: uvicorn with uvloop and httptools, and our own way of ending.

uvicorn answers SIGTERM by waiting for every connection and then raising the signal again, which ends the process with
-15; its own time-out would cut streams without a word. So signals are ours: the first drains (`Service.drain`: nobody
is admitted, open requests finish within the grace time, the rest get an error event) and the process ends with 0; the
second ends it at once.

`SO_SNDBUF` bounds what the kernel takes in for a client that does not read; left alone it grows to megabytes.
TCP_NODELAY needs nothing: uvloop sets it on every connection (a test says so).
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
import uvloop

from splittime.server import sparing
from splittime.server.config import ServerConfig
from splittime.server.connection import ConnectionProtocol

BACKLOG = 2048  # connections that may wait to be accepted
ACCEPTS_PER_TURN = 16
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
SHUTDOWN_S = 5  # for connections to close after the drain


class DrainingServer(uvicorn.Server):
    """uvicorn's server; `run` handles the signals. It accepts many connections in a turn of the event loop:
    libuv accepts one from each listening socket, so there are several that share one queue. With a single one, a
    client that came while turns were long waited for as many turns as there were newcomers before it."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        own = list(sockets or ())
        await super().serve([*own, *(one.dup() for one in own for _ in range(ACCEPTS_PER_TURN - 1))])

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def make_server(app: Any, config: ServerConfig) -> DrainingServer:
    sparing.install()
    protocol = partial(
        ConnectionProtocol,
        head_s=config.body_timeout_s,
        stall_s=config.slow_reader_s + STALL_MORE_S,
        at_once=app.at_once,
    )
    return DrainingServer(
        uvicorn.Config(
            app,
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
