"""How families of models write calls of tools: a table, of which the grammar that holds an answer to calls and the
parser that reads them (`text.tool_parser`) are both made.

A call is JSON with the tool's name and then its arguments, in the family's words, between the family's marks. A model
whose template says none of the known forms is taken for one that writes JSON in tags (`hermes`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from splittime.core.errors import ConfigError, RequestError
from splittime.text.grammars import MAX_SCHEMA_CHARS, json_schema_rule, of_lark, require_depth

MAX_TOOLS = 128


class ToolFamily(NamedTuple):
    """begin, end: what stands around a call; with an empty `begin` a call begins the answer, without a
    text before it. between: two calls. arguments: the name that arguments have."""

    name: str
    begin: str
    end: str
    between: str
    arguments: str


class Tool(NamedTuple):
    """parameters: the schema of its arguments. is_strict: they are to be held to it even if the model chose to call."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


FAMILIES = {
    family.name: family
    for family in (
        ToolFamily("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments"),
        ToolFamily("llama3_json", "", "", "; ", "parameters"),
    )
}
_LLAMA_JSON = re.compile(r"""\{["']name["']:.{0,40}["']parameters["']""", re.DOTALL)


def family_named(name: str) -> ToolFamily:
    """Returns the family of this name (vLLM's names). Raises ConfigError with the list for another."""
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"no tool-call parser {name!r}", param="tool_call_parser", value=name, hint=f"there are: {known}"
        )
    return FAMILIES[name]


def family_of_template(template: str) -> ToolFamily:
    """Returns the family whose form the chat template describes; JSON in tags where it describes none."""
    is_llama = "<tool_call>" not in template and _LLAMA_JSON.search(template) is not None
    return FAMILIES["llama3_json" if is_llama else "hermes"]


def grammar_of_calls(family: ToolFamily, tools: Sequence[Tool], *, may_answer: bool, may_repeat: bool) -> str:
    """Returns the grammar of answers that call tools. may_answer: or that are a text, or (where the family marks
    calls) have one before them. may_repeat: more than one call. Raises RequestError, which names the tool, for a schema
    that is too large or too deep."""
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules = [f"start: {_start(family, may_answer=may_answer)}", *_texts(family, may_answer=may_answer)]
    rules.append(f"rest: call{_literal(family.end)}" + (" next*" if may_repeat else ""))
    rules.append(f"next: {json.dumps(family.between + family.begin)} call{_literal(family.end)}")
    rules.append(f"call: {calls}")
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function.parameters"
        require_depth(tool.parameters, param)
        head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(family.arguments)}: '
        rules.append(f'call_{index}: {json.dumps(head)} args_{index} "}}"')
        rules.append(f"args_{index}: %json {json_schema_rule(tool.parameters)}")
    if not may_repeat:
        rules = [rule for rule in rules if not rule.startswith("next:")]
    written = "\n".join(rules)
    if len(written) > MAX_SCHEMA_CHARS:
        raise RequestError(
            f"tools have {len(written)} characters, more than {MAX_SCHEMA_CHARS}",
            param="tools",
            value=len(written),
            limit=MAX_SCHEMA_CHARS,
        )
    return of_lark(written, "tools")


def _start(family: ToolFamily, *, may_answer: bool) -> str:
    if may_answer:
        return "FREE | lead rest" if family.begin else "FREE | rest"
    return f"{json.dumps(family.begin)} rest" if family.begin else "rest"


def _texts(family: ToolFamily, *, may_answer: bool) -> list[str]:
    """Returns the rules of texts that are no call, and of one up to a call's begin."""
    if not may_answer:
        return []
    if not family.begin:
        return [r"FREE: /\s*([^{\s](?s:.*))?/"]
    mark = family.begin.strip()
    return [rf"FREE: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/", rf"lead[lazy]: /(?s:.*){json.dumps(family.begin)[1:-1]}/"]


def _literal(text: str) -> str:
    return f" {json.dumps(text)}" if text else ""
