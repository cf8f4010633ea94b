"""Libraries that take long to import are imported where they are used: each process that collects tests would wait."""

import importlib
from typing import Any


class Lazily:
    """A module, imported by the first look into it; pytest's own, for marks and the like, are none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic, openai, schemathesis = Lazily("anthropic"), Lazily("openai"), Lazily("schemathesis")
scipy_stats, transformers = Lazily("scipy.stats"), Lazily("transformers")
