"""The books on vLLM's own HTTP server: `vllm serve ... --middleware splittime.attach.middleware.WithBooks`.

An ASGI layer around vLLM's application. It answers `/`, `/ledger/...` and `/dashboard/...` itself (`routes`), watches
each request that may ask for tokens, and lets all else through untouched.

One HTTP request on vLLM's own server that may ask for tokens, as the API process sees it. It notes

    receive     until the body's last byte had been read
    tokenize    until vLLM asks its engine client to generate: parsing, the chat template, tokenising
    admit       until the request leaves for the engine's process (a later beam of a search: behind those before it)
    handoff     until that process has it; from there the engine's own book goes on

and on the way out when each token was written: when the next piece of body behind it was with the socket. The
response's id is made from the engine's.

What vLLM's engine client does for the requests of the API process.

Two methods are watched, on the instance: `generate`, for the tokens that each answer was given, and the core client's
`add_request_async`, which names the request as the engine will. Which HTTP request they are for is in a context
variable, not guessed from ids.
"""

import asyncio
import atexit
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import orjson

from splittime.attach import mail
from splittime.attach.joining import ApiBook, Joining, with_engine
from splittime.attach.request_book import Answer, EndedBook, name_of
from splittime.attach.routes import AttachedBooks, BookRoutes
from splittime.attach.versions import ledger_of
from splittime.core.errors import ErrorInfo
from splittime.ledger.account import REFUSED, Account, ClosedAccount, Mark
from splittime.ledger.account_json import stages_json
from splittime.ledger.derive import server_timing
from splittime.ledger.prompt_parts import salt_hash
from splittime.ledger.stages import Stage
from splittime.server.writers import start
from splittime.web import http

VISIT: "ContextVar[WatchedRequest | None]" = ContextVar("splittime_visit", default=None)
CALL: "ContextVar[Call | None]" = ContextVar("splittime_call", default=None)

now_ns = time.monotonic_ns


def watch(client: Any) -> None:
    """Have the visits know what vLLM's engine client does for them. client: an `AsyncLLM`."""
    generate, core = client.generate, client.engine_core
    add = core.add_request_async

    async def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        outputs, visit = generate(*args, **kwargs), VISIT.get()
        call = None if visit is None else Call(visit, now_ns())
        CALL.set(call)
        try:
            async for output in outputs:
                if call is not None:
                    call.take(output)
                yield output
        finally:
            await outputs.aclose()  # now: vLLM aborts what is left when its generator is closed

    async def add_request_async(request: Any) -> Any:
        visit = VISIT.get()
        if visit is not None:
            visit.hand_off(request, CALL.get())
        return await add(request)

    client.generate, core.add_request_async = watched, add_request_async


