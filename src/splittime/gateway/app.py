"""The gateway's application: which path is answered by what (`GatewayApp`), and the same on a socket (`run`)."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from splittime import __version__
from splittime.api.ledger_answers import QUERY, account_body, accounts_body, limit_of, number_of
from splittime.core.errors import NotFound, Refused
from splittime.gateway import page, routes
from splittime.gateway.canary import CompareArms
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import Secrets
from splittime.gateway.forwarded import ENDPOINTS, RESPONSES
from splittime.gateway.service import GatewayService
from splittime.gateway.versions import GatewayVersions
from splittime.gateway.visit import GatewayVisit
from splittime.ledger.store import Ledger
from splittime.web import http, serving
from splittime.web.edge import OPEN_PATHS, Edge, Names
from splittime.web.http import Handler, PathTable
from splittime.web.page_files import PREFIX
from splittime.web.reading import in_short_turns
from splittime.web.tenants import tenant_of

ALIVE = {"status": "ok"}


def _arm(gateway: GatewayService, scope: http.Scope) -> GatewayService:
    """Returns the version of the config that a request comes in by."""
    return gateway if gateway.versions is None else gateway.versions.arm_of(tenant_of(scope))


async def visit(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await GatewayVisit(_arm(gateway, scope), scope["path"], scope, receive, send).serve()


def _in_arm(handler: Handler) -> Handler:
    """Returns the handler, given the version that its request comes in by."""

    async def handle(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        await handler(_arm(gateway, scope), scope, receive, send)

    return handle


async def index(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The page for a browser, a few words in JSON for everybody else."""
    if http.wants_html(scope):
        return await page.send_page(scope, send)
    about = {"name": "splittime gateway", "version": __version__, "models": gateway.policy.names}
    await http.respond_json(send, {**about, "paths": [f"{method} {path}" for method, path, _ in PATHS]})


