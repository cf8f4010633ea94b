"""Forms that an answer can be held to, written as a grammar in llguidance's form (`runner.grammars` compiles it).

Between the parts of JSON there may be a space, or a line break with up to 32 spaces or tabs behind it, and nothing
else: a model that may write any amount of white space writes it until the answer's end.

Texts as they stand in a grammar of Lark's form. A mark that is an added token of the vocabulary is spelled by that
token alone: llguidance tells it from the same characters in a text, and the model was taught it.

token_ids, in all of these: the ids of such marks, by their text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import perm
from typing import Any

from splittime.core.errors import RequestError

_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/]")


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns the text as a part of a rule; "" for none."""
    return " ".join(
        f"<[{token_ids[part]}]>" if part in token_ids else json.dumps(part) for part in pieces(text, token_ids)
    )


def up_to(rule: str, mark: str, token_ids: Mapping[str, int]) -> str:
    """Returns the rule of this name: any text and then the mark, where it first comes."""
    parts = pieces(mark, token_ids)
    first = next((at for at, part in enumerate(parts) if part in token_ids), None)
    if first is None:
        return f"{rule}[lazy]: /(?s:.*){as_regex(mark)}/"
    text = f"{rule}_text".upper()
    return f"{without(text, parts[first])}\n{rule}: {text} {literal(''.join(parts[first:]), token_ids)}"


def without(name: str, mark: str) -> str:
    """Returns the terminal of this name: any text in which the mark does not stand."""
    return f"{name}: /(?s:.*)/ & ~/(?s:.*){as_regex(mark)}(?s:.*)/"


def pieces(text: str, token_ids: Mapping[str, int]) -> Sequence[str]:
    """Returns the text, cut before and behind each mark that is a token."""
    if not token_ids:
        return [text] if text else []
    marks = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True)))
    return [part for part in re.split(f"({marks})", text) if part]


