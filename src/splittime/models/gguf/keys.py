"""Reading typed values out of a GGUF file's metadata: each error names the file, the key, its value, and the limit."""

from typing import Any

import numpy as np

from splittime.core.errors import ConfigError
from splittime.models.fields import is_number, is_whole, told
from splittime.models.gguf.shards import GgufModel
from splittime.models.limits import GGUF_LIMITS, Bounds

_MISSING: Any = object()


class Keys:
    """The keys that begin with `prefix`."""

    def __init__(self, model: GgufModel, prefix: str) -> None:
        self.model = model
        self.prefix = prefix

    def bad(self, key: str, value: Any, want: str, limit: Any = None) -> ConfigError:
        return self.model.broken(f"{self.prefix}{key}", f"is {value!r}, must be {want}", str(value), limit)

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
        """An int within the key's bounds. One for each layer will do if they are all the same."""
        value, bounds = self._get(key, default), GGUF_LIMITS[key]
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if not is_whole(value, bounds):
            want = f"{told('an integer', bounds)}, the same for all layers"
            raise self.bad(key, value, want, list(bounds))
        return value

    def count_or_zero(self, key: str) -> int:
        """A positive int; 0 if it is that, or absent."""
        return 0 if self._get(key, 0) == 0 else self.count(key)

    def index(self, key: str, size: int) -> int | None:
        """An int from 0 to below `size`, or nothing."""
        value, bounds = self._get(key, None), Bounds(0, size - 1)
        if value is not None and not is_whole(value, bounds):
            raise self.bad(key, value, told("an integer", bounds), list(bounds))
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A number within the key's bounds."""
        value, bounds = self._get(key, default), GGUF_LIMITS[key]
        if not is_number(value, bounds):
            raise self.bad(key, value, told("a number", bounds), list(bounds))
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
