"""`/openapi.json`: the paths, with what may be sent (`bodies`) and what comes back (`answer_structs`). An
answer may carry more fields than are listed. A test checks all of it against real answers.

What may be sent, in JSON Schema: the classes of `schema.py` and the bounds that are checked elsewhere.

msgspec derives a schema from each class. What its types cannot say is added here: the model's limits (names,
vocabulary, `n`), the limits of `SamplingParams`, and the rules between fields (`stream_options` needs `stream`). A test
draws bodies from this description and holds the server to it: what is described is accepted, what is not is refused.
Five rules have no form in JSON Schema and are told in words: a prompt must fit the context, prompts times `n` are
bounded, `max_completion_tokens` may repeat `max_tokens`, a bound of the reasoning needs a model whose reasoning can
have one, and `truncate_prompt_tokens` -1 needs a `max_tokens` below the context. Two are told in words because with
them schemathesis draws no chats at all: of a chat `continue_final_message` and `add_generation_prompt` are not both
true, and an answer is held to one form at most, of which tools are one, and not with `ignore_eos`, `bad_words` or
`allowed_token_ids`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from splittime import __version__
from splittime.api import ollama
from splittime.api.answer_structs import ChatCompletion, Completion, Models, Text
from splittime.api.embeddings import MAX_INPUTS, EmbeddingBody, Embeddings
from splittime.api.ledger_answers import HopsBody
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.messages import CountTokensBody, MessagesBody
from splittime.api.params import MAX_CACHE_SALT_CHARS, MAX_PRIORITY
from splittime.api.prefill import PrefillAnswer, PrefillBody
from splittime.api.ranking import Ranking, RerankBody, ScoreBody, ScoreList
from splittime.api.responses import DESCRIBED, QUERY, describe
from splittime.api.schema import (
    MAX_BAD_WORD_CHARS,
    MAX_STOP_CHARS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    StructuredOutputs,
    TokenizeBody,
    UnloadAdapterBody,
)
from splittime.api.tools import BUDGET, MOST
from splittime.core.engine import LEVELS, MAX_TIMEOUT_S, MODES
from splittime.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from splittime.text.process import Tokens

Schema = dict[str, Any]
MSGPACK: Schema = {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}}
KV_ASK: Schema = {"requestBody": {"required": True, "content": MSGPACK}}  # `core.engine.BlocksAsk`

INT64_MAX = 2**63 - 1


def body_schemas(limits: BodyLimits, model: ModelInfo | None, needs_text: bool) -> Schema:
    """Returns the schema of every body and of what they are made of, by name. Without a model nothing is said of names
    and vocabulary. needs_text: an empty text has no tokens in its vocabulary, so an empty prompt is refused."""
    vocab_size = None if model is None else model.vocab_size
    kinds = (CompletionBody, ChatBody, PrefillBody, EmbeddingBody, RerankBody, ScoreBody, TokenizeBody, DetokenizeBody)
    of_others = (MessagesBody, CountTokensBody, *DESCRIBED, *ollama.BODIES)
    _, components = msgspec.json.schema_components((*kinds, *of_others), ref_template="#/components/schemas/{name}")
    describe(components)
    for kind in (CompletionBody, ChatBody):
        _bound(components[kind.__name__]["properties"], limits, vocab_size)
    if model is not None:
        for name in (kind.__name__ for kind in kinds):
            components[name]["properties"]["model"]["anyOf"][0]["enum"] = list(model.served_names)
    most = INT64_MAX if model is None else model.max_model_len
    for properties in (component["properties"] for component in components.values()):
        if "truncate_prompt_tokens" in properties:
            counted = {"type": "integer", "minimum": 1, "maximum": most}
            properties["truncate_prompt_tokens"]["anyOf"] = [
                counted,
                {"type": "integer", "const": -1},
                {"type": "null"},
            ]
    components["CompletionBody"]["properties"]["prompt"] = _prompt_forms(limits, vocab_size, needs_text)
    _bound_embedding(components["EmbeddingBody"]["properties"], limits, model, needs_text)
    _bound_prefill(components["PrefillBody"], vocab_size)
    components["RerankBody"]["properties"]["documents"]["maxItems"] = limits.max_choices
    components["CompletionBody"]["allOf"] = [_STREAM_OPTIONS, _ZERO_TOKENS_NEED_ECHO]
    rules = [_STREAM_OPTIONS, _TOP_LOGPROBS, _ONE_LENGTH, *map(_not_zero, _LENGTHS)]
    components["ChatBody"]["allOf"] = rules
    components["TokenizeBody"]["allOf"] = [_CONTINUES]
    components["DetokenizeBody"]["properties"]["tokens"]["items"] = _token_id(vocab_size)
    components["TokenizeBody"]["oneOf"] = [_only("prompt", "messages"), _only("messages", "prompt")]
    (_tighten if limits.strict else _loosen)(components)
    return components


# ---- bounds of single fields


def _bound(properties: Schema, limits: BodyLimits, vocab_size: int | None) -> None:
    """Adds the bounds that `params.py` and `SamplingParams.validate` check."""
    bounds: Schema = {
        "n": {"maximum": limits.max_n},
        "seed": {"minimum": -(2**63), "maximum": INT64_MAX},
        "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
        "cache_salt": {"maxLength": MAX_CACHE_SALT_CHARS},
        "logit_bias": {"maxProperties": MAX_LOGIT_BIAS},
        "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
        BUDGET: {"maximum": MOST},
        "stop": {"maxItems": MAX_STOP_STRINGS, "maxLength": MAX_STOP_CHARS},
        **{name: {"maximum": INT64_MAX} for name in (*_LENGTHS, "min_tokens", "top_k")},
    }
    for name, more in bounds.items():
        if name in properties:
            properties[name].update(more)
    properties["stop"]["anyOf"][1]["items"]["maxLength"] = MAX_STOP_CHARS
    properties["stop_token_ids"]["anyOf"][0]["items"] = _token_id(vocab_size)
    properties["allowed_token_ids"]["anyOf"][0]["items"] = _token_id(vocab_size)
    properties["bad_words"]["anyOf"][0]["items"] |= {"maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"}
    bias = properties["logit_bias"]["anyOf"][0]
    bias["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
    bias["propertyNames"] = {"pattern": f"^({_below(vocab_size)})$" if vocab_size else "^[0-9]{1,10}$"}


def _bound_embedding(properties: Schema, limits: BodyLimits, model: ModelInfo | None, needs_text: bool) -> None:
    """Adds the bounds that `embeddings.py` checks."""
    properties["priority"].update(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
    properties["cache_salt"].update(maxLength=MAX_CACHE_SALT_CHARS)
    properties["input"] = _prompt_forms(limits, None if model is None else model.vocab_size, needs_text)
    properties["input"]["description"] = f"A text, token ids, or a list of either: {MAX_INPUTS} at most."
    for form in properties["input"]["anyOf"][2:]:
        form["maxItems"] = MAX_INPUTS
    size = properties["dimensions"]["anyOf"][0]
    if model is None or not model.pooling.size:
        size["maximum"] = INT64_MAX
    elif model.pooling.sizes or not model.pooling.may_be_cut:
        size["enum"] = sorted({*model.pooling.sizes, model.pooling.size})
    else:
        size["maximum"] = model.pooling.size


def _bound_prefill(body: Schema, vocab_size: int | None) -> None:
    """Adds the bounds that `prefill.py` checks."""
    body["properties"]["cache_salt"].update(maxLength=MAX_CACHE_SALT_CHARS)
    body["properties"]["prompt"]["anyOf"][1].update(items=_token_id(vocab_size), minItems=1)
    body["oneOf"] = [_only("prompt", "messages"), _only("messages", "prompt")]


def _token_id(vocab_size: int | None) -> Schema:
    largest = INT64_MAX if vocab_size is None else vocab_size - 1
    return {"type": "integer", "minimum": 0, "maximum": largest}


def _below(limit: int) -> str:
    """Returns a pattern of the decimal numbers below `limit`, without leading zeros."""
    digits = str(limit - 1)
    shorter = [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    same = [
        f"{digits[:i]}[{1 if i == 0 and len(digits) > 1 else 0}-{int(digit) - 1}]" + "[0-9]" * (len(digits) - i - 1)
        for i, digit in enumerate(digits)
        if int(digit) > (1 if i == 0 and len(digits) > 1 else 0)
    ]
    single = ["[0-9]"] if len(digits) > 1 else []
    return "|".join([*single, *shorter, *same, digits])


def _prompt_forms(limits: BodyLimits, vocab_size: int | None, needs_text: bool) -> Schema:
    text: Schema = {"type": "string", "minLength": 1} if needs_text else {"type": "string"}
    ids = {"type": "array", "items": _token_id(vocab_size), "minItems": 1}
    forms = [text, ids, *({"type": "array", "items": of, "minItems": 1} for of in (text, ids))]
    several = f"Prompts times n are at most {limits.max_choices}."
    return {"description": f"A text, token ids, or a list of either. {several}", "anyOf": forms}


# ---- rules between fields

_TURNS = ("continue_final_message", "add_generation_prompt")
_LENGTHS = ("max_tokens", "max_completion_tokens")


def _is(name: str, schema: Schema) -> Schema:
    """The field is there, and is like this."""
    return {"properties": {name: schema}, "required": [name]}


def _needs(name: str, schema: Schema, other: Schema) -> Schema:
    return {"if": _is(name, schema), "then": other}


def _not_zero(name: str) -> Schema:
    return {"properties": {name: {"not": {"const": 0}}}}


def _only(name: str, other: str) -> Schema:
    return {
        **_is(name, {"not": {"type": "null"}}),
        "properties": {name: {"not": {"type": "null"}}, other: {"const": None}},
    }


_STREAM_OPTIONS = _needs("stream_options", {"type": "object"}, _is("stream", {"const": True}))
_TOP_LOGPROBS = _needs("top_logprobs", {"type": "integer"}, _is("logprobs", {"const": True}))
_CONTINUES = {"anyOf": [{"properties": {name: {"enum": [False, None]}}} for name in _TURNS]}
_ZERO_TOKENS_NEED_ECHO = _needs("max_tokens", {"const": 0}, _is("echo", {"const": True}))
_ONE_LENGTH = {"not": {"allOf": [_is(name, {"type": "integer"}) for name in _LENGTHS]}}


def _loosen(components: Schema) -> None:
    """Without it unknown fields are taken, and null stands for what is absent."""
    for kind, schema in components.items():
        if kind != StructuredOutputs.__name__:
            schema.pop("additionalProperties", None)
        for name, field in schema["properties"].items():
            if name not in schema["required"] and "anyOf" not in field and "x-effect" not in field:
                described = {key: field.pop(key) for key in ("description", "default") if key in field}
                schema["properties"][name] = {**described, "anyOf": [field, {"type": "null"}]}


def _tighten(components: Schema) -> None:
    """With `--strict` no field without effect is taken, and no value that would be bent to fit."""
    for schema in components.values():
        for name, field in schema["properties"].items():
            if field.get("x-effect") in ("none", "hint"):
                schema["properties"][name] = {"type": "null", "description": field["description"]}
        bounds = {
            "max_tokens": {"minimum": 0},
            "max_completion_tokens": {"minimum": 1},
            "top_p": {"exclusiveMinimum": 0},
        }
        for name in bounds.keys() & schema["properties"].keys():
            schema["properties"][name].update(bounds[name])
        for form in schema["properties"].get("stop", {}).get("anyOf", ()):
            form.get("items", form)["minLength"] = 1


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
    **{name: {"input": "Hello"} for name in ("EmbeddingBody", "OllamaEmbedBody")},
    "OllamaChatBody": {"messages": _HELLO},
    "OllamaGenerateBody": {"prompt": "Hello"},
    "OllamaBody": {},
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
        "/v1/responses/{response_id}/cancel": {"post": _get("Refused", [response_id], errors=(400, 404))},
        "/v1/responses/input_tokens": {"post": _in_words("The tokens of its prompt", "ResponsesBody")},
        "/api/chat": {"post": _in_words("Ollama's API: a conversation", "OllamaChatBody")},
        "/api/generate": {"post": _in_words("A prompt, in the model's template or raw", "OllamaGenerateBody")},
        "/api/embed": {"post": _in_words("Vectors of texts", "OllamaEmbedBody")},
        "/api/embeddings": {"post": _in_words("The vector of one", "OllamaEmbedBody")},
        "/api/show": {"post": _in_words("What a model is, and can", "OllamaBody")},
        **{f"/api/{name}": {"get": _get("The models served")} for name in ("tags", "ps")},
        "/api/version": {"get": _get("The level of Ollama's API")},
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
_SAID: Schema = {"type": ["object", "string"], "description": "A text where the path begins with /api/."}
_ERROR: Schema = {  # `core.errors.error_body` makes it
    "type": "object",
    "required": ["error"],
    "properties": {"error": {**_SAID, "required": ["message", "type", "code"], "properties": _ERROR_FIELDS}},
}
