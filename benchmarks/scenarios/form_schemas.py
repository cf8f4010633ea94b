"""JSON schemas as applications send them, drawn from a seed: records with optional fields, lists, enums, patterns,
ranges, alternatives, and trees by reference. The same count gives the same schemas."""

import random
from typing import Any

NAMES = ("name", "id", "kind", "tags", "price", "when", "address", "items", "is open", "ünï", "a/b", "note", "x")
WORDS = ("red", "green", "open", "closed", "a b", 'say "x"', "née", "0", "")
PATTERNS = ("^[A-Z]{2,4}-[0-9]+$", "^(yes|no)$", "^[a-z_]{1,12}$", "^#[0-9a-f]{6}$", r"^\d{3}\.\d$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
DEEPEST = 3


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns so many schemas, most of them of objects."""
    rng = random.Random(seed)
    return [_tree(rng) if rng.random() < 0.05 else _object(rng, 0) for _ in range(count)]


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = (_string, _number, _enum, _switch)
    nested = (_object, _array, _alternatives)
    draw = rng.choice(simple if depth >= DEEPEST or rng.random() < 0.6 else nested)
    return draw(rng, depth + 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 5))
    found: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.8]
    if rng.random() < 0.8:
        found["additionalProperties"] = False
    return found


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(1, 3)}


def _alternatives(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    more = rng.choice(({"maxLength": rng.randint(1, 24)}, {"pattern": rng.choice(PATTERNS)}))
    return {"type": "string", **(more if rng.random() < 0.8 else {"format": rng.choice(FORMATS)})}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-100, 100)
    kind = rng.choice(("integer", "number"))
    return {"type": kind, "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [*rng.sample(WORDS, rng.randint(1, 5)), *rng.sample((None, True, 3, -0.5), rng.randint(0, 2))]}


def _switch(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}


def _tree(rng: random.Random) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {"value": _any(rng, DEEPEST), "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