def as_regex(text: str) -> str:
    """Returns the regular expression of this text alone, as it stands between slashes."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")


WHITE_SPACE = r"(?: |\n[ \t]{0,32})?"
ESCAPES = 'nrbtf\\"'  # after a backslash: names of properties are written in one way
_NOT_ALONE = re.compile(r"\^\(\?!\^?\[([^]\\^]+)\]\*\$\)")
_ALSO = re.compile(r"\(\?=([^()]*\$)\)([^()|]*\$)\)$")
_CONTROL = re.compile(r"\\u00[01]|\x7f")  # in JSON
_EXCLUDING = re.compile(r"(?<!\\)\[\^((?:\\.|[^\]\\])*)(\]|\\?\Z)", re.DOTALL)  # from wherever it begins, it ends
_QUOTING = re.compile(r"""["]|\\\\|\\x[25]|\\u00[25]""")
MAX_SCHEMA_CHARS = 2**17
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 4096
MAX_PERMUTED = 5  # values of a list
MAX_PERMUTED_CHARS = 1024  # of their JSON
MAX_PERMUTED_ENTRIES = 2**13  # of all lists of a schema: 75 bytes of it may become 1,305
_KINDS = {"string": (str,), "integer": (int,), "number": (int, float)}
_OF_LISTS = {"type", "items", "uniqueItems", "minItems", "maxItems", "title", "description", "default"}
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
    has_controls = _CONTROL.search(json.dumps(schema, ensure_ascii=False)) is not None
    escapes = ESCAPES + ("u" if has_controls else "")  # no other way to write them
    own: Any = {"x-guidance": {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": escapes}}
    if not isinstance(schema, Mapping):
        return {**own} if schema else {"not": {}}
    return {**_without_annotations(schema, [MAX_PERMUTED_ENTRIES]), **own}


def _without_annotations(schema: Any, room: list[int]) -> Any:
    """Returns the schema without what is no rule here: formats that nobody checks are annotations (JSON Schema 2020-12,
    validation, 7.2.1), as libraries write many; that names are texts says nothing. room: for entries that are listed,
    of which it takes its own."""
    if isinstance(schema, list):
        return [_without_annotations(each, room) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    more: list[str] = []
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _without_annotations(each, room) for name, each in value.items()}
        elif key in VALUES:
            found[key] = value
        elif key == "pattern" and isinstance(value, str):
            found[key], *more = _intersected(_EXCLUDING.sub(_without_controls, value))
        elif not (key == "propertyNames" and value in (True, {}, {"type": "string"})) and not (
            key == "format" and isinstance(value, str) and value not in FORMATS
        ):
            found[key] = _without_annotations(value, room)
    found |= {"allOf": [*found.get("allOf", ()), *({"pattern": each} for each in more)]} if more else {}
    return _with_few_listed(found, room)


def _with_few_listed(schema: dict[str, Any], room: list[int]) -> dict[str, Any]:
    """Returns the schema with its names of properties, or its lists without a value twice, one by one: where they are
    named, and few enough."""
    named, items = (one if isinstance(one, dict) else {} for one in map(schema.get, ("propertyNames", "items")))
    names, values = (each if isinstance(each, list) else None for each in (named.get("enum"), items.get("enum")))
    is_named = names is not None and not schema.keys() & {"properties", "patternProperties"}
    if is_named and all(isinstance(name, str) for name in names or ()):
        found = {name: value for name, value in schema.items() if name != "propertyNames"}
        each = found.pop("additionalProperties", True)
        return found | {"properties": dict.fromkeys(names or (), each), "additionalProperties": False}
    bounds = schema.get("minItems", 0), schema.get("maxItems", MAX_PERMUTED)
    is_few = values is not None and len(values) <= MAX_PERMUTED and all(isinstance(each, int) for each in bounds)
    is_listed = is_few and schema.get("uniqueItems") is True and schema.keys() <= _OF_LISTS
    kinds = _KINDS.get(str(items["type"]), ()) if "type" in items else None
    is_typed = schema.get("type") == "array" and items.keys() <= {"enum", "type"}
    if is_listed and is_typed and (kinds is None or all(type(value) in kinds for value in values or ())):
        distinct = {json.dumps(value): value for value in values or ()}
        sizes = range(max(0, bounds[0]), 1 + min(len(distinct), bounds[1]))
        count = sum(size * perm(len(distinct), size) for size in sizes)
        if sizes and sum(map(len, distinct)) <= MAX_PERMUTED_CHARS and count <= room[0]:
            room[0] -= count
            return {"enum": [list(one) for size in sizes for one in permutations(distinct.values(), size)]}
    return schema


def _without_controls(negated: re.Match[str]) -> str:
    """Returns the class of characters, which excludes some, without control characters if a quote or a backslash is
    excluded: beside those any escape would be let through, of a quote too."""
    excluded, end = negated.groups()
    return f"[^{excluded}\\x00-\\x1f{end}" if _QUOTING.search(excluded) else negated[0]


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
    beside = [*json.loads(grammar)["grammars"], {**first, "name": name}, *more]
    return json.dumps({"grammars": beside}, ensure_ascii=False)


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
    # one lexeme: thousands of rules would be too many for the parser
    return _of_lark(f"start: CHOICE\nCHOICE: {texts}")


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
    """Raises RequestError for objects and lists in each other deeper than MAX_SCHEMA_DEPTH, and for so many values that
    their JSON is too long: to write it first holds the interpreter's lock for as long as there are values."""
    level: list[Any] = [schema] if isinstance(schema, (dict, list)) else []
    least = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        least += 2 * sum(map(len, level))  # each has a comma
        _require_at_most(least, MAX_SCHEMA_CHARS, "characters or more", param)
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for some in parts for each in some if isinstance(each, (dict, list))]
        if not level:
            return
    message = f"{param} is deeper than {MAX_SCHEMA_DEPTH} objects and lists in each other"
    raise RequestError(message, param=param, limit=MAX_SCHEMA_DEPTH)
