"""The flags of a load, made from `LoadSpec`: one for each field, its help the field's own description.

A field in seconds or milliseconds takes a time with a unit (`--duration 90s`, `--slow-reader-delay 50ms`); a bare
number is in the field's own unit. The field's whole name with its unit is a name of the flag too (`--duration-s`).
A command's other flags are the fields of a dataclass (`options.with_options`).
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import typer

from splittime.cli.options import fails_clearly, parameters_of, sign
from splittime.core.errors import ConfigError
from splittime.loadgen.spec import LoadSpec

NS_PER_UNIT = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "min": 60e9, "h": 3600e9}
MAX_NS = 10_000 * 3600e9
_TIME = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([a-zµ]*)")
_UNITS = {"_s": 1e9, "_ms": 1e6}
FIELDS: Any = msgspec.inspect.type_info(LoadSpec).fields  # type: ignore[attr-defined]


def time_ns(text: str, flag: str, unit: str = "s") -> int:
    """`300ms`, `5s`, `2m` in ns. Raises `ConfigError`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or (match[2] or unit) not in NS_PER_UNIT:
        hint = f"for example {flag} 300ms; units are {', '.join(NS_PER_UNIT)}"
        raise ConfigError(f"{flag}: {text!r} is no time", param=flag, value=text, hint=hint)
    found_ns = float(match[1]) * NS_PER_UNIT[match[2] or unit]
    if found_ns > MAX_NS:
        limit = f"{MAX_NS / 3600e9:.0f}h"
        raise ConfigError(f"{flag}: {text!r} is too long; at most {limit}", param=flag, value=text, limit=limit)
    return round(found_ns)


def with_load_flags(options: type, *without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `options` and of a load: it is called with a value of `options`, and with what was
    given of the load, a dict of `LoadSpec`'s fields."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = [field for field in FIELDS if field.name not in without]
        flags = [*parameters_of(options), *(_parameter(field) for field in fields)]

        @functools.wraps(command)
        def with_load(**arguments: Any) -> None:
            given = {field.name: arguments.pop(field.name) for field in fields}
            load = {name: _value(name, value) for name, value in given.items() if value is not None}
            command(options(**arguments), load)

        sign(with_load, flags)
        return fails_clearly(with_load)

    return decorate


def spec_of(load: dict[str, Any]) -> LoadSpec:
    """Raises `ConfigError` for values of the wrong type."""
    try:
        return msgspec.convert(load, LoadSpec)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise ConfigError(f"--{name.replace('_', '-')}: {error}", param=name, value=load.get(name)) from error


def flag_names(field: str) -> list[str]:
    """`duration_s` is `--duration` and `--duration-s`."""
    whole = "--" + field.replace("_", "-")
    unit = next((unit for unit in _UNITS if field.endswith(unit)), None)
    return [whole] if unit is None else [whole.removesuffix(unit.replace("_", "-")), whole]


def _parameter(field: Any) -> inspect.Parameter:
    kind, choices = _kind(field.name)
    names = flag_names(field.name)
    metavar: str | None = "|".join(choices) if choices else _NAMED.get(field.name, _METAVARS.get(kind, "TEXT"))
    if field.name.endswith(tuple(_UNITS)):
        kind, metavar = str, "TIME"
    if kind is bool:
        names, metavar = [f"{names[0]}/--no-{names[0][2:]}"], None
    text = _description(field)
    option = typer.Option(None, *names, help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


_METAVARS = {int: "N", float: "X"}
_NAMED = {
    **dict.fromkeys(("dataset", "lengths_file", "trace"), "FILE"),
    **dict.fromkeys(("time_column", "input_column", "output_column"), "NAME"),
    **dict.fromkeys(("input_tokens", "output_tokens", "turn_input_tokens"), "LENGTHS"),
    "turns": "NUMBERS",
}
_HINTS = typing.get_type_hints(LoadSpec)


def _kind(name: str) -> tuple[Any, tuple[str, ...]]:
    """The type of a field without None, and what it may be, if that is a list."""
    hint = _HINTS[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kind = next(part for part in parts if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return str, typing.get_args(kind)
    return kind, ()


def _description(field: Any) -> str:
    text = (getattr(field.type, "extra_json_schema", None) or {}).get("description", "")
    default = field.default
    is_plain = default in (None, False, msgspec.NODEFAULT, msgspec.UNSET) or default == 0
    return text if is_plain else f"{text.rstrip('.')}. Default: {default}."


def _value(name: str, value: Any) -> Any:
    """A time in the field's own unit; where a field may also be a distribution, it is left for the field to say."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), None)
    if unit is None or not isinstance(value, str):
        return value
    kind, _ = _kind(name)
    if kind is str and not _TIME.fullmatch(value.strip()):
        return value
    number = time_ns(value, flag_names(name)[0], unit[1:]) / _UNITS[unit]
    return str(number) if kind is str else number
