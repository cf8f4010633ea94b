"""The adapters that are loaded, by the id that a plan's requests name. A load runs in a thread of its own
(`drive.adapter_gate`), beside the steps; what it has made is there for them at once.

A request that has been admitted keeps its adapter, also when that is unloaded meanwhile.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from splittime.core.errors import ConfigError, EngineError
from splittime.kernels.api import WeightScheme
from splittime.kernels.low_rank import AdapterUse
from splittime.models.adapters import Adapter, load_adapter
from splittime.models.decoder import Decoder

MOST_LOADED = 128


class Adapters:
    """decoder: the base model, of which only its configuration and operations are looked at. scheme: that the adapters
    are kept in."""

    def __init__(self, decoder: Decoder, scheme: WeightScheme, max_rank: int) -> None:
        self._config, self._ops = decoder.config, decoder.ops
        self._scheme, self._max_rank = scheme, max_rank
        self._loaded: dict[str, Adapter] = {}

    def load(self, adapter_id: str, folder: str) -> int:
        """Returns the number of its parameters. Raises `ConfigError` for one that does not fit the base model or is
        one too many."""
        if len(self._loaded) >= MOST_LOADED:
            said = f"{MOST_LOADED} adapters are loaded"
            raise ConfigError(said, param="lora_name", limit=MOST_LOADED, hint="unload one: /v1/unload_lora_adapter")
        with torch.inference_mode():
            made = load_adapter(Path(folder), self._config, self._ops, self._scheme, self._max_rank)
        self._loaded[adapter_id] = made
        return made.num_parameters

    def unload(self, adapter_id: str) -> None:
        """Forgets it; one that is not there is no error."""
        self._loaded.pop(adapter_id, None)

    def named(self, adapter_id: str) -> Adapter:
        """Raises `EngineError` for one that is not loaded."""
        found = self._loaded.get(adapter_id)
        if found is None:
            hint = "unload it first, /v1/unload_lora_adapter, and load it again"
            raise EngineError("the request's adapter is not loaded", code="adapter_not_loaded", hint=hint)
        return found


def uses_of(adapters: Sequence[Adapter | None], begins: Sequence[int]) -> tuple[AdapterUse, ...]:
    """Returns which tokens of a batch use which adapter. adapters: of each row; begins: the first token of each, and
    the end of the last."""
    tokens: dict[Adapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            tokens.setdefault(adapter, []).extend(range(begins[row], begins[row + 1]))
    return tuple(AdapterUse(one.layers, torch.tensor(mine, dtype=torch.int32)) for one, mine in tokens.items())