def harmless(work: Callable[..., Any]) -> Callable[..., Any]:
    """A fault of ours is logged, and costs the request its account, no more."""

    @wraps(work)
    def guarded(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception:
            log.exception("a request's account is not whole")
            return None

    return guarded


class Call:
    """One call of `generate`, which has `n` answers."""

    __slots__ = ("_visit", "answers", "asked_ns")

    def __init__(self, visit: "WatchedRequest", asked_ns: int) -> None:
        self._visit, self.asked_ns = visit, asked_ns
        self.answers: list[Answer] = []

    @harmless
    def take(self, output: Any) -> None:
        """Count what the caller is about to be given. output: vLLM's `RequestOutput`, of new tokens only."""
        for part in output.outputs:
            if part.index >= len(self.answers):
                continue
            answer = self.answers[part.index]
            count = len(part.token_ids)
            answer.num_tokens += count
            self._visit.unwritten.append((answer, count))
            if part.finish_reason is not None:
                answer.finish_reason, answer.done_ns = part.finish_reason, now_ns()


GENERATING = re.compile(
    r"(/[^/]+)*/(completions|responses|messages|generate|embeddings|pooling|classify|score|rerank|transcriptions)/?"
)
ENGINE_SAYS_S = 0.25  # for the engine's book to come, where an answer is to hold it
BEAM, PROMPT_NUMBER = re.compile(r"-[0-9a-f]{8,}-beam.*$|-beam.*$"), re.compile(r"-\d+$")
EVENTS = b"text/event-stream"
LAST_EVENT = re.compile(rb"(?:\A|\n\n)(data: \[DONE\]\s*)\Z")  # an answer's text may hold the same words


class WatchedRequest:
    """One HTTP request that asks for tokens."""

    def __init__(self, books: AttachedBooks, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        self._books, self._scope, self._receive, self._send = books, scope, receive, send
        self.start_ns = now_ns()
        self._started_at_unix_ns = time.time_ns()
        self._body_ns: int | None = None  # when the request's body had been read
        self._first_asked_ns: int | None = None
        self._cancelled_ns: int | None = None
        self._end_ns = self.start_ns
        self._waits_ns: list[tuple[int, int]] = []
        self._status = 0
        self._wants_timing = http.header(scope, b"x-include-timing") in ("1", "true")
        self._held: dict[str, Any] | None = None  # the begin of an answer that waits for its timing
        self._body = b""
        self.answers: list[Answer] = []
        self.unwritten: list[tuple[Answer, int]] = []

    async def serve(self, app: http.Application) -> None:
        token = VISIT.set(self)
        self._books.visits.add(self)
        try:
            await app(self._scope, self._watch_receive, self._watch_send)
        finally:
            VISIT.reset(token)
            self.close()

    # ---- on the way in

    async def _watch_receive(self) -> http.Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._cancelled_ns = self._cancelled_ns or now_ns()
        elif not message.get("more_body", False):
            self._body_ns = now_ns()
        return message

    @harmless
    def hand_off(self, request: Any, call: Call | None) -> None:
        """request: vLLM's `EngineCoreRequest`, on its way to the engine's process."""
        marks = self._marks(call.asked_ns if call is not None else None)
        marks.append(Mark(Stage.HANDOFF, None, now_ns()))
        names = name_of(request.request_id), name_of(self._group_of(request))
        answer = Answer(*names, tuple(marks), salt_hash(request.cache_salt or ""))
        answer.prompt_ids = request.prompt_token_ids or ()
        self.answers.append(answer)
        self._books.joining.expect(answer.request_id)
        if call is not None:
            call.answers.append(answer)

    def _marks(self, asked_ns: int | None = None) -> list[Mark]:
        marks = [Mark(Stage.RECEIVE, None, self.start_ns)]
        if self._body_ns is not None:
            marks.append(Mark(Stage.TOKENIZE, None, self._body_ns))
        if asked_ns is not None:
            self._first_asked_ns = self._first_asked_ns or asked_ns
            marks.append(Mark(Stage.ADMIT, None, self._first_asked_ns))
        return marks

    def _group_of(self, request: Any) -> str:
        """Returns the response's id: that of a completion's prompt without the prompt's number, that of a beam without
        the beam's own."""
        external = BEAM.sub("", str(getattr(request, "external_req_id", None) or request.request_id))
        return PROMPT_NUMBER.sub("", external) if external.startswith("cmpl-") else external

    # ---- on the way out

    async def _watch_send(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            timing = self._server_timing()
            headers = [*message.get("headers", ()), *([(b"server-timing", timing)] if timing else [])]
            message = {**message, "headers": headers}
            if self._wants_timing and not _is_stream(headers):
                self._held = message
                return
        elif self._held is not None:
            await self._send_held(message)
            return
        elif self._wants_timing and LAST_EVENT.search(message.get("body", b"")):
            message = {**message, "body": await self._with_timing_event(message["body"])}
        await self._pass_on(message)

    async def _pass_on(self, message: http.Message) -> None:
        begin_ns = now_ns()
        blocked = start(self._send(message), asyncio.get_running_loop())
        if blocked is not None:  # the socket is full: the client does not read
            await blocked
            self._waits_ns.append((begin_ns, now_ns()))
        self._end_ns = now_ns()
        if message["type"] == "http.response.body" and message.get("body"):
            self._note_written(self._end_ns)

    def _note_written(self, at_ns: int) -> None:
        unwritten, self.unwritten = self.unwritten, []
        for answer, count in unwritten:
            if not answer.written_ns:
                answer.first_chunk = count
            elif answer.written_ns[0] == at_ns:
                answer.first_chunk += count
            answer.written_ns += [at_ns] * count

    # ---- the account in the answer itself

    @harmless
    def _server_timing(self) -> bytes | None:
        """What is known by now; of the engine, what it has told."""
        account = self._account_so_far(self.answers[0]) if self.answers else with_engine(self._marks(), (), 0)
        return server_timing(account.intervals(now_ns()), self.start_ns).encode("latin-1")

    def _account_so_far(self, answer: Answer) -> Account:
        told, until_ns = self._books.joining.engine_part(answer.request_id), now_ns()
        account = with_engine(answer.marks, told.marks if told is not None else (), until_ns)
        if isinstance(told, EndedBook):
            account.enter(Stage.DELIVER, max(told.ended_ns, account.marks[-1].begin_ns))
        elif told is None:
            account.enter(Stage.UNATTRIBUTED, account.marks[-1].begin_ns)
        return account

    async def _with_timing_event(self, body: bytes) -> bytes:
        """An event with no choices before the end of a stream, as OpenAI's usage event is."""
        name = self.answers[0].group_id if self.answers else ""
        event: dict[str, Any] = {"id": name, "choices": [], "timing": await self._timing()}
        at = LAST_EVENT.search(body).start(1)  # type: ignore[union-attr]
        return body[:at] + b"data: " + orjson.dumps(event) + b"\n\n" + body[at:]

    async def _timing(self) -> dict[str, Any] | None:
        """As our own server's `timing`, of the answer that ended last."""
        if not self.answers:
            return None
        answer, sealed_ns = max(self.answers, key=lambda each: each.done_ns or 0), now_ns()
        await self._engine_said(answer.request_id)
        account = self._account_so_far(answer)
        first_ns = answer.written_ns[0] if answer.written_ns else sealed_ns if answer.num_tokens else None
        return {
            "start_ns": self.start_ns,
            "sealed_ns": sealed_ns,
            "ttft_ns": None if first_ns is None else first_ns - self.start_ns,
            "stages": stages_json(account.intervals(sealed_ns), self.start_ns),
        }

    async def _engine_said(self, request_id: str) -> None:
        """Wait a little for the engine's book."""
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        self._books.joining.call_when_ended(request_id, lambda: loop.call_soon_threadsafe(is_there.set))
        try:
            async with asyncio.timeout(ENGINE_SAYS_S):
                await is_there.wait()
        except TimeoutError:
            log.warning("the engine's book of %s did not come in time for its answer", request_id)
        finally:
            self._books.joining.call_no_more(request_id)

    async def _send_held(self, message: http.Message) -> None:
        """The answer that was held back is whole: put its timing in."""
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        begin, self._held = self._held, None
        assert begin is not None
        body = self._body
        try:
            body = orjson.dumps({**orjson.loads(body), "timing": await self._timing()})
        except (orjson.JSONDecodeError, TypeError):
            log.info("an answer that is no JSON object holds no timing")
        headers = [(name, value) for name, value in begin["headers"] if name.lower() != b"content-length"]
        await self._pass_on({**begin, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._pass_on({"type": "http.response.body", "body": body, "more_body": False})

    # ---- the end

    @harmless
    def close(self) -> None:
        """Give the account of each answer away, once."""
        if self not in self._books.visits:
            return
        self._books.visits.discard(self)
        was_left = self._cancelled_ns is not None and any(answer.done_ns is None for answer in self.answers)
        end_ns = now_ns() if was_left or not self._status else self._end_ns
        if not self.answers and not GENERATING.fullmatch(self._scope["path"]):
            return
        if not self.answers:  # refused, in a stream's first event too, or gone before the engine knew
            self._books.ledger.add_account(self._refused(max(end_ns, self.start_ns)))
            return
        error = self._error() if self._status >= 400 else None
        for answer in self.answers:
            self._books.joining.add(self._api_book(answer, end_ns, error))

    def _api_book(self, answer: Answer, end_ns: int, error: ErrorInfo | None) -> ApiBook:
        was_left = answer.done_ns is None and self._cancelled_ns is not None
        return ApiBook(
            answer.request_id,
            answer.group_id,
            self._books.model_name,
            self.endpoint,
            self._started_at_unix_ns,
            answer.marks,
            end_ns,
            answer.num_tokens,
            answer.done_ns,
            answer.finish_reason,
            tuple(answer.written_ns),
            answer.first_chunk,
            tuple(self._waits_ns),
            self._cancelled_ns if was_left else None,
            answer.cache_salt,
            error,
            answer.prompt_ids,
        )

    def _refused(self, end_ns: int) -> ClosedAccount:
        account = with_engine(self._marks(), (), 0)
        account.close(end_ns)
        return ClosedAccount(
            request_id=f"refused-{http.new_request_id()}",
            group_id=name_of(http.header(self._scope, b"x-request-id") or http.new_request_id()),
            model=self._books.model_name,
            endpoint=self.endpoint,
            started_at_unix_ns=self._started_at_unix_ns,
            start_ns=self.start_ns,
            end_ns=end_ns,
            intervals=tuple(account.intervals()),
            finish_reason=REFUSED if self._status and self._cancelled_ns is None else "abort",
            error=self._error() if self._status else None,
            cancelled_ns=self._cancelled_ns,
        )

    def _error(self) -> ErrorInfo:
        words = f"vLLM answered with {self._status}" + (
            "" if self._status >= 400 else ", and asked its engine for nothing"
        )
        return ErrorInfo("vllm_error", words, f"http_{self._status}", self._status)

    @property
    def endpoint(self) -> str:
        path = self._scope["path"].rstrip("/")
        return "chat" if path.endswith("/chat/completions") else path.rpartition("/")[2]


def _is_stream(headers: http.Headers) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(EVENTS) for name, value in headers)


log = logging.getLogger("splittime.attach")


class WithBooks:
    """The layer. vLLM makes one for each API process."""

    def __init__(self, app: http.Application) -> None:
        if mail.FOLDER not in os.environ:
            told = "the engine was started without %s: no account will be complete. Does VLLM_PLUGINS name splittime?"
            log.error(told, mail.FOLDER)
        mail.name_folder()
        self._app = app
        self._books: AttachedBooks | None = None
        self._routes: BookRoutes | None = None
        self._receiver: mail.Receiver | None = None
        self._has_tried = False

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if not self._has_tried and "app" in scope:
            self._begin(scope["app"].state)
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http" or self._routes is None or self._books is None:
            await self._app(scope, receive, send)
        elif self._routes.answers(scope):
            await self._routes(scope, receive, send)
        elif scope["method"] == "POST":
            await WatchedRequest(self._books, scope, receive, send).serve(self._app)
        else:
            await self._app(scope, receive, send)

    def _begin(self, state: Any) -> None:
        """The engine's client is there: from now on its calls are watched, and the engine's mail is read. A fault here
        leaves vLLM as it is without books."""
        client = getattr(state, "engine_client", None)
        if client is None:
            return
        self._has_tried = True
        try:
            index = getattr(client.engine_core, "client_index", 0)
            joining = Joining(lambda engine: ledger_of(index, engine))
            books = AttachedBooks(joining, state)
            self._receiver = mail.Receiver(index, joining.take, joining.join)
            routes = BookRoutes(books)
            atexit.register(self._end)
            watch(client)
        except Exception:
            log.exception("no books are kept of this server; it goes on without them")
            receiver, self._receiver = self._receiver, None
            if receiver is not None:
                receiver.close()
            return
        self._books, self._routes = books, routes

    async def _live(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Lets the application live, and ends the books with it."""
        try:
            await self._app(scope, receive, send)
        finally:
            self._end()

    def _end(self) -> None:
        """Close what is open, with all that is known by then. Called twice, it does nothing."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None and self._books is not None:
            for visit in list(self._books.visits):
                visit.close()
            receiver.close()
            self._books.joining.close()
