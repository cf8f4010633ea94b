"""Schemas of tools that a grammar is not made of, or only so far: by size, by shape and by keyword."""

from typing import Any

import pytest

from splittime.core.errors import RequestError
from splittime.text import tool_grammar
from splittime.text.grammars import MAX_SCHEMA_CHARS
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls

TAGGED = ("qwen3_coder", "glm45", "deepseek_v32", "deepseek_v4")
QUOTED = ("functiongemma", "gemma4")
OWN_FORMS = (*TAGGED, "pythonic", "lfm2", "olmo3")


def grammar(family: str, *schemas: dict[str, Any]) -> str:
    tools = [Tool(f"f{at}", schema, True) for at, schema in enumerate(schemas)]
    return grammar_of_calls(FAMILIES[family], tools, may_answer=False, may_repeat=True)


def refused(family: str, *schemas: dict[str, Any]) -> Any:
    with pytest.raises(RequestError) as error:
        grammar(family, *schemas)
    return error.value.info


# ---- size


@pytest.fixture
def written_chars(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of each rule of JSON that was written."""
    plain, sizes = tool_grammar.json_schema_rule, []

    def noted(schema: Any) -> str:
        rule = plain(schema)
        sizes.append(len(rule))
        return rule

    monkeypatch.setattr(tool_grammar, "json_schema_rule", noted)
    return sizes


@pytest.mark.parametrize("family", OWN_FORMS)
def test_no_more_rules_are_written_once_they_are_too_large(family: str, written_chars: list[int]) -> None:
    properties = {f"p{at}": {"$ref": "#/$defs/a"} for at in range(100)}
    info = refused(family, {"properties": properties, "$defs": {"a": {"const": 1, "title": "x" * 20_000}}})
    assert info.message == f"tools have more than {MAX_SCHEMA_CHARS} characters"
    assert (info.param, info.limit) == ("tools", MAX_SCHEMA_CHARS)
    assert len(written_chars) == MAX_SCHEMA_CHARS // 20_000 + 1


@pytest.mark.parametrize("family", OWN_FORMS)
def test_a_schema_that_is_too_large_itself_has_no_rule_written(family: str, written_chars: list[int]) -> None:
    assert refused(family, {}, {"x": "y" * MAX_SCHEMA_CHARS}).param == "tools[1].function.parameters"
    assert sum(written_chars) < 1000


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_measured_together(family: str) -> None:
    large = {"properties": {"x" * (MAX_SCHEMA_CHARS // 2): {"type": "integer"}}}
    grammar(family, large)
    assert refused(family, large, large).param == "tools"


# ---- shape


class ListThatIsNotSearched(list):
    def __contains__(self, wanted: object) -> bool:
        raise AssertionError("a list is searched for each argument")


@pytest.mark.parametrize("family", OWN_FORMS)
def test_the_names_that_must_be_are_not_searched_for_each_argument(family: str) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "required": ListThatIsNotSearched(["b", "a"])}
    assert grammar(family, schema) == grammar(family, {**schema, "required": ["b", "a"]})


@pytest.mark.parametrize("family", [*OWN_FORMS, *QUOTED])
@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"required": 5}, "required"),
        ({"required": "a"}, "required"),
        ({"required": [["a"]]}, "required"),
        ({"required": [1]}, "required"),
        ({"properties": ["x"]}, "properties"),
        ({"properties": 5}, "properties"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"properties": {"a": None}}, "properties.a"),
    ],
)
def test_what_has_not_the_shape_of_a_schema_is_refused_by_its_place(family: str, schema: dict, where: str) -> None:
    info = refused(family, {}, schema)
    assert (info.param, info.status) == (f"tools[1].function.parameters.{where}", 400)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("values", [5, "ab", {}])
def test_an_enum_that_is_no_list_is_refused(family: str, values: Any) -> None:
    info = refused(family, {"properties": {"a": {"type": "string", "enum": values}}})
    assert info.param == "tools[0].function.parameters.enum"


@pytest.mark.parametrize("family", OWN_FORMS)
def test_what_is_null_is_not_given(family: str) -> None:
    assert grammar(family, {"properties": None, "required": None}) == grammar(family, {})


# ---- what a call cannot be held to


COMBINED = [(word, [{"type": "string"}]) for word in ("anyOf", "oneOf", "allOf")]
COMBINED += [("not", {"const": "x"}), ("if", {"const": "x"})]
LIMITS = [*COMBINED, ("pattern", "x"), ("minLength", 1), ("maxLength", 2)]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(("keyword", "value"), [*LIMITS, ("format", "date")])
def test_a_text_between_marks_is_not_held_to_other_rules(family: str, keyword: str, value: Any) -> None:
    info = refused(family, {}, {"properties": {"a": {"type": "string", keyword: value}}})
    assert (info.param, info.value) == ("tools[1].function.parameters", keyword)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(("keyword", "value"), LIMITS)
def test_nor_is_one_of_a_list(family: str, keyword: str, value: Any) -> None:
    assert refused(family, {"properties": {"a": {"enum": ["x", "yyy"], keyword: value}}}).value == keyword
    grammar(family, {"properties": {"a": {"enum": ["x", "yyy"], "format": "enum"}}})


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(("keyword", "value"), [*LIMITS, ("enum", ["x"]), ("const", "x"), ("format", "date")])
def test_nor_is_one_to_rules_beside_a_reference(family: str, keyword: str, value: Any) -> None:
    defined = {"text": {"type": "string"}, "other": {"$ref": "#/$defs/text", keyword: value}}
    for named in (defined["other"], {"$ref": "#/$defs/other"}):
        assert refused(family, {"properties": {"a": named}, "$defs": defined}).value == keyword
    grammar(family, {"properties": {"a": {"$ref": "#/$defs/text", "title": "A"}}, "$defs": defined})


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
def test_alternatives_that_are_constants_are_a_list(family: str, word: str) -> None:
    parts = [{"const": "x", "title": "X"}, {"enum": ["y", "z"], "type": "string"}]
    listed = grammar(family, {"properties": {"a": {"type": "string", "enum": ["x", "y", "z"]}}})
    assert grammar(family, {"properties": {"a": {"type": "string", word: parts}}}) == listed
    info = refused(family, {"properties": {"a": {"type": "string", word: [*parts, {"pattern": "u"}]}}})
    assert info.value == word


@pytest.mark.parametrize("family", [*OWN_FORMS, *QUOTED])
def test_arguments_that_need_each_other_are_refused(family: str) -> None:
    for keyword in ("dependencies", "dependentRequired"):
        info = refused(family, {"properties": {"a": {"type": "integer"}}, keyword: {"a": ["b"]}})
        assert (info.param, info.value) == ("tools[0].function.parameters", keyword)


QUOTED_LIMITS = [*LIMITS[1:], ("format", "date"), ("$ref", "#/nowhere")]


@pytest.mark.parametrize("family", QUOTED)
@pytest.mark.parametrize(("keyword", "value"), QUOTED_LIMITS)
def test_a_value_of_a_form_of_its_own_is_not_held_to_other_rules(family: str, keyword: str, value: Any) -> None:
    for limited in ({"type": "string", keyword: value}, {keyword: value}):
        assert refused(family, {"properties": {"a": {"type": "array", "items": limited}}}).value in (keyword, "items")


@pytest.mark.parametrize("family", QUOTED)
@pytest.mark.parametrize("name", ["a b", "a:", "<a", '"'])
def test_a_bare_name_that_could_be_more_is_refused(family: str, name: str) -> None:
    assert refused(family, {"properties": {name: {}}}).param == "tools[0].function.parameters.properties"


@pytest.mark.parametrize("family", QUOTED)
def test_a_schema_that_refers_to_itself_has_one_rule(family: str) -> None:
    tree = {
        "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "additionalProperties": False,
    }
    rules = grammar(family, {"properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}})
    assert rules.count("below:") == 1


@pytest.mark.parametrize("family", TAGGED)
def test_alternatives_that_are_not_all_texts_are_held_to_as_json(family: str) -> None:
    grammar(family, {"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}})


@pytest.mark.parametrize("family", [family for family in OWN_FORMS if family not in TAGGED])
@pytest.mark.parametrize(("keyword", "value"), [("allOf", [{"const": True}]), ("const", True)])
def test_a_truth_that_is_held_to_more_is_written_as_json(family: str, keyword: str, value: Any) -> None:
    limited = grammar(family, {"properties": {"a": {"type": "boolean", keyword: value}}})
    assert "True" not in limited
    assert "True" in grammar(family, {"properties": {"a": {"type": "boolean"}}})


@pytest.mark.parametrize("family", OWN_FORMS)
@pytest.mark.parametrize("properties", [{}, {"a": {"type": "integer"}}])
def test_arguments_of_any_name_are_not_held_to_a_schema(family: str, properties: dict) -> None:
    info = refused(family, {"properties": properties, "additionalProperties": {"type": "integer"}})
    assert (info.param, info.value) == ("tools[0].function.parameters", "additionalProperties")
    free = grammar(family, {"properties": properties})
    for anything in (None, True, {}):
        assert grammar(family, {"properties": properties, "additionalProperties": anything}) == free
    assert (grammar(family, {"properties": properties, "additionalProperties": False}) == free) == bool(properties)
