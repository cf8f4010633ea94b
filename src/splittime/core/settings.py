"""A setting is declared once: as a field of the struct that uses it, with what it means and what it may be.

    num_threads: Annotated[int | None, Doc("CPU threads.", least=1, most=1024)] = None

`settings_of` reads these declarations: flags, the settings file, `config show`, the reference page and `check` are all
made from them. A field without a `Doc` is no setting: other code sets it.
The kind follows from the type (and from the unit in the name: `_bytes` is a size), the choices from a `Literal`.
"""

import functools
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from splittime.core.errors import ConfigError

ENV_PREFIX = "SPLITTIME_"
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
Kind = Literal["text", "texts", "whole", "number", "switch", "bytes"]


@dataclass(frozen=True, slots=True)
class Doc:
    """What a user reads about a setting, and its bounds, both included. is_secret: never printed."""

    help: str
    least: float | None = None
    most: float | None = None
    is_secret: bool = False


class Setting(NamedTuple):
    """One setting as flags, file and reference show it. A default of None: the machine or the model decides."""

    name: str
    kind: Kind
    default: Any
    doc: Doc
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """Returns the default as the settings file would have it; empty if the machine or the model decides."""
        if self.default is None:
            return ""
        if self.kind == "switch":
            return str(self.default).lower()
        if self.kind == "texts":
            return " ".join(self.default)
        return f"{self.default:g}" if self.kind == "number" else str(self.default)

    @property
    def shown_range(self) -> str:
        """Returns the bounds in words; empty if there are none."""
        if self.doc.least is None:
            return ""
        return f"at least {self.doc.least}" if self.doc.most is None else f"{self.doc.least} to {self.doc.most}"

    @property
    def limit(self) -> list[Any]:
        """Returns the choices, or the two bounds."""
        return list(self.choices) or [self.doc.least, self.doc.most]

    def fault(self, value: Any) -> str | None:
        """Returns what is wrong with a value of the right type; None if it may be had."""
        if value is None:
            return None
        if self.choices:
            return None if value in self.choices else f"is none of {', '.join(self.choices)}"
        low, high = self.doc.least, self.doc.most
        is_within = (low is None or value >= low) and (high is None or value <= high)
        return None if is_within else f"must be {self.shown_range}"


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one step may hold: the scheduler plans within it, the runner makes room for it."""

    max_num_seqs: Annotated[int, Doc("Requests that run at once.", 1, 65536)] = 64
    max_num_batched_tokens: Annotated[int, Doc("Tokens that one step may compute, over all rows.", 1)] = 512
    block_size: Annotated[int, Doc("Tokens in a block of KV cache.", 1, 1024)] = 16


@functools.cache
def settings_of(config: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Returns the settings that a struct declares, in the order of its fields."""
    hints = typing.get_type_hints(config, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(config)}
    found = ((name, hints[name], _doc(hints[name]), _default_of(field)) for name, field in fields.items())
    return tuple(
        Setting(name, _kind(name, _plain_type(hint)), default, doc, _choices(_plain_type(hint)))
        for name, hint, doc, default in found
        if doc is not None
    )


def meaning_of(config: type[msgspec.Struct], name: str) -> str:
    """Returns what a key may be and what it is for; of one that is not there, which there are."""
    for setting in settings_of(config):
        if setting.name == name:
            return f"one of {', '.join(setting.choices)}. {setting.doc.help}" if setting.choices else setting.doc.help
    return f"the keys here are {', '.join(config.__struct_fields__)}"


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Returns what a field is where nobody gives it; NODEFAULT for one that must be given."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def check(config: msgspec.Struct) -> None:
    """Raises `ConfigError` that names the first setting whose value is out of its bounds or none of its choices."""
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        fault = setting.fault(value)
        if fault is not None:
            message = f"{setting.name} = {value!r} {fault}"
            raise ConfigError(message, param=setting.name, value=value, limit=setting.limit, hint=setting.doc.help)


def parse_bytes(text: str) -> int:
    """Returns a size as it is written: `512MiB`, `4g`, `1048576`. Powers of two, but for kB, MB, GB.

    Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _doc(hint: Any) -> Doc | None:
    return next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Doc)), None)


def _plain_type(hint: Any) -> Any:
    """Returns the type without its `Doc` and without None."""
    plain = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(plain) in (typing.Union, types.UnionType):
        plain = next(part for part in typing.get_args(plain) if part is not types.NoneType)
    return plain


def _kind(name: str, plain: Any) -> Kind:
    kinds: dict[Any, Kind] = {bool: "switch", float: "number", int: "bytes" if name.endswith("_bytes") else "whole"}
    return kinds.get(plain) or ("texts" if typing.get_origin(plain) is tuple else "text")


def _choices(plain: Any) -> tuple[str, ...]:
    return typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
