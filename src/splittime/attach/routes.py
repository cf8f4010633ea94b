"""`/ledger/...` and the page on vLLM's own port, answered by the same functions as on ours.

The page is at `/`, which vLLM leaves free. Of several engines (data parallel) each has books of its own: `?engine=1`
asks for the second's. All of these paths ask for vLLM's key, where it has one (`--api-key`). Where it has none they
answer to this machine alone: a ledger tells of everybody's requests.
"""

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from splittime import __version__
from splittime.attach.joining import Joining
from splittime.attach.request_book import Answer, name_of
from splittime.core.engine import EngineStats
from splittime.core.errors import NotFound, RequestError, SplittimeError
from splittime.core.this_process import process_start_ns
from splittime.ledger.account import Mark
from splittime.ledger.facts import Process, ServerFacts
from splittime.server import dashboard, routes_dashboard, routes_ledger
from splittime.server.books import KeepsBooks, OpenBook
from splittime.web import http
from splittime.web.edge import Edge, Names
from splittime.web.tenants import ApiKeys, Tenant

READING_THREADS = 2
SHOWN_KNOBS = ("max_num_seqs", "max_num_batched_tokens")
LOOPBACK = "127.0.0.1"
Handler = Callable[[KeepsBooks, http.Scope, http.Receive, http.Send], Awaitable[None]]


class OpenVisit(Protocol):
    """A request that is watched (`middleware.WatchedRequest`), as far as the books show it."""

    start_ns: int
    answers: list[Answer]

    @property
    def endpoint(self) -> str: ...
    def close(self) -> None: ...


class AttachedBooks:
    """What the routes show: `server.books.KeepsBooks` for an engine of a vLLM server. state: of its application."""

    def __init__(self, joining: Joining, state: Any) -> None:
        self.joining, self._engine = joining, joining.engines[0]
        self.ledger = self._engine.ledger
        self.visits: set[OpenVisit] = set()
        self.pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="reading")
        self._process = Process(name="server", started_ns=process_start_ns(), ready_ns=time.monotonic_ns())
        config = state.engine_client.vllm_config.model_config
        served = config.served_model_name
        self.model_name = str((served[0] if isinstance(served, list) else served) or config.model)
        self.max_model_len: int = config.max_model_len
        args = getattr(state, "args", None)
        given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        self.keys = tuple(dict.fromkeys(key for key in given if key))
        self.host: str = getattr(args, "host", None) or "0.0.0.0"
        self.ledger.describe_by(self.facts)

    def facts(self) -> ServerFacts | None:
        told = self._engine.facts_and_gaps()
        if told is None:
            return None
        return msgspec.structs.replace(told, model=self.model_name, processes=(self._process, *told.processes))

    def of_engine(self, number: int) -> "AttachedBooks":
        """Returns the books of another engine of this server."""
        other = copy(self)
        other._engine = self.joining.engines[number]
        other.ledger = other._engine.ledger
        other.ledger.describe_by(other.facts)
        return other

    def is_open(self, request_id: str, tenant: Tenant) -> bool:
        return any(request_id in (a.request_id, a.group_id) for visit in self.visits for a in visit.answers)

    def stats(self) -> EngineStats:
        """As of the latest step."""
        step, engine = next(iter(self.ledger.steps(1)), None), self._engine
        settings = engine.facts.settings if engine.facts is not None else {}
        if step is None:
            return EngineStats(time.monotonic_ns())
        return EngineStats(
            step.end_ns,
            num_waiting=sum(engine.waiting_for.values()) if self.visits else 0,
            waiting_for=engine.waiting_for if self.visits else {},
            num_running=step.num_running if self.visits else 0,
            blocks_used=step.blocks_used,
            blocks_total=settings.get("num_blocks", 0),
            num_steps=step.step_id,
            prompt_tokens=engine.prompt_tokens,
            output_tokens=engine.output_tokens,
            knobs={name: settings[name] for name in SHOWN_KNOBS if name in settings},
        )

    def about(self) -> dict[str, Any]:
        told = self._engine.facts
        return {
            "version": f"{__version__}, attached to {told.engine if told is not None else 'vllm'}",
            "model": self.model_name,
            "plays": "chat",
            "max_model_len": self.max_model_len,
            "is_ready": True,
            "is_draining": False,
            "open_requests": len(self.visits),
            "predicted_wait_ms": None,
            "wait_estimate": None,
            "step_error_ratio": {},
            "refusals": {},
        }

    def open_books(self) -> Iterator[OpenBook]:
        for visit in list(self.visits):
            for answer in visit.answers:
                told = self.joining.engine_part(answer.request_id)
                marks: tuple[Mark, ...] = (*answer.marks, *(told.marks if told is not None else ()))
                yield OpenBook(
                    answer.request_id, answer.group_id, visit.endpoint, visit.start_ns, marks, 0, 0, answer.num_tokens
                )


