"""`/v1/responses`, OpenAI's Responses API: a chat's `Visit` between two translations (`api.responses`;
`api.response_answers`, `api.response_events`), and what is kept of responses (`response_store`). What the account says
of a chat, it says of a response."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from splittime.api import response_answers, response_events, responses
from splittime.api.conversation import MOST_BODIES, Conversation, input_items
from splittime.api.decode import convert_part, decode_body
from splittime.api.lenient import Ignored
from splittime.api.response_items import Item, items_of
from splittime.api.responses import Functions, ResponsesBody, functions_of
from splittime.api.schema import ChatBody
from splittime.core.errors import RequestError
from splittime.server.counted import refusals_counted
from splittime.server.service import Service
from splittime.server.translation import TranslatedAnswer, TranslatedVisit
from splittime.server.visit import GivenBody
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import sharer_of, tenant_of


async def create(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a response, whole or streamed."""
    exchange = ResponseExchange(service, scope)
    answer = TranslatedAnswer(send, exchange.whole, exchange.stream)
    await TranslatedVisit(service, scope, receive, answer.send, exchange.chat_of).serve()


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

    def whole(self, status: int, body: bytes) -> bytes:
        """Returns the response of a chat's answer, or its error in the names of this API."""
        if status != 200:
            return responses.error(body)
        response = response_answers.whole(self._asked, self._functions, body)
        self._keep(response)
        return msgspec.json.encode(response)

    def stream(self) -> Callable[[bytes], bytes]:
        return response_events.ResponseEvents(self._asked, self._functions, self._keep).feed

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
