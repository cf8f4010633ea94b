"""Three more APIs, each a chat's `Visit` between two translations: of the body as it is read, and of the answer as it
is sent. What the account says of a chat, it says of their requests.

* `/v1/responses`, OpenAI's Responses API (`api.responses`, `api.response_answers`), and what is kept of responses.
* `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API (`api.messages`).
* `/api/chat`, `generate`, `embed` (and the older `embeddings`), Ollama's API (`api.ollama`), and what its clients ask
  of the models.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import orjson

from splittime.api import messages, ollama, response_answers, responses
from splittime.api.decode import convert_part, decode_body
from splittime.api.embeddings import EmbeddingBody
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.api.params import check_model, template_options
from splittime.api.response_items import Item, items_of
from splittime.api.responses import MOST_BODIES, Conversation, Functions, ResponsesBody, functions_of, input_items
from splittime.api.schema import ChatBody, CompletionBody, Strict
from splittime.api.tools import as_template_reads, can_be_bound, tool_use_of
from splittime.core.errors import RequestError
from splittime.server.counted import CountedText, refusals_counted
from splittime.server.service import Service
from splittime.server.visit import GivenBody, Visit
from splittime.server.writers import EVENTS
from splittime.text.answer_marks import AnswerMarks
from splittime.text.process import Render
from splittime.text.workers import FramedWork, framed
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import sharer_of, tenant_of

ErrorOf = Callable[[int, bytes], bytes]
Spelling = Callable[[http.Send], http.Send]
BodyOf = Callable[[BodySender, bytes], Awaitable[GivenBody]]


class TranslatedVisit(Visit):
    """body_of: makes a body of ours of this API's, which may be another endpoint's. Raises what the client must be
    told. whole: makes of our whole answer what is sent. of_visit: as `Visit` takes it."""

    def __init__(self, body_of: BodyOf, whole: Callable[[bytes], bytes], *of_visit: Any) -> None:
        super().__init__(*of_visit)
        self._body_of, self.translated = body_of, whole

    async def _given_by(self, sender: BodySender, body: bytes) -> GivenBody:
        given = await self._body_of(sender, body)
        self.endpoint = given.endpoint or self.endpoint
        return given


async def respond_count(
    service: Service, scope: http.Scope, receive: http.Receive, send: http.Send, body_of: BodyOf, **more: str
) -> None:
    """Answers with the tokens of the prompt of a chat's body, and with `more`. body_of: as `TranslatedVisit` has it."""
    model = service.require_model()
    with CountedText(service, scope, receive) as text:
        given = await body_of(text.sender, await service.read_body(scope, receive))
        done = await text.done(given.num_bytes, _counted_work, given.read, model, service.marks)
    headers = http.notice_headers(service.note_ignored(given.ignored))
    await http.respond_json(send, {**more, "input_tokens": done.whole_lens[0]}, headers)


def _counted_work(read: Callable[[], Any], model: ModelInfo, marks: AnswerMarks) -> FramedWork:
    chat = read()
    check_model(chat.model, model)
    tool_use = tool_use_of(chat, marks)
    options = template_options(chat) | ({} if tool_use is None else {"tools": tool_use.told})
    return framed(Render(as_template_reads(chat, marks), options, counts_only=True))