class BookRoutes:
    """The paths that are answered here."""

    def __init__(self, books: AttachedBooks) -> None:
        self._books = {0: books}
        self._is_open_to_all = bool(books.keys)
        names = Names(books.host if books.keys else LOOPBACK)  # without a key, no name but this machine's own
        self._edge = Edge(self._answer, names, ApiKeys(books.keys), pages=dashboard.paths())
        self._exact: dict[str, Handler] = {
            "/": index,
            "/ledger/requests": routes_ledger.requests,
            "/ledger/steps": routes_ledger.steps,
            "/ledger/facts": routes_ledger.facts,
            "/ledger/trace.json": routes_ledger.trace_json,
            "/dashboard/data": routes_dashboard.data,
            "/dashboard/findings": routes_dashboard.findings,
        }
        self._folders: dict[str, Handler] = {
            "/ledger/requests/": by_name(routes_ledger.one_request),
            "/dashboard/requests/": by_name(routes_dashboard.one_request),
            "/dashboard/static/": static,
        }

    def answers(self, scope: http.Scope) -> bool:
        """Whether a request is for one of these paths."""
        path = scope["path"]
        return path == "/" or path.startswith(("/ledger/", "/dashboard/"))

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        await self._edge(scope, receive, send)

    async def _answer(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        path = scope["path"]
        try:
            self._check(scope)
            handler = self._exact.get(path)
            folder = next((each for each in self._folders if path.startswith(each)), None)
            if handler is None and folder is not None:
                handler, scope[http.PATH_REST] = self._folders[folder], path.removeprefix(folder)
            if handler is None:
                raise NotFound(f"no such path: {path}", hint="splittime's paths here: " + ", ".join(self._exact))
            await handler(self._books_of(scope), scope, receive, send)
        except SplittimeError as error:
            allowed = [(b"allow", b"GET, HEAD")] if error.info.status == 405 else []
            await http.respond_error(send, error, headers=allowed)
        except http.Disconnected:
            pass

    def _books_of(self, scope: http.Scope) -> AttachedBooks:
        """Returns those of the engine that is asked for, and takes the number out of the query."""
        asked = http.query(scope)
        number = asked.pop("engine", "0")
        scope["query_string"] = urlencode(asked).encode("latin-1")
        known = self._books[0].joining.engines
        engine = next((each for each in known if str(each) == number), None)
        if engine is None:
            raise RequestError("no such engine", param="engine", value=number[:64], limit=sorted(known))
        if engine not in self._books:
            self._books[engine] = self._books[0].of_engine(engine)
        return self._books[engine]

    def _check(self, scope: http.Scope) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            words = f"{scope['path']} is not for {scope['method']}"
            raise RequestError(words, code="method_not_allowed", status=405, value=scope["method"], hint="use GET")
        client = (scope.get("client") or ("127.0.0.1",))[0]
        if not self._is_open_to_all and not http.is_loopback(client):
            words = "without an --api-key of vLLM's, its books answer to this machine alone"
            raise RequestError(words, code="not_local", status=403, value=client, hint="start vLLM with --api-key KEY")


def by_name(handler: Handler) -> Handler:
    """Returns the handler for an id as the client gave it, however long: it is asked for the name in the books."""

    async def named(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        scope[http.PATH_REST] = name_of(scope[http.PATH_REST])
        await handler(books, scope, receive, send)

    return named


async def index(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The page for a browser, a few words in JSON for everybody else."""
    if http.wants_html(scope):
        await dashboard.send_file(scope, send, "index.html")
    else:
        await http.respond_json(send, {"name": "splittime", **books.about(), "ledger": "/ledger/requests"})


async def static(books: KeepsBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await dashboard.send_file(scope, send, scope[http.PATH_REST])
