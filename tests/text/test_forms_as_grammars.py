"""Forms as grammars: what is too large is refused by name, and each grammar means what was asked."""

import json
import re

import llguidance
import pytest
from vocabularies import vocabulary

from splittime.core.errors import RequestError
from splittime.text import grammars


def nested(depth: int) -> dict:
    return {"type": "string"} if depth == 1 else {"items": nested(depth - 1)}


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: grammars.of_json_schema({"enum": ["x" * 2**17]}, "here"), grammars.MAX_SCHEMA_CHARS),
        (lambda: grammars.of_json_schema({"enum": [1] * 2**17}, "here"), grammars.MAX_SCHEMA_CHARS),
        (lambda: grammars.of_json_schema(nested(65), "here"), grammars.MAX_SCHEMA_DEPTH),
        (lambda: grammars.of_json_schema({"enum": json.loads("[" * 64 + "]" * 64)}, "here"), grammars.MAX_SCHEMA_DEPTH),
        (lambda: grammars.of_regex("a" * (2**17 + 1), "here"), grammars.MAX_SCHEMA_CHARS),
        (lambda: grammars.of_choice(["a"] * 4097, "here"), grammars.MAX_CHOICES),
        (lambda: grammars.of_choice(["a" * 2**16] * 3, "here"), grammars.MAX_SCHEMA_CHARS),
        (lambda: grammars.of_lark("a" * (2**17 + 1), "here"), grammars.MAX_SCHEMA_CHARS),
    ],
)
def test_what_is_too_large_is_refused_with_the_limit(make, limit: int) -> None:
    with pytest.raises(RequestError) as refused:
        make()
    assert (refused.value.info.param, refused.value.info.limit) == ("here", limit)
    assert "here" in str(refused.value)


def test_annotations_of_a_schema_hold_nobody_and_names_of_properties_are_none() -> None:
    named = {"format": {"type": "string", "format": "starts_with"}, "propertyNames": {"format": "date"}}
    given = {
        **{"properties": named, "propertyNames": {"type": "string"}, "enum": [{"format": "jwt"}]},
        **{"anyOf": [{"format": "base64"}, {"propertyNames": {"pattern": "a"}}], "format": "binary"},
    }
    (made,) = json.loads(grammars.of_json_schema(given, "here"))["grammars"]
    assert {name: value for name, value in made["json_schema"].items() if name != "x-guidance"} == {
        "properties": {"format": {"type": "string"}, "propertyNames": {"format": "date"}},
        "enum": [{"format": "jwt"}],
        "anyOf": [{}, {"propertyNames": {"pattern": "a"}}],
    }


def test_the_largest_are_taken() -> None:
    grammars.of_json_schema(nested(64), "here")
    grammars.of_json_schema({"enum": json.loads("[" * 63 + "]" * 63)}, "here")
    grammars.of_choice(["a"] * 4096, "here")


def test_white_space_is_bounded_and_a_schemas_own_wish_is_not_heard() -> None:
    asked = {"type": "object", "x-guidance": {"whitespace_pattern": ".*"}}
    schema = json.loads(grammars.of_json_schema(asked, "here"))["grammars"][0]["json_schema"]
    assert schema["x-guidance"]["whitespace_pattern"] == grammars.WHITE_SPACE
    assert asked["x-guidance"] == {"whitespace_pattern": ".*"}


def test_no_choice_is_no_form() -> None:
    with pytest.raises(RequestError, match="no choice"):
        grammars.of_choice([], "here")


DECIMALS = (
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",  # pydantic's Decimal; and of five digits, two behind the point
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
)


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_pattern_leaves_to_others_stands_beside_what_is_there(order: int) -> None:
    parts = [("pattern", DECIMALS[0]), ("allOf", [{"maxLength": 9}])][::order]
    told = json.loads(grammars.of_json_schema({"type": "string", **dict(parts)}, "p"))
    schema = told["grammars"][0]["json_schema"]
    assert {"maxLength": 9} in schema["allOf"]
    assert sum("pattern" in each for each in schema["allOf"]) == 1


