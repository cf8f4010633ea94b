"""`--strict`: a field that has no effect is refused, so that nobody believes in one that it does not have."""

from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

import msgspec

from splittime.core.errors import RequestError


def refuse_without_effect(body: msgspec.Struct) -> None:
    """Raises `RequestError` naming the first field of the body, at any depth, that is given and has no effect."""
    for path in _given_without_effect(body, ""):
        raise RequestError(
            f"{path} has no effect here",
            code="unsupported_field",
            param=path,
            hint="leave it out, or start the server without --strict",
        )


def _given_without_effect(value: object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _given_without_effect(entry, f"{path}[{index}]")
    if not isinstance(value, msgspec.Struct):
        return
    for name in value.__struct_fields__:
        given, at = getattr(value, name), f"{path}.{name}".lstrip(".")
        if name in without_effect(type(value)):
            if given is not None:
                yield at
        else:
            yield from _given_without_effect(given, at)


@cache
def without_effect(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the names of the fields of this class that are declared to have no effect."""
    hints = get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if any(map(_is_marked, getattr(hint, "__metadata__", ()))))


def _is_marked(meta: object) -> bool:
    return isinstance(meta, msgspec.Meta) and (meta.extra_json_schema or {}).get("x-effect") == "none"
