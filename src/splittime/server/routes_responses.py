"""`/v1/responses`, OpenAI's Responses API: a chat's `Visit` between two translations (`api.responses`;
`api.response_answers`, `api.response_events`), and what is kept of responses (`response_store`). What the account says
of a chat, it says of a response."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from splittime.api import response_answers, response_events, responses
from splittime.api.decode import decode_body
from splittime.api.input_items import input_items
from splittime.api.response_items import Item, items_of, require_calls
from splittime.api.responses import ResponsesBody, functions_of
from splittime.core.errors import RequestError
from splittime.server.service import Service
from splittime.server.translation import TranslatedAnswer, TranslatedBody
from splittime.server.visit import Visit
from splittime.web import http
from splittime.web.tenants import tenant_of


async def create(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a response, whole or streamed."""
    exchange = ResponseExchange(service, scope, receive)
    answer = TranslatedAnswer(send, exchange.whole, exchange.stream)
    await Visit(service, "chat", scope, TranslatedBody(receive, exchange.read_chat), answer.send).serve()


async def retrieve(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with a stored response."""
    _refuse_query(scope)
    kept = service.responses.get(tenant_of(scope).name, scope[http.PATH_REST], "response_id")
    await http.respond(send, kept.body)


async def list_input(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with what a stored response had as input."""
    response_id = scope[http.PATH_REST]
    kept = service.responses.get(tenant_of(scope).name, response_id, "response_id")
    await http.respond_json(send, input_items(response_id, kept.turns[:-1], http.query(scope)))


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

    def __init__(self, service: Service, scope: http.Scope, receive: http.Receive) -> None:
        self._config, self._model, self._store = service.config, service.model, service.responses
        self._scope, self._receive = scope, receive
        self._tenant = tenant_of(scope).name
        self._asked: dict[str, Any] = {}
        self._turns: tuple[bytes, ...] = ()  # the conversation up to the answer

    async def read_chat(self) -> bytes:
        """Returns a chat's body that asks for this response. Raises what the client must be told."""
        is_strict = self._config.strict
        body = await http.read_body(self._scope, self._receive, self._config.max_body_bytes)
        given = decode_body(body, ResponsesBody, is_strict=is_strict)
        functions = functions_of(given, is_strict=is_strict)
        is_kept = self._is_kept(given)
        earlier, own = self._earlier(given), items_of(given.input, is_strict=is_strict)
        require_calls([*earlier, *own], len(earlier))
        self._turns = (*self._turns, msgspec.json.encode(own))
        defaults = {} if self._model is None else self._model.default_sampling
        self._asked = response_answers.asked_fields(given, functions, defaults, is_kept=is_kept)
        return msgspec.json.encode(given.to_chat([*earlier, *own], functions))

    def _is_kept(self, given: ResponsesBody) -> bool:
        if given.store and not self._store.is_on:
            message, hint = "store: this server keeps no responses", "leave it out; --max-stored-responses keeps some"
            raise RequestError(message, code="unsupported_field", param="store", value=True, hint=hint)
        return given.store is not False and self._store.is_on

    def _earlier(self, given: ResponsesBody) -> Sequence[Item]:
        """Returns the items of the conversation that is gone on from."""
        if given.previous_response_id is None:
            return ()
        kept = self._store.get(self._tenant, given.previous_response_id, "previous_response_id")
        self._turns = kept.turns
        return [item for turn in kept.turns for item in items_of(orjson.loads(turn))]

    # ---- out

    def whole(self, status: int, body: bytes) -> bytes:
        """Returns the response of a chat's answer, or its error in the names of this API."""
        if status != 200:
            return responses.error(body)
        response = response_answers.whole(self._asked, body)
        self._keep(response)
        return msgspec.json.encode(response)

    def stream(self) -> Callable[[bytes], bytes]:
        return response_events.ResponseEvents(self._asked, self._keep).feed

    def _keep(self, response: dict[str, Any]) -> None:
        """Stores a response that is to be kept. One for which there is no room says that it is not."""
        if response["store"]:
            turns, written = (*self._turns, msgspec.json.encode(response["output"])), msgspec.json.encode(response)
            response["store"] = self._store.put(self._tenant, response["id"], written, turns)
