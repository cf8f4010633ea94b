"""`/openapi.json`, put together from the classes that check the bodies, so that the two cannot disagree.

Only answers are described by hand, and loosely: clients have OpenAI's own description of those.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from splittime import __version__
from splittime.core.sleep import LEVELS, MAX_TIMEOUT_S, MODES
from splittime.server.config import ServerConfig
from splittime.server.schema import PROMPT_FORMS, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

_ERRORS = {
    400: "Something in the request is not valid or not supported; the error names it.",
    401: "No API key, or a wrong one.",
    404: "No such model, request or page.",
    408: "The body took too long to arrive.",
    409: "The X-Request-Id is in flight, or the server is not in a state for that.",
    413: "The body is too large.",
    429: "The queue is full, or the deadline cannot be met. Retry-After says when to come back.",
    500: "The engine failed.",
    503: "Not ready, or shutting down. Retry-After says when to come back.",
    504: "The request's own deadline passed.",
}
_ERROR_BODY: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "value": {},
                "limit": {},
                "hint": {"type": "string"},
                "retry_after_s": {"type": "number"},
                "reason": {"type": "string"},
                "queued": {"type": "integer"},
                "predicted_wait_ms": {"type": ["number", "null"]},
            },
        }
    },
}
_OBJECT: Schema = {"type": "object"}


def document(config: ServerConfig) -> Schema:
    """The whole description, OpenAPI 3.1."""
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "splittime", "version": __version__, "description": "An OpenAI-compatible server."},
        "paths": _paths(),
        "components": {"schemas": {**_body_schemas(), "Error": _ERROR_BODY}},
    }
    if config.api_key is not None:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _body_schemas() -> Schema:
    kinds = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    components["CompletionBody"]["properties"]["prompt"] = PROMPT_FORMS  # its type in Python cannot say as much
    return components


def _paths() -> Schema:
    generation_headers = [
        _header("X-Request-Id", {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}, "Becomes part of the id."),
        _header("X-Include-Timing", {"type": "string", "enum": ["1"]}, "The answer carries its account."),
    ]
    limit = _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "Most entries; default 100.")
    slower = _query("slower_than_ms", {"type": "number", "minimum": 0}, "Only requests that took longer.")
    name, request_id = _in_path("name"), _in_path("request_id")
    return {
        "/v1/completions": {"post": _generation("CompletionBody", "Complete prompts", generation_headers)},
        "/v1/chat/completions": {"post": _generation("ChatBody", "Answer a conversation", generation_headers)},
        "/v1/models": {"get": _get("The models served", errors=(503,))},
        "/v1/models/{name}": {"get": _get("One of them", [name], errors=(404, 503))},
        "/tokenize": {"post": _post("TokenizeBody", "Text to token ids", (400, 404, 413, 503))},
        "/detokenize": {"post": _post("DetokenizeBody", "Token ids to text", (400, 404, 413, 503))},
        "/health": {"get": _get("Alive")},
        "/ready": {"get": _get("Would a request be served now", errors=(503,))},
        "/metrics": {"get": _get("Prometheus metrics", content={"text/plain": {"schema": {"type": "string"}}})},
        "/stats": {"get": _get("Gauges and counters")},
        "/knobs": {"get": _get("What can be changed while serving"), "patch": _change_knobs()},
        "/sleep": {"post": _bodyless("Give the memory back", _SLEEP_QUERY, (400, 409, 500, 503))},
        "/wake": {"post": _bodyless("Take it again, and serve", [], (400, 500, 503))},
        "/wake_up": {"post": _bodyless("The same", [], (400, 500, 503))},
        "/is_sleeping": {"get": _get("Whether it sleeps")},
        "/ledger/requests": {"get": _get("The latest accounts", [slower, limit], errors=(400,))},
        "/ledger/requests/{request_id}": {"get": _get("A request's account", [request_id], errors=(404,))},
        "/ledger/steps": {"get": _get("The latest steps", [limit], errors=(400,))},
        "/ledger/facts": {"get": _get("What the server knows of itself: settings, costs, ceilings", errors=(503,))},
        "/ledger/trace.json": {"get": _get("A trace for Perfetto", [limit], errors=(400,))},
        "/openapi.json": {"get": _get("This description")},
        "/docs": {"get": _get("A page that shows it", content={"text/html": {"schema": {"type": "string"}}})},
        "/": {"get": _get("What this is")},
    }


_GENERATION_ERRORS = (400, 404, 408, 409, 413, 429, 500, 503, 504)


# In words only: a tool that draws requests would draw deadlines too, and a deadline that passes is a 504 by right.
_DEADLINE = "The header X-Request-Deadline-Ms (a number above 0, counted from arrival) ends the request when it passes."


def _generation(body: str, summary: str, headers: list[Schema]) -> Schema:
    described = _post(body, summary, _GENERATION_ERRORS)
    described["parameters"], described["description"] = headers, _DEADLINE
    described["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return described


def _post(body: str, summary: str, errors: Iterable[int]) -> Schema:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": _responses(errors, {"application/json": {"schema": _OBJECT}}),
    }


def _bodyless(summary: str, parameters: list[Schema], errors: Iterable[int]) -> Schema:
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": _responses(errors, {"application/json": {"schema": _OBJECT}}),
    }


def _change_knobs() -> Schema:
    knobs = {"type": "object", "additionalProperties": {"type": ["number", "boolean", "string", "null"]}}
    return {
        "summary": "Change some of them",
        "requestBody": {"required": True, "content": {"application/json": {"schema": knobs}}},
        "responses": _responses((400, 413, 503), {"application/json": {"schema": _OBJECT}}),
    }


def _get(
    summary: str, parameters: list[Schema] | None = None, errors: Iterable[int] = (), content: Schema | None = None
) -> Schema:
    described: Schema = {
        "summary": summary,
        "responses": _responses(errors, content or {"application/json": {"schema": _OBJECT}}),
    }
    if parameters:
        described["parameters"] = parameters
    return described


def _responses(errors: Iterable[int], content: Schema) -> Schema:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {str(status): {"description": _ERRORS[status], "content": error} for status in (*errors, 401)}
    return {"200": {"description": "OK", "content": content}, **refused}


def _header(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


_SLEEP_QUERY = [
    _query("level", {"type": "integer", "enum": list(LEVELS)}, "1: weights are kept in host memory; 2: dropped."),
    _query("mode", {"type": "string", "enum": list(MODES)}, "What becomes of running requests; default wait."),
    _query(
        "timeout_s", {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S}, "How long to wait; default: no end."
    ),
]
