"""`/openapi.json`: the paths, with what may be sent (`openapi_bodies`) and what comes back (`answer_structs`). An
answer may carry more fields than are listed. A test checks all of it against real answers."""

from collections.abc import Iterable
from typing import Any

import msgspec

from splittime import __version__
from splittime.api.answer_structs import ChatCompletion, Completion, Models, Text
from splittime.api.conversation import QUERY
from splittime.api.embeddings import Embeddings
from splittime.api.hop_answers import HopsBody
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.openapi_bodies import KV_ASK, MSGPACK, Schema, body_schemas
from splittime.api.prefill import PrefillAnswer
from splittime.api.ranking import Ranking, ScoreList
from splittime.api.schema import LoadAdapterBody, UnloadAdapterBody
from splittime.core.sleep import LEVELS, MAX_TIMEOUT_S, MODES
from splittime.text.process import Tokens

TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
_ERRORS = {
    400: "Something in the request is not valid or not supported; the error names it.",
    401: "No API key, or a wrong one.",
    403: "The key may not, or a page of another site or under another name asks.",
    404: "No such model, request or page.",
    408: "The body took too long to arrive.",
    409: "The X-Request-Id is in flight, or the server is not in a state for that.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full, the deadline cannot be met, or a simulation runs. Retry-After says when to come back.",
    500: "The engine failed.",
    503: "Not ready, or shutting down. Retry-After says when to come back.",
    504: "The request's own deadline passed.",
}
_GENERATION_ERRORS = (400, 404, 408, 409, 413, 415, 429, 500, 503, 504)
_HOPS = (400, 408, 409, 413, 415)

# In words only: a tool that draws requests would draw deadlines too, and a deadline that passes is a 504 by right.
_DEADLINE = (
    "The header X-Request-Deadline-Ms (1 to 10^10, counted from arrival) ends the request when it passes; "
    "x-llm-d-slo-ttft-ms (the same) refuses it with 429 if its first token is predicted to come later."
)

_PROMPT, _HELLO = "def read_json(path):", [{"role": "user", "content": "Hello"}]
_HOP = {"span_id": "00f067aa0ba902b7", "name": "search", "kind": "retrieval", "begin_ns": 0, "duration_ns": 12_000_000}
EXAMPLES: dict[str, Any] = {
    "CompletionBody": {"prompt": _PROMPT, "max_tokens": 40, "temperature": 0},
    **{name: {"messages": _HELLO, "max_tokens": 40} for name in ("ChatBody", "MessagesBody")},
    "EmbeddingBody": {"input": "Hello"},
    "PrefillBody": {"prompt": _PROMPT},
    "RerankBody": {"query": "a colour", "documents": ["red", "seven"]},
    "ScoreBody": {"text_1": "a colour", "text_2": ["red", "seven"]},
    "CountTokensBody": {"messages": _HELLO},
    "ResponsesBody": {"input": "Hello", "max_output_tokens": 40},
    "LoadAdapterBody": {"lora_name": "sql", "lora_path": "sql"},
    "UnloadAdapterBody": {"lora_name": "sql"},
    "TokenizeBody": {"prompt": "Hello"},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
    "HopsBody": {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "clock": "laptop-1", "hops": [_HOP]},
}


def document(
    limits: BodyLimits,
    model: ModelInfo | None = None,
    *,
    needs_text: bool = True,
    knobs: Schema | None = None,
    root_path: str = "",
    asks_for_key: bool = False,
) -> Schema:
    """Returns the whole description, OpenAPI 3.1. knobs: the schema of each that can be changed. needs_text: the model
    refuses an empty prompt."""
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "splittime", "version": __version__, "description": "An OpenAI-compatible server."},
        "paths": _paths(knobs or {}),
        "components": {"schemas": {**body_schemas(limits, model, needs_text), **_answer_schemas()}},
    }
    if root_path:
        described["servers"] = [{"url": root_path}]
    if asks_for_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _answer_schemas() -> Schema:
    answers = (Completion, ChatCompletion, PrefillAnswer, Embeddings, Ranking, ScoreList, Models, Tokens, Text)
    kinds = (*answers, HopsBody, LoadAdapterBody, UnloadAdapterBody)
    _, made = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return {**made, "ServerSentEvent": _EVENT, "Error": _ERROR}


