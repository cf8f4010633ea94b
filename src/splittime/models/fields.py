"""Reading typed values out of a `config.json`: each error names the key, the value that it had, and the limit."""

import reprlib
from collections.abc import Mapping
from typing import Any

from splittime.core.errors import ConfigError
from splittime.models.limits import LIMITS, MAX_IDS, Bounds

CONFIG_NAME = "config.json"
MISSING = object()
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 200
_shown.maxlist = 8


def bad(key: str, value: object, want: str, limit: object = None, file: str = CONFIG_NAME) -> ConfigError:
    shown = _shown.repr(value)
    plain = value if isinstance(value, str | int | float | bool | None) else shown
    return ConfigError(f"{file}: {key} is {shown}, must be {want}", param=key, value=plain, limit=limit)


def is_whole(value: object, bounds: Bounds) -> bool:
    return type(value) is int and bounds.least <= value <= bounds.most


def is_number(value: object, bounds: Bounds) -> bool:
    """Neither infinite nor NaN, both of which JSON as Python reads it has."""
    return (type(value) is int or type(value) is float) and bounds.least <= value <= bounds.most


def in_words(kind: str, bounds: Bounds) -> str:
    return f"{kind} from {bounds.least:g} to {bounds.most:.12g}"


class Fields:
    """A JSON object with typed getters; numbers within `limits`. A null counts as absent, as transformers treats it.
    file: whose it is, for errors."""

    def __init__(
        self, values: dict[str, Any], prefix: str = "", file: str = CONFIG_NAME, limits: Mapping[str, Bounds] = LIMITS
    ) -> None:
        self.values = values
        self.prefix = prefix
        self.file = file
        self.limits = limits

    def bad(self, key: str, value: object, want: str, limit: object = None) -> ConfigError:
        return bad(self.prefix + key, value, want, limit, self.file)

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise ConfigError(f"{self.file}: {self.prefix}{key} is missing", param=self.prefix + key)
        return default

    def count(self, key: str, default: object = MISSING) -> int:
        """An int within the key's bounds."""
        value, bounds = self._get(key, default), self.limits[key]
        if not is_whole(value, bounds):
            raise self.bad(key, value, in_words("an integer", bounds), list(bounds))
        return value

    def count_or_none(self, key: str, default: int | None = None) -> int | None:
        """The same, or `default` when there is none."""
        return default if self.values.get(key) is None else self.count(key)

    def number(self, key: str, default: object = MISSING) -> float:
        """A number within the key's bounds."""
        value, bounds = self._get(key, default), self.limits[key]
        if not is_number(value, bounds):
            raise self.bad(key, value, in_words("a number", bounds), list(bounds))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: object = MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def ints(self, key: str, bounds: Bounds) -> tuple[int, ...]:
        """An int, a list of at most `MAX_IDS` ints, or nothing; each within `bounds`."""
        value = self._get(key, [])
        listed = value if isinstance(value, list) else [value]
        if len(listed) > MAX_IDS or not all(is_whole(item, bounds) for item in listed):
            want = f"an integer from {bounds.least} to {bounds.most}, or a list of at most {MAX_IDS} of them"
            raise self.bad(key, value, want, list(bounds))
        return tuple(listed)
