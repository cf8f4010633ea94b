"""The grammar of answers that call tools, by the table of families (`text.tool_families`).

Properties come in the order of the schema, those that are not required or not. Where a family writes texts as they are
(`Style.TAGGED`), a text may be anything up to the mark behind it, or one of an enum's; what cannot be held to there
(a pattern, a length, alternatives, properties that depend on others) is refused by its keyword.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splittime.core.errors import RequestError
from splittime.text.argument_types import followed, is_text, types_of
from splittime.text.grammars import MAX_SCHEMA_CHARS, json_schema_rule, named_beside, of_lark, require_depth
from splittime.text.lark import literal, up_to, without
from splittime.text.marks import trigger
from splittime.text.quoted_grammar import QuotedRules
from splittime.text.tool_families import Style, Tool, ToolFamily
from splittime.text.tool_schemas import (
    COMBINED,
    OF_LISTED_TEXTS,
    OF_TEXTS,
    CannotHold,
    any_name,
    misshapen,
    param_of,
    properties_of,
    refuse,
    separated,
    types_alone,
)

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
