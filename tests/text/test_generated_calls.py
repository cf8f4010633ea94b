"""Calls that a model writes under a family's grammar are read back, and have their tool's schema."""

import json

import pytest

from splittime import LLM, SamplingParams
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls
from splittime.text.tool_parser import ToolParser

jsonschema_rs = pytest.importorskip("jsonschema_rs")

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -9, "maximum": 9},
        "is_on": {"type": "boolean"},
        "colour": {"enum": ["red", "dark green"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2.5, None]}, "maxItems": 2},
        "name": {"anyOf": [{"enum": ["a", "12"]}, {"type": "null"}]},
    },
    "required": ["is_on", "sizes"],
    "additionalProperties": False,
}
TOOLS = [Tool("paint", SCHEMA, False), Tool("stop-it", {"type": "object", "additionalProperties": False}, False)]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=8)


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_calls_are_read_back_with_valid_arguments(llm: LLM, family: str) -> None:
    form = FAMILIES[family]
    grammar = grammar_of_calls(form, TOOLS, may_answer=False, may_repeat=False)
    asked = [SamplingParams(max_tokens=150, grammar=grammar, seed=seed) for seed in range(4)]
    answers = llm.generate(["def paint("] * len(asked), asked)
    whole = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert whole
    for text in whole:
        parser, calls = ToolParser(form, SCHEMAS), {}
        for piece in [*text, ""]:
            found = parser.push(piece, is_end=not piece)
            assert not found.content
            for delta in found.calls:
                name, arguments = calls.get(delta.number, (delta.name, ""))
                calls[delta.number] = (name, arguments + delta.arguments)
        assert calls, text
        for name, arguments in calls.values():
            assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), text
