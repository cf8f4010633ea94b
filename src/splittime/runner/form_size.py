"""How large a form is, written out: bounded from its text alone, before anything is built of it.

The library writes repetitions out as it walks, looks at all of a text that must come at once, and goes through the
product of what must hold together. So the size counts the characters of names, texts and patterns, each as often as it
is repeated, and is `math.inf` where patterns must hold together. A form below `SMALL` walks beside the engine's steps,
once it was tried (`form_process`, which also asks this: whoever wrote the form makes it long); all others walk in
processes of their own. It is a bound, not a judgement: a large form is served too.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any

SMALL = 20_000
MOST_MULTIPLE = 1000  # of multipleOf: the library counts remainders
MOST_ALTERNATIVES = 512  # of a form: answers of each are followed at once
MOST_RULES = 256
MOST_COUNTED = 16  # of what may begin at many places: there are up to 2**16 sets of these
MOST_HELD_TOGETHER = 8  # `&` and `~` of a form in Lark's: each of our own calls of tools has some
_AT_ONCE = ("pattern", "format", "multipleOf", "minLength", "maxLength", "minimum", "maximum", "allOf", "$ref")
_LARK = re.compile(
    r"//[^\n]*|%json\s*(?P<json>\{)|(?P<text>\"(?:[^\"\\\n]|\\.)*\")|/(?P<regex>(?:[^/\\\n]|\\.)+)/"
    r"|[{~]\s*(?P<least>\d*)\s*(?:(?:,|\.\.)\s*(?P<most>\d*))?|(?P<held>&)|(?P<or>\|)|(?P<name>!?\w+)"
)
_DEFINED = re.compile(r"^[ \t]*[!?]?(\w+)(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:", re.MULTILINE)


def is_small(grammar: str) -> bool:
    """Returns whether the form is so small that each of its masks takes little. grammar: in the form of
    `text.grammars`."""
    try:
        parts = json.loads(grammar)["grammars"]
        return sum(_size_of_part(part) for part in parts) <= SMALL
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _size_of_part(part: Mapping[str, Any]) -> float:
    return _Schema(part["json_schema"]).size() if "json_schema" in part else _size_of_lark(part["lark_grammar"])


# ---- JSON schemas


class _Schema:
    """root: the whole schema, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, float] = {}  # of references
        self._num_alternatives = 0

    def size(self) -> float:
        size = self._of(self._root)
        return size if self._num_alternatives <= MOST_ALTERNATIVES else math.inf

    def _of(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return 1
        size = self._own(schema) + sum(self._of(part) for part in _parts(schema))
        size += sum(len(name) + 4 for name in _mapping(schema, "properties"))
        size += self._referred(schema.get("$ref"))
        return size * max(1, _number(schema.get("minItems")), _number(schema.get("minProperties")))

    def _own(self, schema: Mapping[str, Any]) -> float:
        """Returns the size of what the schema itself says of a value."""
        alternatives = [part for name in ("anyOf", "oneOf", "type") for part in _listed(schema, name)]
        self._num_alternatives += len(alternatives)
        if _holds_together(schema) or _number(schema.get("multipleOf")) > MOST_MULTIPLE:
            return math.inf
        texts = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        size = sum(len(json.dumps(text)) for text in texts) + _number(schema.get("minLength"))
        found = [
            name for name in (schema.get("pattern"), *_mapping(schema, "patternProperties")) if isinstance(name, str)
        ]
        return size + sum(size_of_regex(pattern, is_anywhere=not pattern.startswith("^")) for pattern in found)

    def _referred(self, reference: Any) -> float:
        if not isinstance(reference, str):
            return 0
        if reference not in self._known:
            self._known[reference] = 1  # it refers to itself: what must come is written out once
            found = _behind(self._root, reference)
            self._known[reference] = math.inf if found is None else self._of(found)
        return self._known[reference]


def _holds_together(schema: Mapping[str, Any]) -> bool:
    """Returns whether more than one thing is said of the same text or number, so that the library builds their
    product."""
    each = [part for part in _listed(schema, "allOf") if isinstance(part, Mapping)]
    said = [
        part
        for part in (*each, schema)
        if any(name in part for name in _AT_ONCE if part is not schema or name != "allOf")
    ]
    texts = [name for name in ("pattern", "format", "maxLength", "minLength") if name in schema]
    is_cut = bool({"pattern", "format"} & set(texts)) and len(texts) > 1
    return (bool(each) and len(said) > 1) or (is_cut and max(_number(schema.get(name)) for name in texts) > 256)


def _parts(schema: Mapping[str, Any]) -> Iterable[Any]:
    """Yields the schemas in this one, but for those that are only referred to."""
    for name in ("properties", "patternProperties"):
        yield from _mapping(schema, name).values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from _listed(schema, name)
    for name in ("items", "additionalProperties", "additionalItems", "not", "if", "contains"):
        yield from (schema[name] if isinstance(schema.get(name), list) else [schema.get(name)])


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _behind(root: Any, reference: str) -> Any:
    """Returns the part of the schema that this leads to; None where it leads out of it, or nowhere."""
    found = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        if name:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


# ---- regular expressions


def size_of_regex(pattern: str, *, is_anywhere: bool = False) -> float:
    """Returns how many characters the pattern has where each is written as often as it may be repeated, and once where
    that has no end; `math.inf` of one that Python cannot read, or whose states are many more than its characters.
    is_anywhere: what it matches may stand behind any text."""
    try:
        return _Pattern(is_anywhere).size(patterns.parse(pattern))
    except (re.error, RecursionError, OverflowError, ValueError):
        return math.inf


class _Pattern:
    """is_open: what comes may begin at more than one place, as behind a repetition without an end. A count there has
    a state for each set of places where it may have begun."""

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open

    def size(self, nodes: Iterable[Any]) -> float:
        return sum(map(self._of_node, nodes))

    def _of_node(self, node: tuple[Any, Any]) -> float:
        kind, value = node
        if kind is codes.SUBPATTERN:
            return self.size(value[-1])
        if kind is codes.BRANCH:
            return sum(map(self.size, value[1]))
        if kind not in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            return 1
        least, most, inner = value
        self._is_open |= most is codes.MAXREPEAT
        times = max(1, least if most is codes.MAXREPEAT else most)
        return math.inf if self._is_open and times > MOST_COUNTED else times * self.size(inner)


# ---- Lark's grammars


def _size_of_lark(written: str) -> float:
    """Returns a bound of a grammar's size: each rule counts as often as all of its repetitions together could say, and
    each name as all that it stands for."""
    begins = [(found.start(), found.end(), found[1]) for found in _DEFINED.finditer(written)]
    ends = [begin for begin, _, _ in begins[1:]] + [len(written)]
    rules = {name: written[begin:end] for (_, begin, name), end in zip(begins, ends, strict=True)}
    if not rules or len(rules) > MOST_RULES or written.count("|") > MOST_ALTERNATIVES:
        return math.inf
    lark = _Lark(rules)
    size = sum(lark.size_of(name) for name in rules)
    return size if lark.num_held <= MOST_HELD_TOGETHER else math.inf


class _Lark:
    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules, self.num_held = rules, 0
        self._known: dict[str, float] = {}

    def size_of(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = 1  # it refers to itself
            self._known[name] = self._written(self._rules[name])
        return self._known[name]

    def _written(self, rule: str) -> float:
        size, times, at = 0.0, 1.0, 0
        while (found := _LARK.search(rule, at)) is not None:
            at = found.end()
            if found["json"]:
                schema, at = json.JSONDecoder().raw_decode(rule, found.start("json"))
                size += _Schema(schema).size()
            elif found["regex"]:
                size += size_of_regex(found["regex"].replace("\\/", "/"))
            elif found["name"]:
                size += self.size_of(found["name"]) if found["name"] in self._rules else 1
            elif found["text"]:
                size += len(found["text"])
            elif found["held"] or found[0] == "~":
                self.num_held += 1
            else:
                times *= max(1, *(int(found[name] or 1) for name in ("least", "most")))
        return size * times
