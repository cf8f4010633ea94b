"""What starts have measured of a model on this machine, remembered, so that a restart decides as the start before did.

One entry for each thing that is measured, in a JSON file beside the packed weights. Its key is the processor and the
cores, the build of the kernels, and of the model all that its speed depends on: shapes, schemes, types. Whoever changes
one of these measures again; `--remeasure` does too, and so does deleting the file. A damaged file is told and ignored.

A measurement beside somebody else's work is worth less: it is used, but not kept, and the next start tries again.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from splittime.models.decoder import Decoder
from splittime.runner import kept_json, machine
from splittime.runner.ceilings import kernels_build
from splittime.runner.config import Resolved, RunnerConfig

T = TypeVar("T", bound=msgspec.Struct)
NAME = "start.json"
DISTURBED_CORES = 0.25  # that others kept busy while it was measured


class StartMemory:
    """path: None for a start that remembers nothing. facts: what the measurements depend on."""

    def __init__(self, path: Path | None, facts: Sequence[Any], remeasure: bool = False) -> None:
        self._path, self._facts, self._remeasure = path, list(facts), remeasure

    def get(self, what: str, depends_on: Sequence[Any], kind: type[T], measure: Callable[[], T]) -> tuple[T, str]:
        """What is remembered of `what`, or measured now, and where it comes from in words. depends_on: facts besides
        those of this memory."""
        key = self._key(what, depends_on)
        entry = None if self._remeasure else _entry(kept_json.read(self._path).get(key), kind)
        if entry is not None:
            return entry[0], f"remembered from {entry[1]}, --remeasure measures again"
        watch = machine.Others()
        found = measure()
        others = watch.busy_cores()
        if others > DISTURBED_CORES:
            return found, f"others kept {others:.1f} cores busy meanwhile: not remembered"
        if self._path is None:
            return found, "not remembered, there is no cache folder"
        new = {"at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "found": msgspec.to_builtins(found)}
        kept_json.write(self._path, kept_json.read(self._path) | {key: new})
        return found, "remembered for the next start"

    def _key(self, what: str, depends_on: Sequence[Any]) -> str:
        facts = json.dumps([*self._facts, *depends_on], default=str)
        return f"{what} {hashlib.sha256(facts.encode()).hexdigest()[:32]}"


def _entry(kept: Any, kind: type[T]) -> tuple[T, str] | None:
    """What was found, and when; None for what is not there or makes no sense."""
    try:
        return msgspec.convert(kept["found"], kind), str(kept["at"])
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


def of(config: RunnerConfig, resolved: Resolved, decoder: Decoder) -> StartMemory:
    """Returns what is remembered of this model as it is computed here."""
    folder = machine.packed_cache_folder(config.packed_cache)
    computed = (resolved.weights, resolved.weights_bytes, resolved.kv_cache_dtype, resolved.linear_backend)
    facts = (machine.cpu_name(), machine.num_cores(), kernels_build(decoder.ops), repr(decoder.config), computed)
    where = None if folder is None else folder / NAME
    return StartMemory(where, (*facts, resolved.max_model_len, resolved.max_num_seqs), config.remeasure)