class TranslatedAnswer:
    """Sends a chat's answer as another API's. The head of an error waits for its body, whose length it says.

    error: makes of a status and an error's body what is sent. stream: makes what translates the bytes of a stream,
    which is sent as `content_type`. names: headers that are sent under another name too."""

    def __init__(
        self,
        send: http.Send,
        stream: Callable[[], Callable[[bytes], bytes]],
        error: ErrorOf = lambda _, body: body,
        names: dict[bytes, bytes] | None = None,
        content_type: bytes = EVENTS,
    ) -> None:
        self._send, self._stream, self._names = send, stream, names or {}
        self._error, self._content_type = error, content_type
        self._head: dict[str, Any] | None = None  # held back
        self._translate: Callable[[bytes], bytes] | None = None  # of a stream

    async def send(self, message: http.Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(dict(message))
        elif self._translate is not None:
            await self._send({**message, "body": self._translate(message.get("body", b""))})
        else:
            await self._send_whole(dict(message))

    async def _begin(self, head: dict[str, Any]) -> None:
        own = [(self._names[name], value) for name, value in head["headers"] if name in self._names]
        head["headers"] = [*head["headers"], *own]
        if (b"content-type", b"application/json") in head["headers"]:
            self._head = head
            return
        head["headers"] = [(name, self._content_type if said == EVENTS else said) for name, said in head["headers"]]
        self._translate = self._stream()
        await self._send(head)

    async def _send_whole(self, message: dict[str, Any]) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            if head["status"] != 200:
                message["body"] = self._error(head["status"], message["body"])
            length = (b"content-length", b"%d" % len(message["body"]))
            head["headers"] = [*(each for each in head["headers"] if each[0] != b"content-length"), length]
            await self._send(head)
        await self._send(message)


def spelling(error: ErrorOf, names: dict[bytes, bytes] | None = None) -> Spelling:
    """Returns what makes a `send` write errors in another API's form, whoever makes them, and all else as it is."""
    return lambda send: TranslatedAnswer(send, lambda: bytes, error, names).send


def spelled_at_once(answer: http.AtOnce, error: ErrorOf, names: dict[bytes, bytes]) -> http.AtOnce:
    """Returns an error that is answered at once in another API's form."""
    body = error(answer.status, answer.body)
    headers = [(name, b"%d" % len(body) if name == b"content-length" else told) for name, told in answer.headers]
    headers += [(names[name], told) for name, told in headers if name in names]
    return answer._replace(body=body, headers=headers)


Spelled = tuple[ErrorOf, dict[bytes, bytes]]
OF_MESSAGES: Spelled = (messages.error, {b"x-request-id": b"request-id"})
OF_OLLAMA: Spelled = (lambda _, body: orjson.dumps(ollama.error_of(orjson.loads(body))), {})
KINDS: dict[str, tuple[str, type[ollama.OllamaChatBody | ollama.OllamaGenerateBody | ollama.OllamaEmbedBody]]] = {
    "/api/chat": ("chat", ollama.OllamaChatBody),
    "/api/generate": ("chat", ollama.OllamaGenerateBody),
    "/api/embed": ("embeddings", ollama.OllamaEmbedBody),
    "/api/embeddings": ("embeddings", ollama.OllamaEmbedBody),
}
BODIES: dict[str, type[Strict]] = {"chat": ChatBody, "completions": CompletionBody, "embeddings": EmbeddingBody}
NEVER = "9999-12-31T23:59:59Z"


async def create_message(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a message, whole or streamed."""
    exchange = MessageExchange(service, scope, messages.MessagesBody)
    answer = TranslatedAnswer(send, lambda: messages.MessageEvents().feed)
    whole = messages.message
    await TranslatedVisit(exchange.chat_of, whole, service, "chat", scope, receive, answer.send).serve()


async def count_message_tokens(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with the tokens of the prompt that `create_message` would make of this body."""
    exchange = MessageExchange(service, scope, messages.CountTokensBody)
    await respond_count(service, scope, receive, send, exchange.chat_of)


class MessageExchange:
    """One message, from its body to its answer."""

    def __init__(self, service: Service, scope: http.Scope, kind: type[messages.CountTokensBody]) -> None:
        self._config, self._scope, self._marks, self._kind = service.config, scope, service.marks, kind

    async def chat_of(self, sender: BodySender, body: bytes) -> GivenBody:
        """Returns what reads a chat's body that asks for this message. Raises what the client must be told."""
        given = http.header(self._scope, b"anthropic-version")
        if given is not None and given not in messages.VERSIONS:  # who sends none is taken to mean it
            hint = f"send anthropic-version: {' or '.join(messages.VERSIONS)}"
            raise RequestError(
                f"anthropic-version {given[:64]} is not served", param="anthropic-version", value=given[:64], hint=hint
            )
        ignored = self._config.new_ignored()
        return GivenBody(len(body), partial(self._chat_of, body, ignored), ignored)

    def _chat_of(self, body: bytes, ignored: Ignored | None) -> ChatBody:
        given = decode_body(body, self._kind, ignored)
        messages.note_tools(given, ignored)
        if given.thinking is not None and not can_be_bound(self._marks, has_tools=bool(given.tools)):
            given.thinking.budget_tokens = None  # it says what to aim at, and here nothing can hold to it
        return decode_body(messages.chat_body(given), ChatBody, ignored)


async def answer_ollama(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers one of `KINDS`, whole or line by line."""
    scope["headers"] = [(b"x-include-timing", b"1"), *(e for e in scope["headers"] if e[0] != b"x-include-timing")]
    exchange = OllamaExchange(service, scope["path"])
    answer = TranslatedAnswer(send, lambda: exchange.answer.feed, content_type=b"application/x-ndjson")
    of_visit = service, exchange.endpoint, scope, receive, answer.send
    await TranslatedVisit(exchange.body_of, exchange.whole, *of_visit).serve()


class OllamaExchange:
    """One request, from its body to its answer."""

    def __init__(self, service: Service, path: str) -> None:
        self._service, self._path = service, path
        self.endpoint, self._kind = KINDS[path]

    async def body_of(self, sender: BodySender, body: bytes) -> GivenBody:
        """Returns what reads a body of ours that asks for this. Raises what the client must be told."""
        ignored, size = self._service.config.new_ignored(), len(body)
        asked = await read_beside(sender, size, self._asked, body, self._service.require_model(), ignored)
        endpoint = "completions" if "prompt" in asked else self.endpoint
        is_loading = asked.get("messages") == []
        if is_loading:  # only asks for the model to be there, which it is
            asked |= {"messages": [{"role": "user", "content": " "}], "max_tokens": 1}
        self.answer = ollama.OllamaAnswer(is_chat=self._path == "/api/chat", is_loading=is_loading)
        return GivenBody(size, partial(convert_part, asked, BODIES[endpoint], "", ignored), ignored, endpoint)

    def _asked(self, body: bytes, model: ModelInfo, ignored: Ignored | None) -> dict[str, Any]:
        given = decode_body(body, self._kind, ignored)
        asked = given.to_body() | {"model": _served(given.model, model)}
        return {name: value for name, value in asked.items() if value is not None}

    def whole(self, body: bytes) -> bytes:
        if self.endpoint == "embeddings":
            return ollama.embedded(body, is_older=self._path == "/api/embeddings")
        return self.answer.whole(body)


def _served(name: str | None, model: ModelInfo) -> str | None:
    """Returns the name without Ollama's tag of one that has none, where only that is served."""
    return name if name is None or name in model.served_names else name.removesuffix(":latest")


def _entry(name: str, model: ModelInfo) -> dict[str, Any]:
    about = {"parent_model": "", "format": "safetensors", "family": "splittime", "families": ["splittime"]}
    return {
        "name": name,
        "model": name,
        "modified_at": ollama.written_at(model.created_unix_s),
        "size": 0,
        "digest": sha256(name.encode()).hexdigest(),
        "details": {**about, "parameter_size": "", "quantization_level": ""},
    }


async def tags(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The models served, which are all that run (`/api/ps`)."""
    model = service.require_model()
    running = {"expires_at": NEVER, "size_vram": 0, "context_length": model.max_model_len}
    found = [_entry(name, model) | (running if scope["path"] == "/api/ps" else {}) for name in model.served_names]
    await http.respond_json(send, {"models": found})


async def show(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Tell what a model is, and what it can."""
    model, marks = service.require_model(), service.marks
    ignored = service.config.new_ignored()
    given = decode_body(await service.read_body(scope, receive, 64 * 1024), ollama.OllamaBody, ignored)
    name = _served(given.model, model) or model.name
    check_model(name, model)
    can = {"completion": True, "tools": marks.tells_tools, "thinking": marks.reasoning is not None}
    can = {"embedding": True} if model.pooling.is_all else can
    answer = {
        **_entry(name, model),
        **dict.fromkeys(("license", "modelfile", "parameters"), ""),
        "template": service.tokenizer.chat_templates.get("default", ""),
        "model_info": {"general.architecture": "splittime", "splittime.context_length": model.max_model_len},
        "capabilities": [name for name, is_there in can.items() if is_there],
    }
    await http.respond_json(send, answer, http.notice_headers(service.note_ignored(ignored)))


async def version(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await http.respond_json(send, {"version": ollama.LEVEL})


async def create_response(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a response, whole or streamed."""
    exchange = ResponseExchange(service, scope)
    answer = TranslatedAnswer(send, exchange.stream, lambda _, body: responses.error(body))
    await TranslatedVisit(exchange.chat_of, exchange.whole, service, "chat", scope, receive, answer.send).serve()


async def count_tokens(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with the tokens of the prompt that `create_response` would make of this body."""
    exchange = ResponseExchange(service, scope)
    await respond_count(service, scope, receive, send, exchange.chat_of, object="response.input_tokens")


async def cancel(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Refuses, as a response is kept when it is complete, and none is made in the background."""
    service.responses.get(tenant_of(scope).name, scope[http.PATH_REST], "response_id")
    said, hint = "only a response of the background can be cancelled", "close the connection of its request"
    raise RequestError(said, param="response_id", value=scope[http.PATH_REST], hint=hint)


async def retrieve(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a stored response."""
    _refuse_query(scope)
    kept = service.responses.get(tenant_of(scope).name, scope[http.PATH_REST], "response_id")
    await http.respond(send, kept.body)


async def list_input(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with what a stored response had as input."""
    response_id = scope[http.PATH_REST]
    tenant = tenant_of(scope)
    kept = service.responses.get(tenant.name, response_id, "response_id")
    items, sender = kept.conversation.items[: kept.num_input], BodySender(sharer_of(scope, tenant), receive)
    with refusals_counted(service):
        page = await read_beside(sender, kept.size, input_items, response_id, items, http.query(scope))
    await http.respond(send, page)


async def delete(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Forgets a stored response."""
    _refuse_query(scope)
    service.responses.delete(tenant_of(scope).name, scope[http.PATH_REST])
    await http.respond_json(send, {"id": scope[http.PATH_REST], "object": "response", "deleted": True})


def _refuse_query(scope: http.Scope) -> None:
    for name, value in http.query(scope).items():
        raise RequestError(
            f"{name[:64]}: a stored response is given whole, as it was answered",
            code="unsupported_field",
            param=name[:64],
            value=value[:64],
            hint="ask without a query; a response is streamed while it is made",
        )


class ResponseExchange:
    """One response, from its body to what is kept of it."""

    def __init__(self, service: Service, scope: http.Scope) -> None:
        self._config, self._model, self._store = service.config, service.model, service.responses
        self._tenant = tenant_of(scope).name
        self._asked: dict[str, Any] = {}
        self._functions: Functions = {}
        self._ignored = service.config.new_ignored()
        self._conversation = Conversation()  # up to the answer

    async def chat_of(self, sender: BodySender, body: bytes) -> GivenBody:
        """Returns what reads a chat's body that asks for this response. Raises what the client must be told."""
        given, own = await read_beside(sender, len(body), self._given_in, body)
        is_kept, earlier = self._is_kept(given), self._earlier(given)
        return GivenBody(len(body) + earlier.size, partial(self._chat, given, own, earlier, is_kept), self._ignored)

    def _given_in(self, body: bytes) -> tuple[ResponsesBody, list[Item]]:
        given = decode_body(body, ResponsesBody, self._ignored)
        return given, items_of(given.input, self._ignored)

    def _chat(self, given: ResponsesBody, own: list[Item], earlier: Conversation, is_kept: bool) -> ChatBody:
        functions = self._functions = functions_of(given, self._ignored)
        conversation = self._conversation = earlier.gone_on(own)
        if earlier.items:
            conversation.require_at_most(MOST_BODIES * self._config.max_body_bytes)
        defaults = {} if self._model is None else self._model.default_sampling
        self._asked = response_answers.asked_fields(given, functions, defaults, is_kept=is_kept)
        return convert_part(given.to_chat(conversation.messages, functions), ChatBody, "", self._ignored)

    def _is_kept(self, given: ResponsesBody) -> bool:
        if given.store and not self._store.is_on:
            message, hint = "store: this server keeps no responses", "leave it out; --max-stored-responses keeps some"
            raise RequestError(message, code="unsupported_field", param="store", value=True, hint=hint)
        return given.store is not False and self._store.is_on

    def _earlier(self, given: ResponsesBody) -> Conversation:
        """Returns the conversation that is gone on from."""
        if given.previous_response_id is None:
            return Conversation()
        return self._store.get(self._tenant, given.previous_response_id, "previous_response_id").conversation

    # ---- out

    def whole(self, body: bytes) -> bytes:
        """Returns the response of a chat's answer."""
        response = response_answers.whole(self._asked, self._functions, body)
        self._keep(response)
        return msgspec.json.encode(response)

    def stream(self) -> Callable[[bytes], bytes]:
        return response_answers.ResponseEvents(self._asked, self._functions, self._keep).feed

    def _keep(self, response: dict[str, Any]) -> None:
        """Stores a response that is to be kept. One for which there is no room says that it is not."""
        if response["store"]:
            written, asked = msgspec.json.encode(response), self._conversation
            try:
                whole = asked.gone_on(items_of(response["output"], Ignored()))
            except RequestError:  # it has as many items as there may be
                response["store"] = False
            else:
                response["store"] = self._store.put(self._tenant, response["id"], written, whole, len(asked.items))
