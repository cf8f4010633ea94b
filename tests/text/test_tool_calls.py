"""Calls of tools: what the grammar of a family allows, its parser reads back, wherever the text is cut into pieces."""

import json
from pathlib import Path

import llguidance
import pytest

import splittime
from splittime.core.errors import ConfigError, RequestError
from splittime.text.tool_families import FAMILIES, Tool, family_named, family_of_template, grammar_of_calls
from splittime.text.tool_parser import ToolParser

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}, "required": ["city"]}
CITY |= {"$defs": {"name": {"type": "string"}}, "additionalProperties": False}
TOOLS = [Tool("weather", CITY, False), Tool("now", {"type": "object"}, False)]
NAMES = {"weather", "now"}
ARGUMENTS = '{"city": "a } \\" <tool_call> [é"}'
QWEN = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>,
"arguments": <args-json-object>}{% endif %}"""
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'


def written(family: str, *calls: tuple[str, str]) -> str:
    form = FAMILIES[family]
    one = [f'{form.begin}{{"name": "{name}", "{form.arguments}": {arguments}}}{form.end}' for name, arguments in calls]
    return form.between.join(one)


def parsed(family: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(FAMILIES[family], NAMES)
    content, calls = "", []
    for piece, is_end in [*((piece, False) for piece in pieces), ("", True)]:
        found = parser.push(piece, is_end=is_end)
        content += found.content
        for delta in found.calls:
            if delta.name is not None:
                assert delta.number == len(calls)
                calls.append((delta.name, ""))
            name, before = calls[delta.number]
            calls[delta.number] = (name, before + delta.arguments)
    return content, calls


@pytest.fixture(scope="module")
def tokens() -> llguidance.LLTokenizer:
    folder = Path(splittime.__file__).parent / "packaged" / "code"
    return llguidance.LLTokenizer((folder / "tokenizer.json").read_text())


def allows(tokens: llguidance.LLTokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


TWO = (("weather", ARGUMENTS), ("now", "{}"))
CASES = [
    (family, text, content, calls)
    for family in FAMILIES
    for text, content, calls in [
        ("a plain <b> text, {} and <tool", "a plain <b> text, {} and <tool", []),
        (written(family, TWO[0]), "", [TWO[0]]),
        (written(family, *TWO), "", list(TWO)),
        (written(family, *TWO)[:-1], "", list(TWO)),
    ]
]
CASES += [
    ("hermes", "first\n" + written("hermes", *TWO) + "\n then ", "first\n\n then", list(TWO)),
    ("hermes", written("hermes", ("other", "{}")) + "x", '\n{"name": "other", "arguments": {}}\nx', []),
    ("hermes", "<tool_call>\nnothing of it", "\nnothing of it", []),
    ("hermes", '<tool_call>\n{"name": "wea', "", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    ("llama3_json", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "x', "", [("weather", '{"city": "x')]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_an_answer_is_read_the_same_wherever_it_is_cut(family: str, text: str, content: str, calls: list) -> None:
    assert parsed(family, text) == (content, calls)
    for at in range(len(text)):
        assert parsed(family, text[:at], text[at:]) == (content, calls), at
    assert parsed(family, *text) == (content, calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_allows_what_the_parser_reads_and_no_other_call(tokens, family: str) -> None:
    form = FAMILIES[family]
    forced = grammar_of_calls(form, TOOLS, may_answer=False, may_repeat=True)
    assert allows(tokens, forced, written(family, *TWO))
    for wrong in ("text", "", written(family, ("other", "{}")), written(family, ("weather", "{}"))):
        assert not allows(tokens, forced, wrong), wrong
    once = grammar_of_calls(form, TOOLS, may_answer=False, may_repeat=False)
    assert allows(tokens, once, written(family, TWO[0]))
    assert not allows(tokens, once, written(family, *TWO))
    free = grammar_of_calls(form, TOOLS, may_answer=True, may_repeat=True)
    assert allows(tokens, free, "a text")
    assert allows(tokens, free, written(family, *TWO))
    assert not allows(tokens, free, written(family, ("weather", "{}")))
    assert allows(tokens, free, "before " + written(family, TWO[1])) == bool(form.begin) or not form.begin


def test_families_are_found_by_template_and_by_name() -> None:
    assert family_of_template(QWEN).name == "hermes"
    assert family_of_template(LLAMA).name == "llama3_json"
    assert family_of_template("").name == "hermes"
    assert family_named("llama3_json").arguments == "parameters"
    with pytest.raises(ConfigError, match="pythonic") as refused:
        family_named("pythonic")
    assert "hermes, llama3_json" in str(refused.value.info.hint)


def test_a_schema_too_deep_is_refused_by_the_tools_place() -> None:
    deep: dict = {"type": "string"}
    for _ in range(80):
        deep = {"items": deep}
    with pytest.raises(RequestError) as refused:
        grammar_of_calls(FAMILIES["hermes"], [Tool("f", deep, False)], may_answer=False, may_repeat=True)
    assert refused.value.info.param == "tools[0].function.parameters"
    assert json.dumps(deep)
