"""Forms that an answer can be held to, written as a grammar in llguidance's form (`runner.grammars` compiles it).

Between the parts of JSON there may be a space, or a line break with up to 32 spaces or tabs behind it, and nothing
else: a model that may write any amount of white space writes it until the answer's end.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from splittime.core.errors import RequestError

WHITE_SPACE = r"(?: |\n[ \t]{0,32})?"
ESCAPES = 'nrbtf\\"'  # after a backslash: names of properties are written in one way
_NOT_ALONE = re.compile(r"\^\(\?!\^?\[([^]\\^]+)\]\*\$\)")
_ALSO = re.compile(r"\(\?=([^()]*\$)\)([^()|]*\$)\)$")
MAX_SCHEMA_CHARS = 2**17
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 4096
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by names of others'
VALUES = ("const", "enum", "default", "examples")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def of_json_schema(schema: Mapping[str, Any] | bool, param: str) -> str:
    """Returns the grammar of all JSON values that the schema allows. Raises RequestError, which names `param`, for one
    that is too large or too deep; what its keywords mean is checked when it is compiled."""
    require_depth(schema, param)
    written = json.dumps(schema, ensure_ascii=False)
    _require_at_most(len(written), MAX_SCHEMA_CHARS, "characters", param)
    return json.dumps({"grammars": [{"json_schema": _with_own_rules(schema)}]}, ensure_ascii=False)


def json_schema_rule(schema: Mapping[str, Any]) -> str:
    """Returns the schema as it stands behind `%json` in a grammar of Lark's form."""
    return json.dumps(_with_own_rules(schema))


def _with_own_rules(schema: Mapping[str, Any] | bool) -> Any:
    own: Any = {"x-guidance": {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}}
    if not isinstance(schema, Mapping):
        return {**own} if schema else {"not": {}}
    return {**_without_annotations(schema), **own}


def _without_annotations(schema: Any) -> Any:
    """Returns the schema without what is no rule here: formats that nobody checks are annotations (JSON Schema 2020-12,
    validation, 7.2.1), as libraries write many; that names are texts says nothing."""
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    more: list[str] = []
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _without_annotations(each) for name, each in value.items()}
        elif key in VALUES:
            found[key] = value
        elif key == "pattern" and isinstance(value, str) and "(?" in value:
            found[key], *more = _intersected(value)
        elif not (key == "propertyNames" and value in (True, {}, {"type": "string"})) and not (
            key == "format" and isinstance(value, str) and value not in FORMATS
        ):
            found[key] = _without_annotations(value)
    return found | {"allOf": [*found.get("allOf", ()), *({"pattern": each} for each in more)]} if more else found


def _intersected(pattern: str) -> list[str]:
    """Returns patterns without a look-ahead which together say the same, as far as it is one of pydantic's: a text is
    not made of some characters alone, or what follows in an alternative at the end matches another pattern too."""
    alone, bare = _NOT_ALONE.match(pattern), _NOT_ALONE.sub("^", pattern)
    also = _ALSO.search(bare)
    ends = [bare] if also is None else [f"{bare[: also.start()]}{each})" for each in also.groups()]
    return [*ends, *([] if alone is None else [f"[^{alone[1]}]"])]


def named_beside(grammar: str, other: str, name: str) -> str:
    """Returns the grammar with another one beside it, which it refers to by this name."""
    first, *more = json.loads(other)["grammars"]
    return json.dumps(
        {"grammars": [*json.loads(grammar)["grammars"], {**first, "name": name}, *more]}, ensure_ascii=False
    )


def of_json_object() -> str:
    """Returns the grammar of all JSON objects."""
    return of_json_schema({"type": "object"}, "response_format")


def of_regex(pattern: str, param: str) -> str:
    """Returns the grammar of all texts that the regular expression matches as a whole."""
    _require_at_most(len(pattern), MAX_SCHEMA_CHARS, "characters", param)
    return _of_lark("start: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n") + "/")


def of_choice(choices: Sequence[str], param: str) -> str:
    """Returns the grammar of these texts."""
    if not choices:
        raise RequestError(f"{param} has no choice", param=param)
    _require_at_most(len(choices), MAX_CHOICES, "choices", param)
    _require_at_most(sum(map(len, choices)), MAX_SCHEMA_CHARS, "characters", param)
    texts = " | ".join(json.dumps(choice) for choice in choices)
    return _of_lark(
        f"start: CHOICE\nCHOICE: {texts}"
    )  # one lexeme: thousands of rules would be too many for the parser


def of_lark(grammar: str, param: str) -> str:
    """Returns the grammar that is written in Lark's form (llguidance's kind, which begins at `start`)."""
    _require_at_most(len(grammar), MAX_SCHEMA_CHARS, "characters", param)
    return _of_lark(grammar)


def _of_lark(written: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": written}]}, ensure_ascii=False)


def _require_at_most(count: int, most: int, what: str, param: str) -> None:
    if count > most:
        raise RequestError(f"{param} has {count} {what}, more than {most}", param=param, value=count, limit=most)


def require_depth(schema: object, param: str) -> None:
    """Raises RequestError for objects and lists in each other deeper than MAX_SCHEMA_DEPTH."""
    level: list[Any] = [schema] if isinstance(schema, (dict, list)) else []
    for _ in range(MAX_SCHEMA_DEPTH):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for some in parts for each in some if isinstance(each, (dict, list))]
        if not level:
            return
    message = f"{param} is deeper than {MAX_SCHEMA_DEPTH} objects and lists in each other"
    raise RequestError(message, param=param, limit=MAX_SCHEMA_DEPTH)
