"""Reading typed values out of a `config.json`: each error names the key and the value that it had."""

import sys
from typing import Any

from splittime.core.errors import ConfigError

_MISSING: Any = object()
_MAX_FLOAT = sys.float_info.max  # an int may be too large for a float, and JSON as Python reads it has Infinity


def bad(key: str, value: Any, want: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {value!r}, must be {want}", param=key, value=value)


class Fields:
    """A JSON object with typed getters. A null counts as absent, as transformers treats it."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigError(f"config.json: {self.prefix}{key} is missing", param=self.prefix + key)
        return default

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A positive int."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad(self.prefix + key, value, "a positive integer")
        return value

    def count_or_none(self, key: str, default: int | None = None) -> int | None:
        """A positive int, or `default` when there is none."""
        return default if self.values.get(key) is None else self.count(key)

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A positive, finite float."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_FLOAT:
            raise bad(self.prefix + key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise bad(self.prefix + key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise bad(self.prefix + key, value, "a string")
        return value

    def ints(self, key: str) -> tuple[int, ...]:
        """An int, a list of ints, or nothing."""
        value = self._get(key, [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in listed):
            raise bad(self.prefix + key, value, "an integer or a list of integers, none negative")
        return tuple(listed)
