"""The servers that a change is measured on: one of our own, or a vLLM with our books, for each set of settings; or one
that runs already.

    with servers.serving({"max_num_seqs": 32}) as target: ...

Those that we start are started after the former has stopped, so that no two share the machine.
One that runs already takes live knobs only, and has on leaving what it had before, whatever happened in between.
If somebody else has turned its knobs meanwhile, nobody knows what a run has measured: it is thrown away, and what was
set stays.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from splittime.attach.settings import KNOBS as VLLM_KNOBS
from splittime.attach.settings import flag_of
from splittime.attach.versions import command_of
from splittime.bench.event_loop import ENDING
from splittime.bench.own_server import as_typed, own_server, vllm_server
from splittime.core.errors import ConfigError, Conflict, EngineError, SplittimeError
from splittime.tune.knobs import KNOBS
from splittime.wire.target import Target, get_json, patch_json

VLLM_ONLY = ("long_prefill_token_threshold",)


class Servers(Protocol):
    """Where settings can be tried."""

    @property
    def is_live(self) -> bool:
        """Returns whether only what a running server takes can be tried."""
        ...

    @property
    def knobs(self) -> tuple[str, ...]:
        """Returns the names of the knobs that these servers have."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """Returns what tells these servers from others."""
        ...

    def serving(self, changes: Mapping[str, Any]) -> AbstractContextManager[Target]:
        """Gives a server with these changes to the settings that were asked for."""
        ...


class OwnServers:
    """settings: those of `splittime serve` that were asked for, by name. block_bytes: of the KV cache, once known."""

    is_live = False
    knobs = tuple(name for name in KNOBS if name not in VLLM_ONLY)

    def __init__(self, model: str | None, settings: Mapping[str, Any]) -> None:
        self._model, self._settings = model, dict(settings)
        self.block_bytes: int | None = None

    @property
    def about(self) -> dict[str, Any]:
        return {"model": self._model, "settings": self._settings}

    def flags(self, changes: Mapping[str, Any]) -> list[str]:
        """Returns what `splittime serve` is given, model first."""
        settings = self._settings | self.as_settings(changes)
        model = [] if self._model is None else [self._model]
        return model + [flag for name, value in settings.items() for flag in as_typed(name, value)]

    def as_settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the changes as settings: blocks are asked for by their bytes."""
        settings = dict(changes)
        if "num_blocks" in settings:
            if self.block_bytes is None:
                raise ConfigError("the size of a block is not known yet", param="num_blocks")
            settings["kv_cache_memory_bytes"] = settings.pop("num_blocks") * self.block_bytes
        return settings

    def serving(self, changes: Mapping[str, Any]) -> AbstractContextManager[Target]:
        """Raises EngineError, with its last words, for a server that does not start."""
        return own_server(self.flags(changes))


class VllmServers:
    """vLLM servers with our books. command: what would stand behind `vllm`: `serve MODEL ...`."""

    is_live = False
    knobs = tuple(name for name in VLLM_KNOBS if name in KNOBS and name != "policy")  # it has one without priorities

    def __init__(self, command: Sequence[str]) -> None:
        """Raises ConfigError for another command, and where there is no vLLM that is known."""
        command_of(command, {})
        self._flags = list(command[1:])

    @property
    def about(self) -> dict[str, Any]:
        return {"vllm": self._flags}

    def flags(self, changes: Mapping[str, Any]) -> list[str]:
        """Returns what `vllm serve` is given, model first: of a flag that stands there twice the last one counts."""
        return [*self._flags, *(word for name, value in changes.items() for word in flag_of(name, value))]

    def serving(self, changes: Mapping[str, Any]) -> AbstractContextManager[Target]:
        """Raises EngineError, with its last words, for a server that does not start."""
        return vllm_server(self.flags(changes))


class RunningServer:
    """A server that somebody else started."""

    is_live = True
    knobs = tuple(knob.name for knob in KNOBS.values() if knob.is_live)

    def __init__(self, target: Target) -> None:
        """Raises NotFound for a server without knobs, EngineError where nobody answers."""
        self._target, self._url = target, f"{target.base_url}/knobs"
        self.before: dict[str, Any] = get_json(self._url, target.api_key)

    @property
    def about(self) -> dict[str, Any]:
        return {"url": self._target.base_url, "knobs": self.before}

    @contextmanager
    def serving(self, changes: Mapping[str, Any]) -> Iterator[Target]:
        """Raises ConfigError for a change that needs a restart."""
        for name in changes:
            if name not in KNOBS or not KNOBS[name].is_live:
                hint = "Give the model and its flags instead of --url."
                raise ConfigError(f"{name} cannot be changed while a server runs", param=name, hint=hint)
        self._require_ours(self.before)
        try:
            self._set(changes)  # within: a server may have made a change whose answer never came
            yield self._target
        finally:
            with _uninterrupted():
                self._restore(changes)

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Leaves these changes there. Raises Conflict where somebody else has turned its knobs."""
        self._require_ours(self.before)
        self._set(changes)

    def _restore(self, changes: Mapping[str, Any]) -> None:
        try:
            self._require_ours(self.before, {**self.before, **changes})
            self._set({})
        except Conflict:
            raise
        except SplittimeError as error:
            words = f"{error.info.message}; its knobs may still be as they were tried: {dict(changes)}"
            raise EngineError(words, hint="Set them back, if it is up: PATCH /knobs.") from None

    def _require_ours(self, *expected: Mapping[str, Any]) -> None:
        """Raises Conflict for knobs that are none of those which this tune has set."""
        now = get_json(self._url, self._target.api_key)
        if now in expected:
            return
        name = next(name for name in (*now, *expected[-1]) if now.get(name) != expected[-1].get(name))
        was, value = expected[-1].get(name), now.get(name)
        words = f"somebody else has turned {name} of {self._target.base_url}: this tune left it at {was}, it is {value}"
        hint = f"It stays so; it was {self.before.get(name)} when this tune began. One tune of a server at a time."
        raise Conflict(words, code="knobs_changed", param=name, value=value, hint=hint)

    def _set(self, changes: Mapping[str, Any]) -> None:
        patch_json(self._url, {**self.before, **changes}, self._target.api_key)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of what is within."""
    came = list[int]()
    before = {one: signal.signal(one, lambda number, frame: came.append(number)) for one in ENDING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if came:
        raise KeyboardInterrupt
