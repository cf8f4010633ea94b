"""Texts of which nothing can be decided for long: the work is in proportion to them, however they come."""

import pytest

from splittime.text import marks
from splittime.text.marks import GROWTH, SHORT_CHARS, HarmonyParser, Undecided
from splittime.text.reasoning import REASONING, ReasoningParser, ReasoningPlace
from splittime.text.tool_families import FAMILIES, ToolFamily
from splittime.text.tool_parser import ToolParser

FILLS = ("\n", " ", "a", "<", "9", "[", '"', ", ", "<parameter=a>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "c": {"type": "array", "items": {}}}}
TOOLS = {"f": SCHEMA, "g": {"type": "object"}}
NUM_CHARS, PIECE = 3000, 5


def heads(family: ToolFamily) -> list[str]:
    marked = family.opens + family.begin
    begun = ["f(c=[", "<function=f>\n<parameter=c>\n", "f\n<arg_key>c</arg_key>\n<arg_value>", "call:f{c:"]
    return ["", marked, *(marked + head for head in (*begun, '{"name": "f", "arguments": {"c": '))]


def pushed(parser: ToolParser | HarmonyParser | ReasoningParser, text: str, size: int = PIECE) -> list[object]:
    told = [parser.push(text[begin : begin + size]) for begin in range(0, len(text), size)]
    return [*told, parser.push("", is_end=True)]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the texts that were looked at."""
    sizes, grown = [], Undecided.grown

    def counted(self: Undecided, text: str, piece: str, *, is_end: bool) -> str | None:
        whole = grown(self, text, piece, is_end=is_end)
        sizes.append(0 if whole is None else len(whole))
        return whole

    monkeypatch.setattr(marks.Undecided, "grown", counted)
    return sizes


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_an_answer_with_calls_is_looked_at_in_proportion_to_its_length(name: str, looked_at: list[int]) -> None:
    family, most = FAMILIES[name], 0
    for head in heads(family):
        for fill in FILLS:
            looked_at.clear()
            text = head + fill * (NUM_CHARS // len(fill))
            pushed(ToolParser(family, TOOLS), text)
            most = max(most, sum(looked_at))
    assert most < _bound(NUM_CHARS + 100)


@pytest.mark.parametrize("place", list(ReasoningPlace))
@pytest.mark.parametrize("fill", FILLS)
def test_reasoning_is_looked_at_in_proportion_to_its_length(
    place: ReasoningPlace, fill: str, looked_at: list[int]
) -> None:
    for kind in (*REASONING.values(), None):
        looked_at.clear()
        parser = HarmonyParser(place, TOOLS) if kind is None else ReasoningParser(kind, place)
        pushed(parser, fill * (NUM_CHARS // len(fill)))
        assert sum(looked_at) < _bound(NUM_CHARS)


def _bound(num_chars: int) -> int:
    """While it is short each piece looks at all; then each look has a GROWTH-th more than the last."""
    return SHORT_CHARS**2 // PIECE + (2 * GROWTH + 2) * num_chars


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pieces_tell_the_same_as_the_whole(name: str) -> None:
    family = FAMILIES[name]
    for head in heads(family):
        for fill in FILLS:
            text = head + fill * (1500 // len(fill)) + "behind"
            assert _joined(ToolParser(family, TOOLS), text, PIECE) == _joined(ToolParser(family, TOOLS), text, 1 << 20)


def _joined(parser: ToolParser, text: str, size: int) -> tuple[str, ...]:
    told = pushed(parser, text, size)
    calls = [call for one in told for call in one.calls]
    names, arguments = "".join(call.name or "" for call in calls), "".join(call.arguments for call in calls)
    return "".join(one.content for one in told), names, arguments


def test_white_space_behind_a_call_is_kept_in_pieces_and_comes_before_more_of_the_content() -> None:
    family = FAMILIES["hermes"]
    parser = ToolParser(family, TOOLS)
    told = pushed(parser, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>' + "\n" * 5000)
    assert "".join(one.content for one in told) == ""
    assert len(parser._blank) >= 1000
    again = ToolParser(family, TOOLS)
    told = pushed(again, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>' + "\n" * 5000 + "end")
    assert "".join(one.content for one in told) == "\n" * 5000 + "end"


def test_short_texts_are_looked_at_with_each_piece_and_long_ones_as_they_grow() -> None:
    undecided, text = Undecided(), "x" * SHORT_CHARS
    assert undecided.grown(text, "ab", is_end=False) == text + "ab"
    text += "yy"
    assert undecided.grown(text, "a" * 5, is_end=False) is None
    assert undecided.grown(text, "b" * 5, is_end=True) == text + "aaaaabbbbb"
    assert undecided.grown(text, "a" * (len(text) // GROWTH + 1), is_end=False) is not None