def _paths(knobs: Schema) -> Schema:
    limit = _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "Most entries; default 100.")
    slower = _query("slower_than_ms", {"type": "number", "minimum": 0}, "Only requests that took longer.")
    name, request_id, response_id = map(_in_path, ("name", "request_id", "response_id"))
    models = _get("The models served", answer="Models", errors=(503,))
    html = {"text/html": {"schema": TEXT}}
    return {
        "/v1/completions": {"post": _generation("CompletionBody", "Complete prompts", "Completion")},
        "/v1/chat/completions": {"post": _generation("ChatBody", "Answer a conversation", "ChatCompletion")},
        "/v1/embeddings": {"post": _prefill("EmbeddingBody", "Embed texts", "Embeddings")},
        "/v1/rerank": {"post": _prefill("RerankBody", "Sort texts by how well they answer a query", "Ranking")},
        "/v1/score": {"post": _prefill("ScoreBody", "Score pairs of texts", "ScoreList")},
        "/v1/prefill": {"post": _prefill("PrefillBody", "Compute a prompt that will come", "PrefillAnswer")},
        "/v1/messages": {"post": _in_words("Anthropic's Messages API, for texts", "MessagesBody")},
        "/v1/messages/count_tokens": {"post": _in_words("The tokens of such a prompt", "CountTokensBody")},
        "/v1/responses": {"post": _in_words("OpenAI's Responses API, for texts and functions", "ResponsesBody")},
        "/v1/responses/{response_id}": {
            "get": _get("A stored response", [response_id], errors=(400, 404)),
            "delete": _get("Forget it", [response_id], errors=(400, 404)),
        },
        "/v1/responses/{response_id}/input_items": {"get": _get("Its input", [response_id, *QUERY], errors=(400, 404))},
        "/v1/models": {"get": models},
        "/v1/models/{name}": {"get": _get("One of them", [name], answer="ModelCard", errors=(404, 503))},
        "/v1/load_lora_adapter": {"post": _in_words("Serve an adapter, for an operator", "LoadAdapterBody")},
        "/v1/unload_lora_adapter": {"post": _in_words("Serve it no longer", "UnloadAdapterBody")},
        "/tokenize": {"post": _post("TokenizeBody", "Text to token ids", "Tokens", (400, 404, 413, 503))},
        "/detokenize": {"post": _post("DetokenizeBody", "Token ids to text", "Text", (400, 404, 413, 503))},
        "/tokenizer_info": {"get": _get("Special tokens, chat templates and sizes of the vocabulary", errors=(503,))},
        "/health": {"get": _get("Alive")},
        "/ping": {"get": _get("Alive, as SageMaker asks"), "post": _get("The same", [], errors=(400,))},
        "/ready": {"get": _get("Would a request be served now", errors=(503,))},
        "/version": {"get": _get("This program's version")},
        "/metrics": {"get": _get("Prometheus metrics", content={"text/plain": {"schema": TEXT}})},
        "/stats": {"get": _get("Gauges and counters")},
        "/knobs": {"get": _get("What can be changed while serving"), "patch": _change_knobs(knobs)},
        "/reset_prefix_cache": {"post": _get("Forget the prefixes that no request uses", [], errors=(400, 413, 503))},
        "/sleep": {"post": _get("Give the memory back", _SLEEP_QUERY, errors=(400, 409, 500, 503))},
        "/wake": {"post": _get("Take it again, and serve", [], errors=(400, 500, 503))},
        "/wake_up": {"post": _get("The same", [], errors=(400, 500, 503))},
        "/is_sleeping": {"get": _get("Whether it sleeps")},
        "/kv/blocks": {"post": _get("Blocks of KV cache", errors=(400, 404, 408, 413, 503), content=MSGPACK) | KV_ASK},
        "/ledger/requests": {"get": _get("The latest accounts", [slower, limit], errors=(400,))},
        "/ledger/requests/{request_id}": {"get": _get("A request's account", [request_id], errors=(404,))},
        "/ledger/steps": {"get": _get("The latest steps", [limit], errors=(400,))},
        "/ledger/facts": {"get": _get("What the server knows of itself: settings, costs, ceilings", errors=(503,))},
        "/ledger/trace.json": {"get": _get("A trace for Perfetto", [limit], errors=(400,))},
        "/ledger/hops": {"post": _post("HopsBody", "Keep what a client did beside its requests", None, _HOPS)},
        "/ledger/hops/{trace_id}": {"get": _get("The hops of a trace", [_in_path("trace_id")], errors=(404,))},
        "/ledger/what-if": {"post": _what_if(knobs)},
        "/openapi.json": {"get": _get("This description")},
        "/docs": {"get": _get("A page that shows it", content=html)},
        "/": {"get": _get("What this is; the page, for a browser")},
    }


