"""What a schema says of an argument's type, and which values an answer can hold."""

from typing import Any

import msgspec
import pytest

from splittime.text import call_arguments
from splittime.text.call_arguments import (
    MOST_PARTS,
    MOST_REFERENCE_CHARS,
    followed,
    python_value_of,
    types_of,
    value_of,
)
from splittime.text.tool_families import FAMILIES
from splittime.text.tool_parser import ToolParser

TEXT = frozenset({"string"})


def referring(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "defined", "types"),
    [
        (
            {"anyOf": [{"type": "string"}, {"oneOf": [{"const": None}, {"enum": [1, 2.5]}]}]},
            {},
            "string null integer number",
        ),
        ({"anyOf": [{"type": "string"}, {}]}, {}, None),
        ({"type": ["integer", "null", ["x"]]}, {}, "integer null"),
        (referring("a"), {"a": referring("b"), "b": {"type": "boolean"}}, "boolean"),
        (referring("a"), {"a": referring("a")}, None),
        (referring("a"), {"a": {"anyOf": [referring("a"), {"type": "string"}]}}, "string"),
        ({**referring("nowhere"), "type": "array"}, {}, "array"),
    ],
)
def test_the_types_that_a_schema_allows(schema: dict, defined: dict, types: str | None) -> None:
    assert types_of(schema, {"$defs": defined}) == (None if types is None else frozenset(types.split()))


def looked_at(monkeypatch: pytest.MonkeyPatch, schema: Any, root: dict[str, Any]) -> tuple[Any, int]:
    """The types, and how many parts of the schema were looked at for them."""
    plain, parts = call_arguments._of_part, []

    def counted(part: Any, root: Any) -> Any:
        parts.append(part)
        if len(parts) > 2 * MOST_PARTS:
            raise AssertionError("parts are looked at again and again")
        return plain(part, root)

    with monkeypatch.context() as patched:
        patched.setattr(call_arguments, "_of_part", counted)
        return types_of(schema, root), len(parts)


def test_each_part_of_a_schema_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"a": {"anyOf": [referring("b") for _ in range(4)]}, "b": {"anyOf": [referring("a") for _ in range(4)]}}
    assert looked_at(monkeypatch, referring("a"), {"$defs": many}) == (None, 11)
    levels = {f"l{at}": {"anyOf": [referring(f"l{at + 1}")] * 2} for at in range(40)} | {"l40": {"type": "string"}}
    assert looked_at(monkeypatch, referring("l0"), {"$defs": levels}) == (TEXT, 82)


def test_a_schema_of_too_many_parts_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"anyOf": [{"type": "string"} for _ in range(MOST_PARTS - 1)]}
    assert looked_at(monkeypatch, most, {}) == (TEXT, MOST_PARTS)
    more = {"anyOf": [{"type": "string"} for _ in range(3 * MOST_PARTS)]}
    assert looked_at(monkeypatch, more, {})[0] is None


def test_a_long_reference_leads_nowhere() -> None:
    deep = "#" + "/a" * (MOST_REFERENCE_CHARS // 2)
    root: dict[str, Any] = {"type": "string"}
    for _ in range(MOST_REFERENCE_CHARS // 2):
        root = {"a": root}
    assert types_of({"$ref": deep}, root) is None  # a character more than is read
    assert types_of({"$ref": deep[:-2]}, {"a": root["a"]["a"]}) == TEXT


def test_references_that_go_round_are_followed_so_far() -> None:
    round_ = {"$defs": {"a": referring("b"), "b": referring("a")}}
    assert len(followed(referring("a"), round_)) == MOST_PARTS + 1


@pytest.mark.parametrize(
    "written", ['"\\ud83d"', '["a", {"\\ud83d": 1}]', "NaN", "[1, -Infinity]", '{"a": 1e999}', "1e999"]
)
def test_a_value_that_no_answer_can_hold_is_the_text_that_was_written(written: str) -> None:
    assert value_of(written, None) == written
    assert value_of(written, frozenset({"number", "array", "object"})) == written
    assert python_value_of(written) == written


@pytest.mark.parametrize("written", ["'\\ud83d'", "('a', 1e999)", "{'a': b'x'}", "{1, 2}", "{(1, 2): 3}", "2j"])
def test_a_literal_that_is_no_json_is_the_text_that_was_written(written: str) -> None:
    assert python_value_of(written) == written


def test_values_that_an_answer_can_hold_are_read() -> None:
    assert value_of('["\\ud83d\\ude00", 1e9]', None) == ["😀", 1e9]
    assert python_value_of("('\\u00e9', {'a': None})") == ("é", {"a": None})


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("pythonic", "[f(a=", ")]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    ],
)
@pytest.mark.parametrize("written", ['"\\ud83d"', "NaN", "-1e999"])
def test_arguments_of_calls_are_always_text_that_json_can_hold(
    family: str, before: str, after: str, written: str
) -> None:
    parser = ToolParser(FAMILIES[family], {"f": {"type": "object"}})
    (call,) = parser.push(before + written + after, is_end=True).calls
    sent = msgspec.json.encode(call.arguments).decode()
    assert msgspec.json.decode(msgspec.json.decode(sent)) == {"a": written}
