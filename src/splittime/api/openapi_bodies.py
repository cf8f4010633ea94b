"""What may be sent, in JSON Schema: the classes of `schema.py` and the bounds that are checked elsewhere.

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

from typing import Any

import msgspec

from splittime.api.embeddings import MAX_INPUTS, EmbeddingBody
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.messages import CountTokensBody, MessagesBody
from splittime.api.params import MAX_CACHE_SALT_CHARS, MAX_PRIORITY
from splittime.api.prefill import PrefillBody
from splittime.api.ranking import RerankBody, ScoreBody
from splittime.api.reasoning import BUDGET, MOST
from splittime.api.responses import DESCRIBED, describe
from splittime.api.schema import (
    MAX_BAD_WORD_CHARS,
    MAX_STOP_CHARS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StructuredOutputs,
    TokenizeBody,
)
from splittime.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

Schema = dict[str, Any]
MSGPACK: Schema = {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}}
KV_ASK: Schema = {"requestBody": {"required": True, "content": MSGPACK}}  # `core.kv_blocks.BlocksAsk`

INT64_MAX = 2**63 - 1


def body_schemas(limits: BodyLimits, model: ModelInfo | None, needs_text: bool) -> Schema:
    """Returns the schema of every body and of what they are made of, by name. Without a model nothing is said of names
    and vocabulary. needs_text: an empty text has no tokens in its vocabulary, so an empty prompt is refused."""
    vocab_size = None if model is None else model.vocab_size
    kinds = (CompletionBody, ChatBody, PrefillBody, EmbeddingBody, RerankBody, ScoreBody, TokenizeBody, DetokenizeBody)
    of_others = (MessagesBody, CountTokensBody, *DESCRIBED)
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
