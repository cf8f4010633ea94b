"""Answers that end, or go on and on, where a call could still come."""

import re

import pytest

from splittime.text import call_readers
from splittime.text.call_readers import MOST_HEAD_CHARS
from splittime.text.tool_families import FAMILIES
from splittime.text.tool_parser import ToolParser

SCHEMAS = {"f": {"type": "object"}}


def read(family: str, *pieces: str) -> tuple[str, str]:
    """The content, and the name of the only call with its arguments."""
    parser, content, call = ToolParser(FAMILIES[family], SCHEMAS), "", ""
    for piece, is_end in [*((piece, False) for piece in pieces), ("", True)]:
        found = parser.push(piece, is_end=is_end)
        content += found.content
        call += "".join((delta.name or "") + delta.arguments for delta in found.calls)
    return content, call


class Measured:
    """A pattern that notes the longest text it was asked about."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern, self.longest = pattern, 0

    def match(self, text: str) -> re.Match[str] | None:
        self.longest = max(self.longest, len(text))
        return self._pattern.match(text)


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    made = [Measured(call_readers._KEYWORD), Measured(call_readers._POSITIONAL)]
    monkeypatch.setattr(call_readers, "_KEYWORD", made[0])
    monkeypatch.setattr(call_readers, "_POSITIONAL", made[1])
    return made


@pytest.mark.parametrize("run", ["x", "x y", " ", ", ", "\r", "=", "x\r"])
def test_a_name_of_an_argument_is_looked_for_in_a_bounded_text(patterns: list[Measured], run: str) -> None:
    text = f"[f({run * (2 * MOST_HEAD_CHARS)}, a=1)]"
    assert read("pythonic", text) == read("pythonic", *text) == ("", 'f{"a": 1}')
    assert 0 < max(each.longest for each in patterns) <= MOST_HEAD_CHARS


@pytest.mark.parametrize(
    ("length", "call"),
    [
        (MOST_HEAD_CHARS - 1, f'f{{"{"x" * (MOST_HEAD_CHARS - 1)}": 2, "a": 1}}'),
        (MOST_HEAD_CHARS, 'f{"a": 1}'),
    ],
)
def test_what_is_too_long_for_a_name_is_a_value_without_one(length: int, call: str) -> None:
    text = f"[f({'x' * length}=2, a=1)]"
    assert read("pythonic", text) == read("pythonic", *text) == ("", call)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *(("pythonic", text) for text in ("[Paris", "[", "[f", "[ Paris, ,", "[, ", "[Par is")),
        *(("llama3_json", text) for text in ('{"na', "{", '{"name": "f', '{"name": "f", "parameters":')),
    ],
)
def test_the_answer_of_a_bare_family_that_ends_before_a_name_is_a_text(family: str, text: str) -> None:
    assert read(family, text) == read(family, *text) == (text, "")


@pytest.mark.parametrize(
    ("family", "text", "call"),
    [
        ("pythonic", "[f(", "f"),
        ("pythonic", "[f(a=1), g", 'f{"a": 1}'),
        ("llama3_json", '{"name": "f", "parameters": {', "f{"),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"na', "f{}"),
        ("hermes", '<tool_call>\n{"na', ""),
        ("lfm2", "<|tool_call_start|>[Paris", ""),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x}<esc", 'f{"a": "x}<esc'),
        ("functiongemma", "<start_function_call>call:f{a:12", 'f{"a": '),
        ("gemma4", '<|tool_call>call:f{a:[<|"|>x<|"|>,{b:', 'f{"a": ["x", {"b": '),
        ("gemma4", "<|tool_call>call:f", ""),
        ("gemma4", "<|tool_call>call:f{a:1<tool_call|>", 'f{"a": 1'),
        ("gemma4", "<|tool_call>call:f{a:1]}<tool_call|>", 'f{"a": 1'),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", 'f{"a": '),
        ("gemma4", "<|tool_call>call:f{{}}<tool_call|>", "f{"),
        ("deepseek_v32", '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="f">\n<\uff5cDS', "f"),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "f{"),
    ],
)
def test_behind_a_call_or_a_mark_what_is_cut_off_stays_cut_off(family: str, text: str, call: str) -> None:
    assert read(family, text) == read(family, *text) == ("", call)
