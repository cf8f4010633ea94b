"""The grammar of answers that call tools, by the table of families (`text.tool_families`).

Properties come in the order of the schema, those that are not required or not. Where a family writes texts as they are
(`Style.TAGGED`), a text may be anything up to the mark behind it, or one of an enum's; what cannot be held to there
(a pattern, a length, alternatives, properties that depend on others) is refused by its keyword.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splittime.core.errors import RequestError
from splittime.text.argument_types import followed, is_text, types_of
from splittime.text.grammars import MAX_SCHEMA_CHARS, json_schema_rule, of_lark, require_depth
from splittime.text.lark import literal, up_to, without
from splittime.text.marks import trigger
from splittime.text.tool_families import Style, Tool, ToolFamily

NO_IDS: Mapping[str, int] = {}
_NAME = "ARGUMENT: /[a-zA-Z0-9_.-]{1,64}/"
_COMBINED = ("anyOf", "oneOf", "allOf", "not", "if")
_OF_LISTED_TEXTS = (*_COMBINED, "pattern", "minLength", "maxLength")
_OF_TEXTS = ("format",)  # that no list says
_OF_OBJECTS = (
    *(*_COMBINED, "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "$ref"),
)


def grammar_of_calls(
    family: ToolFamily,
    tools: Sequence[Tool],
    *,
    may_answer: bool,
    may_repeat: bool,
    token_ids: Mapping[str, int] = NO_IDS,
) -> str:
    """Returns the grammar of answers that call tools. may_answer: or that are a text, or (where the family marks
    calls) have one before them. may_repeat: more than one call. token_ids: of marks that are tokens. Raises
    RequestError, which names the tool, for a schema that is too large or too deep or cannot be held to."""
    rules: dict[str, None] = {}
    size = 0
    for rule in _Rules(family, tools, token_ids).written(may_answer, may_repeat):
        if rule and rule not in rules:
            rules[rule] = None
            size += len(rule)
            _require_size(size)
    return of_lark("\n".join(rules), "tools")


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
    def __init__(self, family: ToolFamily, tools: Sequence[Tool], token_ids: Mapping[str, int]) -> None:
        self._family, self._tools, self._ids = family, tools, token_ids
        self._calls = {
            Style.MEMBER: self._member,
            Style.NAMED: self._named,
            Style.TAGGED: self._tagged,
            Style.PYTHON: self._python,
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
            _require_checkable(tool.parameters, _param(index))
            yield from self._calls(index, tool)

    def _literal(self, text: str) -> str:
        return literal(text, self._ids)

    def _start(self, first: str, may_answer: bool) -> str:
        opened = f"{self._literal(first)} rest"
        if not may_answer:
            return opened
        return f"FREE | {opened}" if self._family.is_bare else "FREE | lead rest"

    def _texts(self, first: str, may_answer: bool) -> Iterator[str]:
        """Rules of texts that are no call, and of one up to a call's begin."""
        if not may_answer:
            return
        if self._family.is_bare:
            yield rf"FREE: /\s*([^\{(first or '{')[0]}\s](?s:.*))?/"
            return
        yield without("FREE", trigger(self._family.opens or self._family.begin))
        yield up_to("lead", first, self._ids)

    # ---- a call, by its style

    def _member(self, index: int, tool: Tool) -> Iterator[str]:
        head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self._family.arguments)}: '
        yield f'call_{index}: {json.dumps(head)} args_{index} "}}"'
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
        given = _properties(tool, index, family)
        head = self._literal(family.before_name + tool.name + family.after_name)
        if given is None:
            yield f"call_{index}: {head} any_argument*"
            yield _NAME
            key = f"{self._literal(family.before_key)} ARGUMENT {self._literal(family.after_key)}"
            yield f"any_argument: {key} any_text"
            yield up_to("any_text", family.after_value, self._ids)
            return
        names = [f"arg_{index}_{at}" for at in range(len(given))]
        parts = [name if is_required else f"{name}?" for name, (_, _, is_required) in zip(names, given, strict=True)]
        yield f"call_{index}: {head} {' '.join(parts)}"
        for name, (key, schema, _) in zip(names, given, strict=True):
            before = self._literal(family.before_key + key + family.after_key)
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
        for each in referring:
            _refuse(each, ("const", "enum", *_OF_LISTED_TEXTS, *_OF_TEXTS), self._family, index)
        _refuse(found, _OF_LISTED_TEXTS, self._family, index)
        texts = [found["const"]] if "const" in found else found.get("enum")
        if texts is None:
            _refuse(found, _OF_TEXTS, self._family, index)
        elif not isinstance(texts, list):
            raise _misshapen(index, "enum", "a list")
        return texts

    def _python(self, index: int, tool: Tool) -> Iterator[str]:
        given = _properties(tool, index, self._family)
        if given is None:
            yield f'call_{index}: {json.dumps(tool.name + "(")} (any_argument (", " any_argument)*)? ")"'
            yield _NAME
            yield 'any_argument: ARGUMENT "=" any_value'
            yield f"any_value: %json {json_schema_rule({})}"
            return
        rule = f"args_{index}"
        yield f'call_{index}: {json.dumps(tool.name + "(")} {rule}_0 ")"'
        for at, (key, schema, is_required) in enumerate(given):
            yield from _separated(rule, at, is_required)
            yield f"{rule}_{at}_one: {json.dumps(key + '=')} {rule}_{at}_value"
            yield from _python_value(f"{rule}_{at}_value", schema, tool.parameters)
        yield f'{rule}_{len(given)}: ""'
        yield f'{rule}_{len(given)}_more: ""'