async def health(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Alive: this process answers."""
    await http.respond_json(send, ALIVE)


async def ready(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Would a request of some model be passed on now, or wait for an upstream to have room? It waits where all are held
    (`max_in_flight = 0`): who starts upstreams on demand must find the gateway ready, or nobody would ask for one."""
    gateway.require_serving()
    if not gateway.is_ready:
        raise Refused("no upstream may be asked now", reason="no_upstream", status=503)
    await http.respond_json(send, {"status": "ready"})


async def models(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The models of the config. Whether their upstreams answer is told by `/stats`."""
    cards = [_card(gateway, name) for name in gateway.policy.names]
    await http.respond_json(send, {"object": "list", "data": cards})


async def one_model(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    name = scope[http.PATH_REST]
    if name not in gateway.policy.names:
        hint = "GET /v1/models lists the models"
        raise NotFound(f"no upstream serves {name[:64]!r}", code="model_not_found", param="model", hint=hint)
    await http.respond_json(send, _card(gateway, name))


def _card(gateway: GatewayService, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": gateway.started_unix_s, "owned_by": "splittime-gateway"}


async def metrics(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    content_type = gateway.metrics.content_type.encode()
    await http.respond(send, gateway.metrics.render(), content_type=content_type)


async def stats(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await http.respond_json(send, gateway.stats())


async def facts(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the gateway knows of itself, as `splittime.ledger.facts.ServerFacts`; keys are in none of it."""
    await http.respond(send, msgspec.json.encode(gateway.facts()))


async def steps(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """None: a gateway computes nothing. `splittime explain` asks for the steps of a request's time."""
    limit_of(http.query_of(scope, "limit"))
    await http.respond_json(send, {"steps": []})


async def requests(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The latest accounts that the key may see, oldest first; with `slower_than_ms` only those that took longer."""
    wanted = http.query_of(scope, *QUERY)
    asked = number_of(wanted, "slower_than_ms"), limit_of(wanted), tenant_of(scope).sees
    await http.respond(send, await _beside(gateway, accounts_body, *asked))


async def one_request(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The closed account of a request, by its X-Request-Id."""
    request_id, tenant = scope[http.PATH_REST], tenant_of(scope)
    asked = request_id, tenant.sees, gateway.is_open(request_id, tenant)
    await http.respond(send, await _beside(gateway, account_body, *asked))


async def _beside(gateway: GatewayService, work: Callable[..., bytes], *asked: Any) -> bytes:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(gateway.pool, in_short_turns, work, gateway.ledger, *asked)


PATHS: tuple[tuple[str, str, Handler], ...] = (
    *(("POST", path, visit) for path in ENDPOINTS),
    ("GET", f"{RESPONSES}/{{response_id}}", _in_arm(routes.retrieve_response)),
    ("DELETE", f"{RESPONSES}/{{response_id}}", _in_arm(routes.delete_response)),
    ("POST", f"{RESPONSES}/{{response_id}}", _in_arm(routes.cancel_response)),
    ("POST", routes.PURGE, routes.purge),
    ("POST", routes.WRONG, routes.wrong),
    ("GET", "/", index),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name}", one_model),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/stats", stats),
    ("GET", routes.LINT, routes.send_lint),
    ("GET", page.DATA, page.send_data),
    ("GET", PREFIX + "{name}", page.send_file),
    ("GET", "/ledger/requests", requests),
    ("GET", "/ledger/requests/{request_id}", one_request),
    ("GET", "/ledger/steps", steps),
    ("GET", "/ledger/facts", facts),
    ("POST", "/ledger/hops", routes.post_hops),
    ("GET", "/ledger/hops/{trace_id}", routes.hops),
    ("GET", routes.CONFIG, routes.config_status),
    ("PATCH", routes.CONFIG, routes.apply_config),
    ("PATCH", routes.ROLLBACK, routes.rollback),
)
SHARED_PATHS = tuple(row for row in PATHS if row[1].startswith("/v1/") or row[1] in OPEN_PATHS)
"""What a shared port answers: what clients ask. Of a response that is kept (to go on from, read, delete or cancel) only
the gateway knows that passed it on, and the system may lead the client to another."""
OLLAMA = "Ollama's API is not passed on: ask a server itself, or here by OpenAI's, under /v1"
HINTS = {
    "/v1/prefill": "not passed on: ask the server that the request will go to",
    "/completions": "the base URL of an OpenAI client ends with /v1",
    "/chat/completions": "the base URL of an OpenAI client ends with /v1",
    "/models": "the base URL of an OpenAI client ends with /v1",
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/show"), OLLAMA),
}


class GatewayApp:
    """The ASGI application; `versions` is what it serves with (open it inside the event loop)."""

    def __init__(self, versions: GatewayVersions) -> None:
        self._versions = versions
        versions.on_swap = self._lead
        self._lead()

    def _lead(self) -> None:
        """Lead what comes from now on to the version that serves."""
        service = self._versions.current
        paths = PathTable(PATHS, service, HINTS, "GET /")
        shared = PathTable(SHARED_PATHS, service, HINTS, "GET / of a gateway's own port")
        names = Names(service.config.host, service.config.allowed_hosts)
        self._edge = Edge(paths.answer, names, service.keys, pages=page.page().urls)
        self._shared_port = service.config.shared_port
        self._shared_edge = Edge(shared.answer, names, service.keys)

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        is_shared = self._shared_port is not None and (scope["server"] or ("", 0))[1] == self._shared_port
        await (self._shared_edge if is_shared else self._edge)(scope, receive, send)

    def at_once(self, scope: http.Scope) -> http.AtOnce | None:
        """The answer to a request whose head is known, where that is enough to tell it; else None."""
        if scope["path"] == "/health" and scope["method"] == "GET":
            return self._edge.at_once(scope, lambda _: http.json_at_once(ALIVE))
        if scope["path"] in ENDPOINTS and scope["method"] == "POST":
            return self._edge.at_once(scope, self._refuse_at_once)
        return None

    def _refuse_at_once(self, scope: http.Scope) -> http.AtOnce | None:
        tenant = tenant_of(scope)
        arm = self._versions.arm_of(tenant)
        return None if arm.is_open_to(tenant) else GatewayVisit(arm, scope["path"], scope).refuse_at_once()


async def run(
    config: GatewayConfig,
    secrets: Secrets,
    ledger: Ledger,
    *,
    path: Path | None = None,
    compare: CompareArms | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until a signal has drained it. path: of the config, which SIGHUP reads again. compare: decides on canaries.
    on_listening: is told the port."""
    versions = GatewayVersions(config, secrets, ledger, path=path, compare=compare)
    await versions.open()
    if path is not None:
        _on_hangup(versions)
    try:
        await serving.run(
            GatewayApp(versions), config, versions.drain, shared_port=config.shared_port, on_listening=on_listening
        )
    finally:
        await versions.close()


def _on_hangup(versions: GatewayVersions) -> None:
    loop, reading = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def reread() -> None:
        task = loop.create_task(versions.reread())
        reading.add(task)
        task.add_done_callback(reading.discard)

    loop.add_signal_handler(signal.SIGHUP, reread)
