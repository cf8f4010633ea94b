"""Reading typed values out of a GGUF file's metadata: each error names the file, the key, its value, and the limit."""

import numpy as np

from splittime.core.errors import ConfigError
from splittime.models.fields import MISSING, Fields, in_words, is_whole
from splittime.models.gguf.shards import GgufModel
from splittime.models.limits import GGUF_LIMITS, Bounds


class GgufKeys(Fields):
    """The keys that begin with `prefix`, by what follows it."""

    def __init__(self, model: GgufModel, prefix: str) -> None:
        mine = {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}
        super().__init__(mine, prefix, model.path.name, GGUF_LIMITS)
        self.model = model

    def bad(self, key: str, value: object, want: str, limit: object = None) -> ConfigError:
        return self.model.broken(f"{self.prefix}{key}", f"is {value!r}, must be {want}", str(value), limit)

    def refuse_unknown(self, known: set[str], neutral: dict[str, tuple[object, ...]]) -> None:
        """Raises for a key that is not in `known` and has none of its `neutral` values."""
        for key, value in self.values.items():
            if key not in known and (key not in neutral or isinstance(value, np.ndarray) or value not in neutral[key]):
                said = f"is {value!r}: it may change what the model computes, and is not implemented"
                raise self.model.broken(f"{self.prefix}{key}", said, str(value))

    def count(self, key: str, default: object = MISSING) -> int:
        """An int within the key's bounds. One for each layer will do if they are all the same."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise self.bad(key, value, f"{in_words('an integer', GGUF_LIMITS[key])}, the same for all layers")
            self.values[key] = value[0].item()
        return super().count(key, default)

    def count_or_zero(self, key: str) -> int:
        """A positive int; 0 if it is that, or absent."""
        return 0 if self._get(key, 0) == 0 else self.count(key)

    def index(self, key: str, size: int) -> int | None:
        """An int from 0 to below `size`, or nothing."""
        value, bounds = self.values.get(key), Bounds(0, size - 1)
        if value is not None and not is_whole(value, bounds):
            raise self.bad(key, value, in_words("an integer", bounds), list(bounds))
        return value
