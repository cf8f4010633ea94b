"""The application: which path is answered by what (`App`), and the same on a socket (`serve`)."""

from collections.abc import Awaitable, Callable
from functools import partial

import uvloop

from splittime.ledger.account import PREFILL
from splittime.server import dashboard, routes_apis, routes_dashboard, routes_engine, routes_info, routes_ledger
from splittime.server.config import ServerConfig
from splittime.server.routes_apis import KINDS, OF_MESSAGES, OF_OLLAMA, Spelled, spelled_at_once, spelling
from splittime.server.service import Service
from splittime.server.visit import PrefillVisit, Visit
from splittime.web import http, serving
from splittime.web.edge import Edge, Names
from splittime.web.http import PathTable
from splittime.web.serving import listen, make_server

__all__ = ["PATHS", "App", "Service", "listen", "make_server", "run", "serve"]

Handler = Callable[[Service, http.Scope, http.Receive, http.Send], Awaitable[None]]


def visited(endpoint: str, visit: type[Visit] = Visit) -> Handler:
    """Returns who answers at this one of `endpoints.ENDPOINTS`."""

    async def serve(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        await visit(service, endpoint, scope, receive, send).serve()

    return serve


VISITED = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
# a name in braces stands for the rest of a path, or for what is before its end: `http.PATH_REST` in the scope
PATHS: tuple[tuple[str, str, Handler], ...] = (
    *(("POST", path, visited(endpoint)) for path, endpoint in VISITED.items()),
    ("POST", "/v1/prefill", visited(PREFILL, PrefillVisit)),
    ("POST", "/v1/messages", routes_apis.create_message),
    ("POST", "/v1/messages/count_tokens", routes_apis.count_message_tokens),
    ("POST", "/v1/responses", routes_apis.create_response),
    ("POST", "/v1/responses/input_tokens", routes_apis.count_tokens),
    ("POST", "/v1/responses/{response_id}/cancel", routes_apis.cancel),
    ("GET", "/v1/responses/{response_id}", routes_apis.retrieve),
    ("GET", "/v1/responses/{response_id}/input_items", routes_apis.list_input),
    ("DELETE", "/v1/responses/{response_id}", routes_apis.delete),
    *(("POST", path, routes_apis.answer_ollama) for path in routes_apis.KINDS),
    *(("GET", path, routes_apis.tags) for path in ("/api/tags", "/api/ps")),
    ("POST", "/api/show", routes_apis.show),
    ("GET", "/api/version", routes_apis.version),
    ("GET", "/", routes_dashboard.index),
    ("GET", "/v1/models", routes_info.models),
    ("GET", "/v1/models/{name}", routes_info.one_model),
    ("POST", "/v1/load_lora_adapter", routes_engine.load_adapter),
    ("POST", "/v1/unload_lora_adapter", routes_engine.unload_adapter),
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
    ("POST", "/sleep", routes_engine.sleep),
    ("POST", "/wake", routes_engine.wake),
    ("POST", "/wake_up", routes_engine.wake),
    ("GET", "/is_sleeping", routes_engine.is_sleeping),
    ("POST", "/kv/blocks", routes_engine.blocks),
    ("GET", "/ledger/requests", routes_ledger.requests),
    ("GET", "/ledger/requests/{request_id}", routes_ledger.one_request),
    ("GET", "/ledger/steps", routes_ledger.steps),
    ("GET", "/ledger/facts", routes_ledger.facts),
    ("GET", "/ledger/trace.json", routes_ledger.trace_json),
    ("POST", "/ledger/hops", routes_ledger.post_hops),
    ("GET", "/ledger/hops/{trace_id}", routes_ledger.hops),
    ("POST", "/ledger/what-if", routes_engine.what_if),
    ("GET", "/dashboard/data", routes_dashboard.data),
    ("GET", "/dashboard/requests/{request_id}", routes_dashboard.one_request),
    ("GET", "/dashboard/findings", routes_dashboard.findings),
    ("GET", "/dashboard/static/{name}", routes_dashboard.static),
    ("GET", "/openapi.json", routes_info.openapi),
    ("GET", "/docs", routes_info.docs),
)

OF_OPENAI = "POST /v1/chat/completions, /v1/responses and /v1/completions speak OpenAI's API, /v1/messages Anthropic's"
OF_EMBEDDINGS = "POST /v1/embeddings speaks OpenAI's API"
OTHER_APIS = {  # what a client of another API asks for
    **dict.fromkeys(("/completion", "/generate"), OF_OPENAI),  # llama.cpp, TGI and SGLang
    **dict.fromkeys(("/embedding", "/embed"), OF_EMBEDDINGS),  # llama.cpp, TEI
}
# llama.cpp and others have these at the root, and clients of OpenAI's and Anthropic's may be given a URL without /v1
ALIASES = {path.removeprefix("/v1"): path for path in (*VISITED, "/v1/models", "/v1/responses", "/v1/messages")} | {
    "/v2/rerank": "/v1/rerank"
}


def _refuse_at_once(service: Service, endpoint: str, scope: http.Scope) -> http.AtOnce | None:
    return Visit(service, endpoint, scope).refuse_at_once()


def _refuse_as(spelled: Spelled, service: Service, endpoint: str, scope: http.Scope) -> http.AtOnce | None:
    answer = _refuse_at_once(service, endpoint, scope)
    return None if answer is None else spelled_at_once(answer, *spelled)


class App:
    """The ASGI application; `service` is what it serves with (drain it before the process ends). Without a model it is
    not ready until `service.settle` names one."""

    def __init__(self, service: Service) -> None:
        self.service, config = service, service.config
        self._paths = PathTable(PATHS, service, OTHER_APIS, "GET /openapi.json")
        self._at_once: dict[tuple[str, str], http.AnswerAtOnce] = {
            ("GET", "/health"): routes_info.health_at_once,
            **{("POST", path): partial(_refuse_at_once, service, endpoint) for path, endpoint in VISITED.items()},
            ("POST", "/v1/responses"): partial(_refuse_at_once, service, "chat"),
            ("POST", "/v1/messages"): partial(_refuse_as, OF_MESSAGES, service, "chat"),
            **{("POST", path): partial(_refuse_as, OF_OLLAMA, service, kind) for path, (kind, _) in KINDS.items()},
        }
        names = Names(config.host, config.allowed_hosts, config.cors_origins)
        self._edge = Edge(
            self._paths.answer,
            names,
            service.keys,
            root_path=config.root_path,
            cors_origins=config.cors_origins,
            pages=dashboard.paths(),
            aliases=ALIASES,
            spelled={"/v1/messages": spelling(*OF_MESSAGES), "/api/": spelling(*OF_OLLAMA)},
        )

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        await self._edge(scope, receive, send)

    def at_once(self, scope: http.Scope) -> http.AtOnce | None:
        """The answer to a request whose head is known, where that is enough to tell it; else None."""
        answer = self._at_once.get((scope["method"], scope["path"]))
        return None if answer is None else self._edge.at_once(scope, answer)


# ---- on a socket


async def run(app: App, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Serve until a signal has drained it. `on_listening` is told the port."""
    await serving.run(app, config, app.service.drain, on_listening=on_listening)
    app.service.close()


def serve(app: App, config: ServerConfig, *, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Run to the end of the process's serving; returns after a drain."""
    uvloop.run(run(app, config, on_listening=on_listening))
