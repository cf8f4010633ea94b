"""The grammar of answers that call tools, by the table of families (`text.tool_families`).

Properties come in the order of the schema, those that are not required or not. Where a family writes texts as they are
(`Style.TAGGED`), a text may be anything up to the mark behind it, or one of an enum's; what cannot be held to there
(a pattern, a length, alternatives, properties that depend on others) is refused by its keyword.

The schemas of tools as grammars of families look at them: their arguments, and what calls cannot be held to.

The grammar of arguments that are an object of a family's own kind (`Style.QUOTED`), by their schema.

Each schema in it has a rule; those that a reference leads to have one, however often it does. What such a rule cannot
say (a pattern, a length, properties that depend on others, ..) is refused by its keyword.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from splittime.core.errors import RequestError
from splittime.text.call_arguments import followed, is_text, types_of
from splittime.text.grammars import (
    MAX_SCHEMA_CHARS,
    json_schema_rule,
    literal,
    named_beside,
    of_lark,
    require_depth,
    up_to,
    without,
)
from splittime.text.marks import trigger
from splittime.text.tool_families import Style, Tool, ToolFamily

COMBINED = ("anyOf", "oneOf", "allOf", "not", "if")
OF_LISTED_TEXTS = (*COMBINED, "pattern", "minLength", "maxLength")
OF_TEXTS = ("format",)  # that no list says
OF_OBJECTS = (
    *(*COMBINED, "enum", "const", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$ref"),
)


class CannotHold(RequestError):
    """A grammar cannot say what a keyword asks for."""


def separated(rule: str, at: int, is_required: bool, comma: str) -> Iterator[str]:
    """Yields rules for the arguments from this one on, where none came before it, and where one did, behind a comma."""
    one, then = f"{rule}_{at}_one", f"{rule}_{at + 1}"
    yield f"{rule}_{at}: {one} {then}_more" + ("" if is_required else f" | {then}")
    yield f"{rule}_{at}_more: {json.dumps(comma)} {one} {then}_more" + ("" if is_required else f" | {then}_more")


def any_name() -> str:
    """Returns the rule of names that no schema gives."""
    return "ARGUMENT: /[a-zA-Z0-9_.-]{1,64}/"


def properties_of(schema: Mapping[str, Any], index: int, family: ToolFamily) -> list[tuple[str, Any, bool]] | None:
    """Returns each argument's name and schema, and whether it must be; None where any may be given."""
    refuse(schema, OF_OBJECTS, family, index)
    others = schema.get("additionalProperties")
    if not (others is None or isinstance(others, bool) or others == {}):
        refuse(schema, ("additionalProperties",), family, index)
    properties, required = _shown(schema, index), _required(schema, index)
    if not properties and not required and others is not False:
        return None
    named = {**properties, **{name: {} for name in required if name not in properties}}
    return [(name, each, name in required) for name, each in named.items() if each is not False]


