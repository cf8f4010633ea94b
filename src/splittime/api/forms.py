"""Which form an answer is held to, of a body that may ask for one in three ways: OpenAI's `response_format`, and vLLM's
`structured_outputs` and `guided_*`."""

from typing import Any

import msgspec

from splittime.api.schema import GenerationBody, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from splittime.core.errors import RequestError
from splittime.text import grammars


def grammar_of(body: GenerationBody) -> str:
    """Returns the grammar of what the body asks for; "" where it asks for a text. Raises RequestError for two forms,
    and for one that is too large or cannot be."""
    found = dict(_grammars(body))
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{second}: {first} asks for a form already; give one of them", param=second)
    return next(iter(found.values()), "")


def _grammars(body: GenerationBody) -> Any:
    """Yields each field that asks for a form, with its grammar."""
    asked = body.response_format
    if isinstance(asked, JsonObjectFormat):
        yield "response_format", grammars.of_json_object()
    elif isinstance(asked, JsonSchemaFormat):
        schema = True if asked.json_schema.schema is None else asked.json_schema.schema
        yield "response_format", grammars.of_json_schema(schema, "response_format.json_schema.schema")
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)
    if body.guided_json is not None:
        yield "guided_json", grammars.of_json_schema(_schema(body.guided_json, "guided_json"), "guided_json")
    if body.guided_regex is not None:
        yield "guided_regex", grammars.of_regex(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        yield "guided_choice", grammars.of_choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        yield "guided_grammar", grammars.of_lark(body.guided_grammar, "guided_grammar")


def _structured(asked: StructuredOutputs) -> Any:
    if asked.json is not None:
        at = "structured_outputs.json"
        yield at, grammars.of_json_schema(_schema(asked.json, at), at)
    if asked.json_object:
        yield "structured_outputs.json_object", grammars.of_json_object()
    if asked.regex is not None:
        yield "structured_outputs.regex", grammars.of_regex(asked.regex, "structured_outputs.regex")
    for name in ("choice", "choices"):
        if (texts := getattr(asked, name)) is not None:
            yield f"structured_outputs.{name}", grammars.of_choice(texts, f"structured_outputs.{name}")
    if asked.grammar is not None:
        yield "structured_outputs.grammar", grammars.of_lark(asked.grammar, "structured_outputs.grammar")


def _schema(given: dict[str, Any] | str, param: str) -> Any:
    """A schema may come as a text of JSON."""
    if not isinstance(given, str):
        return given
    try:
        schema = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} is no JSON schema: an object, true or false", param=param)
    return schema
