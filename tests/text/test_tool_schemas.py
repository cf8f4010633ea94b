"""Schemas of tools that a grammar is not made of, or only so far: by size, by shape and by keyword."""

from typing import Any

import pytest

from splittime.core.errors import RequestError
from splittime.text import tool_grammar
from splittime.text.grammars import MAX_SCHEMA_CHARS
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls

OWN_FORMS = ("qwen3_coder", "glm45", "pythonic", "lfm2", "olmo3")
TAGGED = OWN_FORMS[:2]


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
    large = {"properties": {"a": {"type": "integer", "title": "x" * (MAX_SCHEMA_CHARS // 2)}}}
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


@pytest.mark.parametrize("family", OWN_FORMS)
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