def _shown(schema: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Returns the schema of each argument. Raises RequestError where that is not what `properties` is."""
    found = schema.get("properties")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise misshapen(index, "properties", "an object of schemas")
    wrong = next((name for name, each in found.items() if not isinstance(each, Mapping | bool)), None)
    if wrong is not None:
        raise misshapen(index, f"properties.{wrong}", "a schema")
    return found


def _required(schema: Mapping[str, Any], index: int) -> Mapping[str, None]:
    """Returns the names of arguments that must be, in order. Raises RequestError where `required` is no such list."""
    found = schema.get("required")
    if found is None:
        return {}
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise misshapen(index, "required", "a list of names")
    return dict.fromkeys(found)


def misshapen(index: int, where: str, wanted: str) -> RequestError:
    return RequestError(f"{param_of(index)}.{where} is not {wanted}", param=f"{param_of(index)}.{where}")


def refuse(schema: Mapping[str, Any], keywords: Sequence[str], family: ToolFamily, index: int) -> None:
    found = next((keyword for keyword in keywords if keyword in schema), None)
    if found is not None:
        raise CannotHold(
            f"{param_of(index)}: calls in the form of {family.name} cannot be held to {found} there",
            param=param_of(index),
            value=found,
            hint="leave it out, or strict",
        )


def types_alone(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema that says of arguments their names, their types, and which must be."""
    types = {name: each.get("type") for name, each in _shown(schema, 0).items() if isinstance(each, Mapping)}
    properties = {name: {"type": each} if isinstance(each, str) else {} for name, each in types.items()}
    return {"type": "object", "properties": properties, "required": list(_required(schema, 0))}


def param_of(index: int) -> str:
    return f"tools[{index}].function.parameters"


FORM = "answer"  # the name of the grammar of an answer that calls no tool
NO_IDS: Mapping[str, int] = {}
_NOTES = frozenset({"type", "title", "description"})  # which hold an answer to nothing, beside a constant


def grammar_of_calls(
    family: ToolFamily,
    tools: Sequence[Tool],
    *,
    may_answer: bool,
    may_repeat: bool,
    token_ids: Mapping[str, int] = NO_IDS,
    form: str = "",
) -> str:
    """Returns the grammar of answers that call tools. may_answer: or that are a text, or (where the family marks
    calls) have one before them. may_repeat: more than one call. token_ids: of marks that are tokens. form: the grammar
    of an answer that calls none. Raises RequestError, which names the tool, for a schema that is too large or too deep,
    or that a tool which is strict cannot be held to."""
    rules: dict[str, None] = {}
    size = 0
    for rule in _Rules(family, tools, token_ids, has_form=bool(form)).written(may_answer, may_repeat):
        if rule and rule not in rules:
            rules[rule] = None
            size += len(rule)
            _require_size(size)
    calls = of_lark("\n".join(rules), "tools")
    return named_beside(calls, form, FORM) if form and may_answer else calls


def _require_size(size: int) -> None:
    """Raises RequestError before more rules are written."""
    if size > MAX_SCHEMA_CHARS:
        raise RequestError(
            f"tools have more than {MAX_SCHEMA_CHARS} characters",
            param="tools",
            limit=MAX_SCHEMA_CHARS,
            hint="give fewer tools, or smaller schemas of their arguments",
        )


def _require_checkable(schema: Mapping[str, Any], param: str) -> None:
    """Raises RequestError for a schema too large or too deep to be looked at for each argument."""
    require_depth(schema, param)
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > MAX_SCHEMA_CHARS:
        said = f"{param} has {size} characters, more than {MAX_SCHEMA_CHARS}"
        raise RequestError(said, param=param, value=size, limit=MAX_SCHEMA_CHARS)


class _Rules:
    def __init__(
        self, family: ToolFamily, tools: Sequence[Tool], token_ids: Mapping[str, int], *, has_form: bool
    ) -> None:
        self._family, self._tools, self._ids, self._has_form = family, tools, token_ids, has_form
        self._calls = {  # not bound, which would be a circle
            Style.MEMBER: _Rules._member,
            Style.NAMED: _Rules._named,
            Style.TAGGED: _Rules._tagged,
            Style.PYTHON: _Rules._python,
            Style.QUOTED: _Rules._quoted,
        }[family.style]

    def written(self, may_answer: bool, may_repeat: bool) -> Iterator[str]:
        family = self._family
        first = family.opens + family.begin
        yield f"start: {self._start(first, may_answer)}"
        yield from self._texts(first, may_answer)
        end, closes = self._literal(family.end), self._literal(family.closes)
        yield f"rest: call {end} {'next*' if may_repeat else ''} {closes}"
        if may_repeat:
            yield f"next: {self._literal(family.between + family.begin)} call {end}"
        yield f"call: {' | '.join(f'call_{index}' for index in range(len(self._tools)))}"
        for index, tool in enumerate(self._tools):
            _require_checkable(tool.parameters, param_of(index))
            yield from self._calls(self, index, tool) if tool.is_strict else self._as_far_as_can_be(index, tool)

    def _as_far_as_can_be(self, index: int, tool: Tool) -> list[str]:
        """Returns the rules of a tool that is not strict: what they cannot hold to is left to the model."""
        found, size = [], 0
        try:
            for rule in self._calls(self, index, tool):
                found.append(rule)
                size += len(rule)
                _require_size(size)
        except CannotHold:
            return list(self._calls(self, index, tool._replace(parameters=types_alone(tool.parameters))))
        return found

    def _literal(self, text: str) -> str:
        return literal(text, self._ids)

    def _start(self, first: str, may_answer: bool) -> str:
        opened = f"{self._literal(first)} rest"
        if not may_answer:
            return opened
        free = f"@{FORM}" if self._has_form else "FREE"
        if self._family.answer:
            return f"{self._literal(self._family.answer)} {free} | {opened}"
        return f"{free} | {opened}" if self._family.is_bare or self._has_form else "FREE | lead rest"

    def _texts(self, first: str, may_answer: bool) -> Iterator[str]:
        """Rules of texts that are no call, and of one up to a call's begin."""
        if not may_answer or self._has_form:
            return
        if self._family.answer:
            yield "FREE: /(?s:.*)/"
            return
        if self._family.is_bare:
            yield rf"FREE: /\s*([^\{(first or '{')[0]}\s](?s:.*))?/"
            return
        yield without("FREE", trigger(self._family.opens or self._family.begin))
        yield up_to("lead", first, self._ids)

    # ---- a call, by its style

    def _member(self, index: int, tool: Tool) -> Iterator[str]:
        head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self._family.arguments)}: '
        is_like_form = self._has_form and self._family.is_bare  # cut as the form is: a lexer takes nothing back
        parts = re.findall(r'"[^"]*"|.', head) if is_like_form else [head]
        yield f'call_{index}: {" ".join(map(json.dumps, parts))} args_{index} "}}"'
        yield f"args_{index}: %json {json_schema_rule(tool.parameters)}"

    def _named(self, index: int, tool: Tool) -> Iterator[str]:
        family = self._family
        number = '":" NUMBER ' if family.is_numbered else ""
        head = self._literal(family.before_name + tool.name)
        yield f"call_{index}: {head} {number}{self._literal(family.after_name)} args_{index}"
        yield "NUMBER: /[0-9]{1,3}/" if family.is_numbered else ""
        yield f"args_{index}: %json {json_schema_rule(tool.parameters)}"

    def _tagged(self, index: int, tool: Tool) -> Iterator[str]:
        family = self._family
        given = properties_of(tool.parameters, index, family)
        head = self._literal(family.before_name + tool.name + family.after_name)
        if given is None:
            yield f"call_{index}: {head} any_argument*"
            yield any_name()
            key = f"{self._literal(family.before_key)} ARGUMENT {self._literal(family.after_key)}"
            yield f"any_argument: {key} any_text"
            yield up_to("any_text", family.after_value, self._ids)
            return
        names = [f"arg_{index}_{at}" for at in range(len(given))]
        parts = [name if is_required else f"{name}?" for name, (_, _, is_required) in zip(names, given, strict=True)]
        yield f"call_{index}: {head} {' '.join(parts)}"
        for name, (key, schema, _) in zip(names, given, strict=True):
            is_json = family.after_json_key and not is_text(types_of(schema, tool.parameters))
            after_key = family.after_json_key if is_json else family.after_key
            before = self._literal(family.before_key + key + after_key)
            yield f"{name}: {before} {name}_value"
            yield self._tagged_value(f"{name}_value", schema, tool.parameters, index)

    def _tagged_value(self, rule: str, schema: Any, root: Mapping[str, Any], index: int) -> str:
        after = self._literal(self._family.after_value)
        if not is_text(types_of(schema, root)):
            return f"{rule}: {rule}_json {after}\n{rule}_json: %json {_rooted(schema, root)}"
        texts = self._texts_allowed(followed(schema, root), index)
        if texts is not None:
            return f"{rule}: ({' | '.join(json.dumps(text) for text in texts)}) {after}"
        return up_to(rule, self._family.after_value, self._ids)

    def _texts_allowed(self, chain: Sequence[Any], index: int) -> Sequence[str] | None:
        """Returns the texts that a chain of references allows; None for any. Raises RequestError for other rules."""
        *referring, found = chain
        found = _as_list(found)
        for each in referring:
            refuse(each, ("const", "enum", *OF_LISTED_TEXTS, *OF_TEXTS), self._family, index)
        refuse(found, OF_LISTED_TEXTS, self._family, index)
        texts = [found["const"]] if "const" in found else found.get("enum")
        if texts is None:
            refuse(found, OF_TEXTS, self._family, index)
        elif not isinstance(texts, list):
            raise misshapen(index, "enum", "a list")
        return texts

    def _quoted(self, index: int, tool: Tool) -> Iterator[str]:
        yield f"call_{index}: {self._literal(self._family.before_name + tool.name)} args_{index}"
        yield from QuotedRules(self._family, index, tool.parameters, self._ids).written(f"args_{index}")

    def _python(self, index: int, tool: Tool) -> Iterator[str]:
        given = properties_of(tool.parameters, index, self._family)
        if given is None:
            yield f'call_{index}: {json.dumps(tool.name + "(")} (any_argument (", " any_argument)*)? ")"'
            yield any_name()
            yield 'any_argument: ARGUMENT "=" any_value'
            yield f"any_value: %json {json_schema_rule({})}"
            return
        rule = f"args_{index}"
        yield f'call_{index}: {json.dumps(tool.name + "(")} {rule}_0 ")"'
        for at, (key, schema, is_required) in enumerate(given):
            yield from separated(rule, at, is_required, ", ")
            yield f"{rule}_{at}_one: {json.dumps(key + '=')} {rule}_{at}_value"
            yield from _python_value(f"{rule}_{at}_value", schema, tool.parameters)
        yield f'{rule}_{len(given)}: ""'
        yield f'{rule}_{len(given)}_more: ""'


def _as_list(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema whose alternatives are constants, and nothing else, with them as its list."""
    name = next((name for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), "")
    parts = list(map(_constants, schema.get(name) or ()))
    if not parts or not all(parts) or "enum" in schema or "const" in schema:
        return schema
    listed = [each for part in parts for each in part if isinstance(each, str)]
    return {key: each for key, each in schema.items() if key != name} | {"enum": listed}


def _constants(schema: Any) -> list[Any]:
    """Returns the values of a schema that says nothing else; none for another."""
    if not isinstance(schema, Mapping) or schema.keys() - _NOTES not in ({"const"}, {"enum"}):
        return []
    found = schema.get("enum", [schema.get("const")])
    return found if isinstance(found, list) else []


def _python_value(rule: str, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    if types_of(schema, root) == {"boolean"} and not any(
        keyword in each for each in followed(schema, root) for keyword in ("enum", "const", *COMBINED)
    ):
        yield f'{rule}: "True" | "False"'
        return
    yield f"{rule}: %json {_rooted(schema, root)}"


def _rooted(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the rule of one property, with the definitions that it may refer to."""
    defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return json_schema_rule({**schema, **defined} if isinstance(schema, Mapping) else {})


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