# ---- operations


def _generation(body: str, summary: str, answer: str) -> Schema:
    described = _prefill(body, summary, answer)
    described["responses"]["200"]["content"]["text/event-stream"] = {"schema": _ref("ServerSentEvent")}
    return described


def _prefill(body: str, summary: str, answer: str) -> Schema:
    """Returns an operation whose prompts are computed, and that generates nothing."""
    described = _post(body, summary, answer, _GENERATION_ERRORS)
    return described | {"parameters": _GENERATION_HEADERS, "description": _DEADLINE}


def _post(body: str | Schema, summary: str, answer: str | None, errors: Iterable[int], example: Any = None) -> Schema:
    """body: the name of one of ours, or a schema, which has this example."""
    given = {"schema": _ref(body), "example": EXAMPLES[body]} if isinstance(body, str) else {"schema": body}
    content = {"application/json": given if example is None else given | {"example": example}}
    described = _get(summary, answer=answer, errors=errors)
    return described | {"requestBody": {"required": True, "content": content}}


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _in_words(summary: str, body: str) -> Schema:
    """Returns an operation of another API, whose answers its own documentation describes."""
    return _post(body, summary, None, _GENERATION_ERRORS)


def _change_knobs(knobs: Schema) -> Schema:
    """Some bounds depend on the other knobs, which the error then says."""
    return _post(_closed(knobs), "Change some of them", None, (400, 413, 503), {})


def _what_if(knobs: Schema) -> Schema:
    blocks = {"num_blocks": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}}
    settings = {name: schema for name, schema in (knobs | blocks).items() if name != "paused"}
    speed: Schema = {"type": "number", "minimum": 0.01, "maximum": 100}
    speed["description"] = "Requests come so many times as fast."
    body, summary = (
        _closed({"settings": _closed(settings), "speed": speed}),
        "What a change would have made of the latest",
    )
    return _post(body, f"{summary} requests", None, (400, 408, 409, 413, 415, 429, 500, 503), {"speed": 1.5})


def _get(
    summary: str,
    parameters: list[Schema] | None = None,
    *,
    answer: str | None = None,
    errors: Iterable[int] = (),
    content: Schema | None = None,
) -> Schema:
    found = content or _json(_ref(answer) if answer else OBJECT)
    described: Schema = {"summary": summary, "responses": _responses(errors, found)}
    if parameters:
        described["parameters"] = parameters
    return described


def _responses(errors: Iterable[int], content: Schema) -> Schema:
    refused = {
        str(status): {"description": _ERRORS[status], "content": _json(_ref("Error"))} for status in (*errors, 401, 403)
    }
    return {"200": {"description": "OK", "content": content}, **refused}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# ---- parameters


def _parameter(name: str, place: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": place, "schema": schema, "description": description}


def _query(name: str, schema: Schema, description: str) -> Schema:
    return _parameter(name, "query", schema, description)


def _in_path(name: str) -> Schema:
    return {**_parameter(name, "path", {"type": "string", "minLength": 1}, ""), "required": True}


_GENERATION_HEADERS = [
    _parameter(
        "X-Request-Id", "header", {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}, "Becomes part of the id."
    ),
    _parameter("X-Include-Timing", "header", {"enum": ["1", "true", "0", "false"]}, "The answer carries its account."),
]
_SLEEP_QUERY = [
    _query("level", {"type": "integer", "enum": list(LEVELS)}, "1: weights are kept in host memory; 2: dropped."),
    _query("mode", {"type": "string", "enum": list(MODES)}, "What becomes of running requests; default wait."),
    _query(
        "timeout_s", {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S}, "How long to wait; default: no end."
    ),
]


# ---- what no struct says

_EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": TEXT},
    "description": "`data` is a chunk in OpenAI's form, an error, or [DONE] at the end.",
}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_ERROR_FIELDS: Schema = {
    "message": TEXT,
    "type": TEXT,
    "code": _TEXT_OR_NULL,
    "param": _TEXT_OR_NULL,
    "value": {},
    "limit": {},
    "hint": TEXT,
    "retry_after_s": {"type": "number"},
    "reason": TEXT,
    "queued": {"type": "integer"},
    "predicted_wait_ms": {"type": ["number", "null"]},
    "predicted_ttft_ms": {"type": "number"},
    "wait_estimate": {"enum": ["model", "departures", None]},
}
_ERROR: Schema = {  # `core.errors.error_body` makes it
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "code"], "properties": _ERROR_FIELDS}},
}
