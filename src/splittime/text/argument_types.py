"""What kinds of values a schema allows for one argument, for families of tools that write a text as it is and anything
else as JSON: only the schema says whether `12` is a number."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST_PARTS = 1024  # of a schema, looked at for one value's types
MOST_REFERENCE_CHARS = 1024
MAX_LITERAL_CHARS = 2**16  # of a value in Python's form
MAX_LITERAL_DEPTH = 64
_WORDS = {"True": True, "False": False, "None": None}  # as some templates write them


def followed(schema: Any, root: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the schema and, in order, those that its chain of references within `root` leads to."""
    chain = [schema]
    while len(chain) <= MOST_PARTS and (found := _behind_reference(chain[-1], root)) is not None:
        chain.append(found)
    return chain


def _behind_reference(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns what the reference in this schema leads to; None for none, or one too long or that leads nowhere."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or len(reference) > MOST_REFERENCE_CHARS or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns JSON's types that a value may have by the schema; None where any may be, or where the schema has more
    than MOST_PARTS parts that say so."""
    found: set[str] = set()
    looked_at: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in looked_at:
            continue
        looked_at.add(id(part))
        types, parts = _of_part(part, root)
        if (types is None and not parts) or len(looked_at) > MOST_PARTS:
            return None
        found |= types or frozenset()
        waiting += parts
    return frozenset(found) or None


def _of_part(schema: Any, root: Mapping[str, Any]) -> tuple[frozenset[str] | None, Sequence[Any]]:
    """Returns the types that the schema itself names, or None and the schemas whose types it has: none of these either
    where any type may be."""
    behind = _behind_reference(schema, root)
    if behind is not None:
        return None, [behind]
    if not isinstance(schema, Mapping):
        return None, []
    own = _own_types(schema)
    if own is not None:
        return own, []
    return None, next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [])


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, {type(each): each for each in schema["enum"]}.values()))
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
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
    """Returns whether a value can be but a text, which is written as it is."""
    return types == {"string"}


def value_of(written: str, types: frozenset[str] | None) -> Any:
    """Returns the value that these characters are, of one of these types if they can be; the text itself if not."""
    if is_text(types):
        return written
    try:
        value = _json_value(written)
    except (ValueError, RecursionError):
        return written
    found = type_of(value)
    fits = types is None or found in types or (found == "integer" and "number" in types)
    return value if fits or types is None or "string" not in types else written


def python_value_of(written: str) -> Any:
    """Returns the value of a literal of Python's, or of JSON's; the text itself where it is neither."""
    bare = written.strip()
    try:
        return _json_value(bare)
    except (ValueError, RecursionError):
        pass
    if len(bare) > MAX_LITERAL_CHARS or _depth(bare) > MAX_LITERAL_DEPTH:
        return bare
    try:
        return _writable(ast.literal_eval(bare))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return bare


def _json_value(written: str) -> Any:
    """Returns the value of JSON, or of a word of Python's. Raises ValueError for what is neither, or not writable."""
    bare = written.strip()
    return _WORDS[bare] if bare in _WORDS else _writable(json.loads(written))


def _writable(value: Any) -> Any:
    """Returns the value. Raises ValueError for one with half of a surrogate pair, an infinity or NaN in it, and
    TypeError for one of a type that JSON has not: no answer can hold them."""
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def _depth(written: str) -> int:
    return sum(map(written.count, "([{-+~"))
