"""Reading typed values out of a GGUF file's metadata: each error names the file, the key and the value that it had."""

from typing import Any

import numpy as np

from splittime.core.errors import ConfigError
from splittime.models.gguf.shards import GgufModel

_MISSING: Any = object()


class Keys:
    """The keys that begin with `prefix`."""

    def __init__(self, model: GgufModel, prefix: str) -> None:
        self.model = model
        self.prefix = prefix

    def bad(self, key: str, value: Any, want: str) -> ConfigError:
        return self.model.broken(f"{self.prefix}{key}", f"is {value!r}, must be {want}", str(value))

    def has(self, key: str) -> bool:
        return self.prefix + key in self.model.metadata

    def refuse_unknown(self, known: set[str], neutral: dict[str, tuple[Any, ...]]) -> None:
        """Of the keys that are not in `known`, those without one of their `neutral` values."""
        mine = [key.removeprefix(self.prefix) for key in self.model.metadata if key.startswith(self.prefix)]
        for key in mine:
            value = self.model.metadata[self.prefix + key]
            if key not in known and (key not in neutral or isinstance(value, np.ndarray) or value not in neutral[key]):
                said = f"is {value!r}: it may change what the model computes, and is not implemented"
                raise self.model.broken(f"{self.prefix}{key}", said, str(value))

    def _get(self, key: str, default: Any) -> Any:
        value = self.model.metadata.get(self.prefix + key, default)
        if value is _MISSING:
            raise self.model.broken(f"{self.prefix}{key}", "is missing")
        return value

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A positive int. One for each layer will do if they are all the same."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(key, value, "a positive integer, the same for all layers")
        return value

    def count_or_zero(self, key: str) -> int:
        """A positive int; 0 if it is that, or absent."""
        return 0 if self._get(key, 0) == 0 else self.count(key)

    def index(self, key: str) -> int | None:
        """An int that is not negative, or nothing."""
        value = self._get(key, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.bad(key, value, "an integer, not negative")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.bad(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "a truth value")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a text")
        return value
