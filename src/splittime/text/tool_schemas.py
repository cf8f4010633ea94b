"""The schemas of tools as grammars of families look at them: their arguments, and what calls cannot be held to."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splittime.core.errors import RequestError
from splittime.text.tool_families import ToolFamily

COMBINED = ("anyOf", "oneOf", "allOf", "not", "if")
OF_LISTED_TEXTS = (*COMBINED, "pattern", "minLength", "maxLength")
OF_TEXTS = ("format",)  # that no list says
OF_OBJECTS = (
    *(*COMBINED, "enum", "const", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$ref"),
)


class CannotHold(RequestError):
    """A grammar cannot say what a keyword asks for."""


def separated(rule: str, at: int, is_required: bool, comma: str) -> Iterator[str]:
    """Yields rules for the arguments from this one on, where none came before it, and where one did, behind a comma."""
    one, then = f"{rule}_{at}_one", f"{rule}_{at + 1}"
    yield f"{rule}_{at}: {one} {then}_more" + ("" if is_required else f" | {then}")
    yield f"{rule}_{at}_more: {json.dumps(comma)} {one} {then}_more" + ("" if is_required else f" | {then}_more")


def any_name() -> str:
    """Returns the rule of names that no schema gives."""
    return "ARGUMENT: /[a-zA-Z0-9_.-]{1,64}/"


def properties_of(schema: Mapping[str, Any], index: int, family: ToolFamily) -> list[tuple[str, Any, bool]] | None:
    """Returns each argument's name and schema, and whether it must be; None where any may be given."""
    refuse(schema, OF_OBJECTS, family, index)
    others = schema.get("additionalProperties")
    if not (others is None or isinstance(others, bool) or others == {}):
        refuse(schema, ("additionalProperties",), family, index)
    properties, required = _shown(schema, index), _required(schema, index)
    if not properties and not required and others is not False:
        return None
    named = {**properties, **{name: {} for name in required if name not in properties}}
    return [(name, each, name in required) for name, each in named.items() if each is not False]


def _shown(schema: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Returns the schema of each argument. Raises RequestError where that is not what `properties` is."""
    found = schema.get("properties")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise misshapen(index, "properties", "an object of schemas")
    wrong = next((name for name, each in found.items() if not isinstance(each, Mapping | bool)), None)
    if wrong is not None:
        raise misshapen(index, f"properties.{wrong}", "a schema")
    return found


def _required(schema: Mapping[str, Any], index: int) -> Mapping[str, None]:
    """Returns the names of arguments that must be, in order. Raises RequestError where `required` is no such list."""
    found = schema.get("required")
    if found is None:
        return {}
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise misshapen(index, "required", "a list of names")
    return dict.fromkeys(found)


def misshapen(index: int, where: str, wanted: str) -> RequestError:
    return RequestError(f"{param_of(index)}.{where} is not {wanted}", param=f"{param_of(index)}.{where}")


def refuse(schema: Mapping[str, Any], keywords: Sequence[str], family: ToolFamily, index: int) -> None:
    found = next((keyword for keyword in keywords if keyword in schema), None)
    if found is not None:
        raise CannotHold(
            f"{param_of(index)}: calls in the form of {family.name} cannot be held to {found} there",
            param=param_of(index),
            value=found,
            hint="leave it out, or strict",
        )


def types_alone(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema that says of arguments their names, their types, and which must be."""
    types = {name: each.get("type") for name, each in _shown(schema, 0).items() if isinstance(each, Mapping)}
    properties = {name: {"type": each} if isinstance(each, str) else {} for name, each in types.items()}
    return {"type": "object", "properties": properties, "required": list(_required(schema, 0))}


def param_of(index: int) -> str:
    return f"tools[{index}].function.parameters"
