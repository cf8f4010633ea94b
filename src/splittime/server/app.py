"""The application: which path is answered by what (`App`), and the same on a socket (`serve`): uvicorn with uvloop and
httptools, and our own way of ending.

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
from collections.abc import Awaitable, Callable
from functools import partial

import uvicorn
import uvloop

from splittime.api.limits import ModelInfo
from splittime.core.errors import NotFound, RequestError, SplittimeError
from splittime.drive.client import EngineClient
from splittime.ledger.store import Ledger
from splittime.server import routes_dashboard, routes_info, routes_ledger, routes_sleep, routes_what_if
from splittime.server.config import ServerConfig
from splittime.server.dashboard import files
from splittime.server.service import Service
from splittime.server.visit import Visit
from splittime.text.tokenizer import Tokenizer
from splittime.web import http, log_limit
from splittime.web.connection import ConnectionProtocol, ManyAcceptingServer
from splittime.web.edge import Edge, Names

BACKLOG = 2048  # connections that may wait to be accepted
EXIT_AT_ONCE = 130
STALL_MORE_S = 5.0  # after `slow_reader_s`, so that a stream is dropped by itself, with its reason
SHUTDOWN_S = 5  # for connections to close after the drain

Handler = Callable[[Service, http.Scope, http.Receive, http.Send], Awaitable[None]]


async def complete(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await Visit(service, "completions", scope, receive, send).serve()


async def answer_chat(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await Visit(service, "chat", scope, receive, send).serve()


# a name in braces, at the end of a path, stands for the rest of it: `http.PATH_REST` in the scope
PATHS: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", complete),
    ("POST", "/v1/chat/completions", answer_chat),
    ("GET", "/", routes_dashboard.index),
    ("GET", "/v1/models", routes_info.models),
    ("GET", "/v1/models/{name}", routes_info.one_model),
    ("POST", "/tokenize", routes_info.tokenize),
    ("POST", "/detokenize", routes_info.detokenize),
    ("GET", "/health", routes_info.health),
    ("GET", "/ready", routes_info.ready),
    ("GET", "/ping", routes_info.ping),
    ("POST", "/ping", routes_info.ping),
    ("GET", "/version", routes_info.version),
    ("GET", "/favicon.ico", routes_info.favicon),
    ("GET", "/tokenizer_info", routes_info.tokenizer_info),
    ("POST", "/reset_prefix_cache", routes_info.reset_prefix_cache),
    ("GET", "/metrics", routes_info.metrics),
    ("GET", "/stats", routes_info.stats),
    ("GET", "/knobs", routes_info.knobs),
    ("PATCH", "/knobs", routes_info.change_knobs),
    ("POST", "/sleep", routes_sleep.sleep),
    ("POST", "/wake", routes_sleep.wake),
    ("POST", "/wake_up", routes_sleep.wake),
    ("GET", "/is_sleeping", routes_sleep.is_sleeping),
    ("GET", "/ledger/requests", routes_ledger.requests),
    ("GET", "/ledger/requests/{request_id}", routes_ledger.one_request),
    ("GET", "/ledger/steps", routes_ledger.steps),
    ("GET", "/ledger/facts", routes_ledger.facts),
    ("GET", "/ledger/trace.json", routes_ledger.trace_json),
    ("POST", "/ledger/what-if", routes_what_if.what_if),
    ("GET", "/dashboard/data", routes_dashboard.data),
    ("GET", "/dashboard/requests/{request_id}", routes_dashboard.one_request),
    ("GET", "/dashboard/findings", routes_dashboard.findings),
    ("GET", "/dashboard/static/{name}", routes_dashboard.static),
    ("GET", "/openapi.json", routes_info.openapi),
    ("GET", "/docs", routes_info.docs),
)

OF_OPENAI = "splittime speaks OpenAI's API: POST /v1/chat/completions and /v1/completions"
OTHER_APIS = {  # what a client of another API asks for
    "/v1/messages": OF_OPENAI,  # Anthropic
    "/api/generate": OF_OPENAI,  # Ollama
    "/api/chat": OF_OPENAI,
    "/api/tags": "GET /v1/models lists the models",
    "/completion": OF_OPENAI,  # llama.cpp
    "/generate": OF_OPENAI,  # TGI, SGLang
    "/v1/responses": "not served here: POST /v1/chat/completions answers a conversation",
    "/v1/embeddings": "not served here: this server generates text only",
    "/completions": "the base URL of an OpenAI client ends with /v1",
    "/chat/completions": "the base URL of an OpenAI client ends with /v1",
    "/models": "the base URL of an OpenAI client ends with /v1",
}


class App:
    """The ASGI application; `service` is what it serves with (drain it before the process ends)."""

    def __init__(self, service: Service) -> None:
        self.service, config = service, service.config
        self._methods: dict[str, dict[str, Handler]] = {}  # by path; "HEAD" is answered as "GET"
        for method, path, handler in PATHS:
            handlers = self._methods.setdefault(path.partition("{")[0], {})
            handlers |= {method: handler} | ({"HEAD": handler} if method == "GET" else {})
        self._folders = tuple(path.partition("{")[0] for _, path, _ in PATHS if "{" in path)
        self._at_once: dict[tuple[str, str], http.AnswerAtOnce] = {
            ("GET", "/health"): routes_info.health_at_once,
            ("POST", "/v1/completions"): lambda scope: Visit(service, "completions", scope).refuse_at_once(),
            ("POST", "/v1/chat/completions"): lambda scope: Visit(service, "chat", scope).refuse_at_once(),
        }
        names = Names(config.host, config.allowed_hosts, config.cors_origins)
        self._edge = Edge(
            self._answer,
            names,
            service.keys,
            root_path=config.root_path,
            cors_origins=config.cors_origins,
            pages=files.paths(),
        )

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        await self._edge(scope, receive, send)

    def at_once(self, scope: http.Scope) -> http.AtOnce | None:
        """The answer to a request whose head is known, where that is enough to tell it; else None."""
        answer = self._at_once.get((scope["method"], scope["path"]))
        return None if answer is None else self._edge.at_once(scope, answer)

    async def _answer(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Lead a request to its handler; what that raises for the client to know is answered here."""
        path, method = scope["path"], scope["method"]
        handlers = self._methods.get(path)
        if handlers is None and (folder := next((each for each in self._folders if path.startswith(each)), "")):
            handlers, scope[http.PATH_REST] = self._methods[folder], path.removeprefix(folder)
        try:
            if handlers is None:
                hint = OTHER_APIS.get(path, "GET /openapi.json lists all paths")
                raise NotFound(f"no such path: {path}", hint=hint)
            if method in handlers:
                await handlers[method](self.service, scope, receive, send)
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


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    ledger: Ledger,
    config: ServerConfig,
    model: ModelInfo | None = None,
    started_ns: int | None = None,
) -> App:
    """The ASGI application. Without a model it is not ready until `service.settle` names one."""
    return App(Service(client, tokenizer, ledger, config, model, started_ns))


# ---- on a socket


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