@pytest.mark.parametrize("pattern", DECIMALS)
def test_what_a_pattern_looks_ahead_for_is_held_too(pattern: str) -> None:
    backend, tokens = vocabulary()

    def allows(form: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(tokens, form, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    form = grammars.of_json_schema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]}, "p")
    for text in ("1.5", "-0.5", ".", "-", "", ".5", "5.", "123.45", "0123.4500", "+"):
        assert allows(form, f'"{text}"') is bool(re.search(pattern, text)), text
    assert not allows(form, '"x"') or pattern is DECIMALS[1]  # whose first alternative has no end
    assert "allOf" not in grammars.of_json_schema({"type": "string", "pattern": "^a$"}, "p")


def allows(schema: dict, written: str) -> bool:
    backend, tokens = vocabulary()
    matcher = llguidance.LLMatcher(tokens, grammars.of_json_schema(schema, "here"), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(written, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("text", ["a\x7fb", "\x1b[0m", "\x01", "\x7f", "a\x00b"])
def test_a_text_with_control_characters_is_written_whole(text: str) -> None:
    written = json.dumps(text).replace("\x7f", "\\u007f")
    for schema in ({"const": text}, {"enum": [text]}):
        assert allows(schema, written)
        assert not allows(schema, '"ab"')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r'^[^"\\]{1,4}$', ['"ab"', '"é"'], [r'"\""', r'"\\"', r'"a\"b"']),
        (r'^[^"]{1,4}$', ['"ab"', r'"\\"'], [r'"\""', r'"a\"b"']),
        (r"^[^\\]{1,4}$", ['"ab"', r'"\""'], [r'"\\"']),
        (r'^[^\s"]{1,4}$', ['"ab"'], [r'"\""', '"a b"']),
    ],
)
def test_what_a_pattern_excludes_is_let_through_by_no_escape(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [allows(schema, each) for each in good + bad] == [True] * len(good) + [False] * len(bad)


def test_named_properties_and_lists_without_a_value_twice_are_listed_one_by_one() -> None:
    record = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}}
    assert [allows(record, each) for each in ("{}", '{"b": 1}', '{"a": 1, "b": 1}', '{"c": 1}', '{"a": 2}')] == [
        *(True, True, True, False, False),
    ]
    unique = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 2}
    assert [allows(unique, each) for each in ("[2]", "[3, 1]", "[]", "[1, 1]", "[1, 2, 3]")] == [
        *(True, True, False, False, False),
    ]
    assert not allows(unique | {"items": {"enum": [1, 1]}, "minItems": -1}, "[1, 1]")
    long = {"items": {"enum": ["x" * 400, "y" * 400, "z" * 400]}}
    typed = {"items": {"enum": [1, "a"], "type": "string"}}
    for other in ({"type": ["array", "null"]}, {"type": "string"}, typed, {"minItems": 4, "maxItems": 9}, long):
        assert "uniqueItems" in grammars.of_json_schema({**unique, **other}, "here")
    assert allows({**unique, "items": {"enum": ["a", "b"], "type": "string"}}, '["b"]')
    for odd in ({"minItems": "x"}, {"items": {"enum": [[]] * 9}}, {"propertyNames": {"enum": [1, []]}}):
        grammars.of_json_schema({**unique, **odd}, "here")


def test_lists_of_few_values_are_listed_as_long_as_they_are_few() -> None:
    """1,700 of them in 128 KB became 8 MB in 1.3 s, and 16 KB took 0.2 s of the event loop."""
    few = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5]}}
    schema = json.loads(grammars.of_json_schema({"anyOf": [few] * 1_000}, "here"))["grammars"][0]["json_schema"]
    listed = [each for each in schema["anyOf"] if "enum" in each]
    assert len(listed) == grammars.MAX_PERMUTED_ENTRIES // 1_305 == 6
    assert schema["anyOf"][:6] == listed
    assert {len(each["enum"]) for each in listed} == {1 + 5 + 20 + 60 + 120 + 120}
    assert schema["anyOf"][6:] == [few] * 994
