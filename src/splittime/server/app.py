"""The application: which path is answered by what. `run.serve` puts it on a socket."""

from collections.abc import Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as Path

from splittime.core.errors import NotFound, RequestError, error_body
from splittime.engine.client import EngineClient
from splittime.engine.tokenizer import Tokenizer
from splittime.ledger.store import Ledger
from splittime.server import routes_dashboard, routes_docs, routes_info, routes_ledger, routes_sleep
from splittime.server.config import ModelInfo, ServerConfig
from splittime.server.edge import Edge
from splittime.server.http import AnswerAtOnce, AtOnce, Receive, Scope, Send
from splittime.server.routes_generate import GenerationEndpoint
from splittime.server.routes_info import Handler, Route
from splittime.server.run import serve
from splittime.server.service import Service

PATHS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", routes_dashboard.index),
    ("GET", "/v1/models", routes_info.models),
    ("GET", "/v1/models/{name:path}", routes_info.one_model),
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
    ("GET", "/ledger/requests/{request_id:path}", routes_ledger.one_request),
    ("GET", "/ledger/steps", routes_ledger.steps),
    ("GET", "/ledger/facts", routes_ledger.facts),
    ("GET", "/ledger/trace.json", routes_ledger.trace_json),
    ("GET", "/dashboard/data", routes_dashboard.data),
    ("GET", "/dashboard/requests/{request_id:path}", routes_dashboard.one_request),
    ("GET", "/dashboard/findings", routes_dashboard.findings),
    ("GET", "/dashboard/static/{name}", routes_dashboard.static),
    ("GET", "/openapi.json", routes_docs.openapi),
    ("GET", "/docs", routes_docs.docs),
)


class App:
    """The ASGI application; `service` is what it serves with (drain it before the process ends)."""

    def __init__(self, service: Service) -> None:
        self.service = service
        hot = {
            "/v1/completions": GenerationEndpoint(service, "completions"),
            "/v1/chat/completions": GenerationEndpoint(service, "chat"),
        }
        self._at_once: dict[tuple[str, str], AnswerAtOnce] = {("GET", "/health"): routes_info.health_at_once}
        self._at_once |= {("POST", path): endpoint.refuse_at_once for path, endpoint in hot.items()}
        routes = [
            *(Path(path, endpoint, methods=["POST"]) for path, endpoint in hot.items()),
            *(_path(service, path) for path in dict.fromkeys(path for _, path, _ in PATHS)),
        ]
        paths = Paths(routes=routes, exception_handlers={HTTPException: _http_error})
        self._edge = Edge(Shortcut(hot, paths), service.config, service.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge(scope, receive, send)

    def at_once(self, scope: Scope) -> AtOnce | None:
        """The answer to a request whose head is known, where that is enough to tell it; else None."""
        answer = self._at_once.get((scope["method"], scope["path"]))
        return None if answer is None else self._edge.at_once(scope, answer)


class Paths(Starlette):
    """Starlette less its outermost layer: that answers the unforeseen in plain text, `Edge` in OpenAI's form."""

    def build_middleware_stack(self) -> Any:
        return ExceptionMiddleware(self.router, handlers=self.exception_handlers)


class Shortcut:
    """Leads POSTs to the hot endpoints past the framework, whose layers around `send` would be paid for each chunk."""

    def __init__(self, hot: dict[str, GenerationEndpoint], others: Starlette) -> None:
        self._hot, self._others = hot, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._others)(scope, receive, send)


def _path(service: Service, path: str) -> Path:
    """All methods of one path, as one route (so that a wrong method is a 405, not a 404)."""
    by_method = {method: Route(service, handler) for method, at, handler in PATHS if at == path}
    if "GET" in by_method:
        by_method["HEAD"] = by_method["GET"]

    class ByMethod:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await by_method[scope["method"]](scope, receive, send)

    return Path(path, ByMethod(), methods=list(by_method))


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


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        hint = OTHER_APIS.get(request.url.path.rstrip("/"), "GET /openapi.json lists all paths")
        ours: RequestError = NotFound(f"no such path: {request.url.path}", hint=hint)
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{request.url.path} is not for {request.method}"
        ours = RequestError(message, code="http_error", status=405, value=request.method, hint=f"use {allowed}")
    else:
        ours = RequestError(str(error.detail), code="http_error", status=error.status_code)
    headers = dict(error.headers or {})
    return Response(orjson.dumps(error_body(ours.info)), error.status_code, headers, media_type="application/json")


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    ledger: Ledger,
    config: ServerConfig,
    model: ModelInfo | Callable[[], ModelInfo | None],
) -> App:
    """The ASGI application. `model` may be a callable that answers None until the engine is ready."""
    return App(Service(client, tokenizer, ledger, config, model))


__all__: list[Any] = ["App", "build_app", "serve"]
