"""The grammar of arguments that are an object of a family's own kind (`Style.QUOTED`), by their schema.

Each schema in it has a rule; those that a reference leads to have one, however often it does. What such a rule cannot
say (a pattern, a length, properties that depend on others, ..) is refused by its keyword.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from splittime.text.argument_types import followed
from splittime.text.grammars import json_schema_rule
from splittime.text.lark import literal, up_to
from splittime.text.tool_families import ToolFamily
from splittime.text.tool_schemas import (
    COMBINED,
    OF_LISTED_TEXTS,
    OF_TEXTS,
    any_name,
    misshapen,
    properties_of,
    refuse,
    separated,
)

_ALTERNATIVES = ("anyOf", "oneOf")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_ARRAYS = ("uniqueItems", "contains", "prefixItems", "additionalItems", "unevaluatedItems")
_LIMITS = (*OF_LISTED_TEXTS, *OF_TEXTS, *_OF_NUMBERS, *_OF_ARRAYS, "minItems", "maxItems", "minProperties")
_BESIDE = (*_LIMITS, "enum", "const", "properties", "items", "required")  # of alternatives, or of a reference
_NO_NAME = re.compile(r'[\s,:{}\[\]<"]')


class QuotedRules:
    """The rules of one tool's arguments. index: of the tool. root: their schema."""

    def __init__(self, family: ToolFamily, index: int, root: Mapping[str, Any], token_ids: Mapping[str, int]) -> None:
        self._family, self._index, self._root, self._ids = family, index, root, token_ids
        self._names: dict[int, str] = {}  # of rules, by the schema
        self._parts: list[Mapping[str, Any]] = []  # schemas that are kept, as they are named by where they lie
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []  # rules that are not written yet

    def written(self, rule: str) -> Iterator[str]:
        """Yields the rule of this name, of the arguments, and those that it needs."""
        yield from self._any_value()
        yield from self._object(rule, self._root)
        while self._waiting:
            name, schema = self._waiting.pop()
            yield from self._value(name, schema)

    def _any_value(self) -> Iterator[str]:
        quote = self._literal(self._family.quote)
        word = json_schema_rule({"type": ["number", "boolean", "null"]})
        yield f"any_value: any_text | any_word | any_list | any_object\nany_word: %json {word}"
        yield f"any_text: {quote} rest_of_text"
        yield up_to("rest_of_text", self._family.quote, self._ids)
        yield 'any_list: "[" (any_value ("," any_value)*)? "]"'
        yield 'any_object: "{" (any_member ("," any_member)*)? "}"'
        yield f'{any_name()}\nany_member: ARGUMENT ":" any_value'

    def _literal(self, text: str) -> str:
        return literal(text, self._ids)

    def _refuse(self, schema: Mapping[str, Any], keywords: Iterable[str]) -> None:
        refuse(schema, tuple(keywords), self._family, self._index)

    def _rule_of(self, schema: Any) -> str:
        """Returns the name of the rule of values that have this schema."""
        *referring, found = followed(schema, self._root)
        for each in referring:
            self._refuse(each, _BESIDE)
        if not isinstance(found, Mapping):
            if found is not True:
                raise misshapen(self._index, "items", "a schema")
            return "any_value"
        if id(found) not in self._names:
            self._names[id(found)] = f"value_{self._index}_{len(self._names)}"
            self._waiting.append((self._names[id(found)], found))
        return self._names[id(found)]

    def _value(self, rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
        self._refuse(schema, ("$ref", "allOf", "not", "if"))
        alternatives = next((name for name in _ALTERNATIVES if name in schema), None)
        if alternatives is not None:
            yield f"{rule}: {' | '.join(self._any_of(schema, alternatives))}"
        elif "const" in schema or "enum" in schema:
            yield f"{rule}: {' | '.join(map(self._constant, self._constants(schema)))}"
        else:
            kinds = _kinds(schema)
            if not kinds:
                self._refuse(schema, _LIMITS)
            yield f"{rule}: {' | '.join(f'{rule}_{kind}' for kind in kinds) or 'any_value'}"
            for kind in kinds:
                yield from self._kind(f"{rule}_{kind}", kind, schema)

    def _any_of(self, schema: Mapping[str, Any], name: str) -> list[str]:
        """Returns the rules of alternatives. Those of which only one may hold are taken if they are constants."""
        self._refuse(schema, (each for each in (*_BESIDE, *COMBINED) if each != name))
        parts, types = schema[name], {"type": schema["type"]} if "type" in schema else {}
        if not isinstance(parts, list) or not parts or not all(isinstance(part, Mapping) for part in parts):
            raise misshapen(self._index, name, "a list of schemas")
        if name == "oneOf" and not all("const" in part or "enum" in part for part in parts):
            self._refuse(schema, (name,))
        self._parts += (typed := [{**types, **part} for part in parts])
        return [self._rule_of(each) for each in typed]

    def _constants(self, schema: Mapping[str, Any]) -> list[Any]:
        self._refuse(schema, _LIMITS)
        found = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(found, list) or not found:
            raise misshapen(self._index, "enum", "a list")
        return found

    def _constant(self, value: Any) -> str:
        return self._literal(self._spelled(value))

    def _spelled(self, value: Any) -> str:
        """Returns a value as the family writes it. Raises RequestError for a text with the quote in it."""
        if isinstance(value, str):
            if self._family.quote in value:
                raise misshapen(self._index, "enum", f"free of {self._family.quote}")
            return self._family.quote + value + self._family.quote
        if isinstance(value, list):
            return f"[{','.join(map(self._spelled, value))}]"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{name}:{self._spelled(each)}" for name, each in value.items()) + "}"
        return json.dumps(value)

    def _kind(self, rule: str, kind: str, schema: Mapping[str, Any]) -> Iterator[str]:
        match kind:
            case "string":
                self._refuse(schema, (*OF_LISTED_TEXTS, *OF_TEXTS))
                yield f"{rule}: any_text"
            case "array":
                yield self._list(rule, schema)
            case "object":
                yield from self._object(rule, schema)
            case _:
                limits = {name: schema[name] for name in _OF_NUMBERS if name in schema}
                yield f"{rule}: %json {json_schema_rule({'type': kind, **limits})}"

    def _list(self, rule: str, schema: Mapping[str, Any]) -> str:
        self._refuse(schema, _OF_ARRAYS)
        least, most = (schema.get(name) for name in ("minItems", "maxItems"))
        for name, each in (("minItems", least), ("maxItems", most)):
            if each is not None and (not isinstance(each, int) or each < 0):
                raise misshapen(self._index, name, "a count")
        if most == 0:
            return f'{rule}: "[" "]"'
        item = self._rule_of(schema.get("items", True))
        more = f'("," {item}){{{max(0, (least or 0) - 1)},{"" if most is None else most - 1}}}'
        return f'{rule}: "[" ({item} {more}){"" if least else "?"} "]"'

    def _object(self, rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
        given = properties_of(schema, self._index, self._family)
        if given is None:
            yield f"{rule}: any_object"
            return
        if any(_NO_NAME.search(name) for name, _, _ in given):
            raise misshapen(self._index, "properties", "of names without white space, quotes and brackets")
        yield f'{rule}: "{{" {rule}_0 "}}"'
        for at, (name, each, is_required) in enumerate(given):
            yield from separated(rule, at, is_required, ",")
            yield f"{rule}_{at}_one: {self._literal(name + ':')} {self._rule_of(each)}"
        yield f'{rule}_{len(given)}: ""\n{rule}_{len(given)}_more: ""'


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Returns the types that a schema allows; none for any."""
    given = schema.get("type")
    if given is None:
        is_object = any(name in schema for name in ("properties", "required", "additionalProperties"))
        return ["object"] if is_object else ["array"] if "items" in schema else []
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
