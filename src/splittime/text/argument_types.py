"""What kinds of values a schema allows for one argument, for families of tools that write a text as it is and anything
else as JSON: only the schema says whether `12` is a number."""

import ast
import json
from collections.abc import Mapping
from typing import Any

MOST_HOPS = 16  # from one reference to another
MAX_LITERAL_CHARS = 2**16  # of a value in Python's form
MAX_LITERAL_DEPTH = 64
_WORDS = {"True": True, "False": False, "None": None}  # as some templates write them


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a chain of references within `root` leads to; as it is where they lead nowhere."""
    for _ in range(MOST_HOPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        found = _at(root, reference) if isinstance(reference, str) else None
        if found is None:
            break
        schema = found
    return schema


def _at(root: Mapping[str, Any], reference: str) -> Any:
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Returns JSON's types that a value may have by the schema; None where any may be."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MOST_HOPS:
        return None
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = [types_of(each, root, depth + 1) for each in schema[name]]
            return None if None in found else frozenset[str]().union(*(each for each in found if each is not None))
    return None


def type_of(value: Any) -> str:
    """Returns JSON's type of this value."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def is_text(types: frozenset[str] | None) -> bool:
    """Whether a value can be but a text, which is written as it is."""
    return types == {"string"}


def value_of(written: str, types: frozenset[str] | None) -> Any:
    """Returns the value that these characters are, of one of these types if they can be; the text itself if not."""
    if is_text(types):
        return written
    try:
        value = _WORDS[written.strip()] if written.strip() in _WORDS else json.loads(written)
    except (ValueError, RecursionError):
        return written
    found = type_of(value)
    fits = types is None or found in types or (found == "integer" and "number" in types)
    return value if fits or types is None or "string" not in types else written


def python_value_of(written: str) -> Any:
    """Returns the value of a literal of Python's, or of JSON's; the text itself where it is neither."""
    bare = written.strip()
    try:
        return _WORDS[bare] if bare in _WORDS else json.loads(bare)
    except (ValueError, RecursionError):
        pass
    if len(bare) > MAX_LITERAL_CHARS or _depth(bare) > MAX_LITERAL_DEPTH:
        return bare
    try:
        value = ast.literal_eval(bare)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return bare
    return value


def _depth(written: str) -> int:
    return sum(map(written.count, "([{-+~"))