def _separated(rule: str, at: int, is_required: bool) -> Iterator[str]:
    """Rules for the arguments from this one on, where none came before it, and where one did."""
    one, then = f"{rule}_{at}_one", f"{rule}_{at + 1}"
    yield f"{rule}_{at}: {one} {then}_more" + ("" if is_required else f" | {then}")
    yield f'{rule}_{at}_more: ", " {one} {then}_more' + ("" if is_required else f" | {then}_more")


def _python_value(rule: str, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    if types_of(schema, root) == {"boolean"} and not any(
        keyword in each for each in followed(schema, root) for keyword in ("enum", "const", *_COMBINED)
    ):
        yield f'{rule}: "True" | "False"'
        return
    yield f"{rule}: %json {_rooted(schema, root)}"


def _rooted(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the rule of one property, with the definitions that it may refer to."""
    defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return json_schema_rule({**schema, **defined} if isinstance(schema, Mapping) else {})


def _properties(tool: Tool, index: int, family: ToolFamily) -> list[tuple[str, Any, bool]] | None:
    """Returns each argument's name and schema, and whether it must be; None where any may be given."""
    schema = tool.parameters
    _refuse(schema, _OF_OBJECTS, family, index)
    others = schema.get("additionalProperties")
    if not (others is None or isinstance(others, bool) or others == {}):
        _refuse(schema, ("additionalProperties",), family, index)
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
        raise _misshapen(index, "properties", "an object of schemas")
    wrong = next((name for name, each in found.items() if not isinstance(each, Mapping | bool)), None)
    if wrong is not None:
        raise _misshapen(index, f"properties.{wrong}", "a schema")
    return found


def _required(schema: Mapping[str, Any], index: int) -> Mapping[str, None]:
    """Returns the names of arguments that must be, in order. Raises RequestError where `required` is no such list."""
    found = schema.get("required")
    if found is None:
        return {}
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _misshapen(index, "required", "a list of names")
    return dict.fromkeys(found)


def _misshapen(index: int, where: str, wanted: str) -> RequestError:
    return RequestError(f"{_param(index)}.{where} is not {wanted}", param=f"{_param(index)}.{where}")


def _refuse(schema: Mapping[str, Any], keywords: Sequence[str], family: ToolFamily, index: int) -> None:
    found = next((keyword for keyword in keywords if keyword in schema), None)
    if found is not None:
        raise RequestError(
            f"{_param(index)}: calls in the form of {family.name} cannot be held to {found} there",
            param=_param(index),
            value=found,
            hint="leave it out, or let the model choose (tool_choice auto, without strict)",
        )


def _param(index: int) -> str:
    return f"tools[{index}].function.parameters"
