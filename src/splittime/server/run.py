"""The application on a socket: uvicorn with uvloop and httptools, and our own way of ending.

uvicorn answers SIGTERM by waiting for every connection and then raising the signal again, which ends the process with
-15; its own time-out would cut streams without a word. So signals are ours: the first drains (`Service.drain`: nobody
is admitted, open requests finish within the grace time, the rest get an error event) and the process ends with 0; the
second ends it at once.

`SO_SNDBUF` bounds what the kernel takes in for a client that does not read; left alone it grows to megabytes.
TCP_NODELAY needs nothing: uvloop sets it on every connection (a test says so).
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

import uvicorn
import uvloop

from splittime.server.app import App
from splittime.server.config import ServerConfig
from splittime.web import log_limit
from splittime.web.connection import ConnectionProtocol, ManyAcceptingServer

BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
SHUTDOWN_S = 5  # for connections to close after the drain


def make_server(app: App, config: ServerConfig) -> ManyAcceptingServer:
    log_limit.install()
    protocol = partial(
        ConnectionProtocol,
        head_s=config.body_timeout_s,
        stall_s=config.slow_reader_s + STALL_MORE_S,
        at_once=app.at_once,
    )
    return ManyAcceptingServer(
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


async def run(app: App, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
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


async def _drain(app: App, server: ManyAcceptingServer) -> None:
    try:
        await app.service.drain()
    finally:
        server.should_exit = True


def serve(app: App, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Run to the end of the process's serving; returns after a drain."""
    uvloop.run(run(app, config, on_listening=on_listening))
