"""Adapters are read beside the engine's loop: a thread loads them, and the loop says what came of it.

Nothing waits for an adapter: a client may name one only once it is loaded (`server.adapters`).
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.drive.messages import AdapterLoaded, LoadAdapter, ToEngine, UnloadAdapter

log = logging.getLogger("splittime.engine")


class AdapterLoader(Protocol):
    """What the runner has for adapters (`runner.adapters.Adapters`)."""

    def load(self, adapter_id: str, folder: str) -> int:
        """Returns the number of its parameters. Raises ConfigError for one that does not fit."""
        ...

    def unload(self, adapter_id: str) -> None:
        """Forgets it; who runs with it keeps it."""
        ...


class KeptAdapters:
    """What a client of the engine keeps: the folder of each adapter that is loaded, by id. A process that succeeds a
    dead one reads them all again before it is given requests, which may name them."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self._awaited: dict[int, str] = {}  # ids, by call

    @property
    def are_awaited(self) -> bool:
        return bool(self._awaited)

    def read_again(self, new_number: Callable[[], int]) -> list[LoadAdapter]:
        """Returns what is to be asked of a new process."""
        self._awaited = {new_number(): adapter_id for adapter_id in self.folders}
        return [LoadAdapter(call_id, name, self.folders[name]) for call_id, name in self._awaited.items()]

    def take(self, answer: AdapterLoaded) -> bool:
        """Returns whether the answer was awaited. An adapter that cannot be read any more fails its requests."""
        adapter_id = self._awaited.pop(answer.call_id, None)
        if adapter_id is not None and answer.error is not None:
            log.error("adapter %s is lost: %s", adapter_id, answer.error.message)
        return adapter_id is not None


class AdapterGate:
    """put: gives the engine's loop a message, from any thread. let_in: takes what is not of adapters."""

    def __init__(
        self, adapters: AdapterLoader | None, put: Callable[[ToEngine], None], let_in: Callable[[ToEngine], None]
    ) -> None:
        self._adapters, self._put, self._pass_on = adapters, put, let_in
        self._pool = ThreadPoolExecutor(1, "adapters")

    def let_in(self, message: ToEngine) -> None:
        if isinstance(message, LoadAdapter):
            self._pool.submit(self._load, message)
        elif isinstance(message, UnloadAdapter):
            if self._adapters is not None:
                self._adapters.unload(message.adapter_id)
        else:
            self._pass_on(message)

    def _load(self, asked: LoadAdapter) -> None:
        try:
            self._put(AdapterLoaded(asked.call_id, self._loaded(asked)))
        except SplittimeError as error:
            self._put(AdapterLoaded(asked.call_id, error=error.info))
        except Exception as error:  # of whatever kind the reader has for a broken file: the caller must be told
            words = f"the adapter cannot be loaded: {type(error).__name__}"
            self._put(AdapterLoaded(asked.call_id, error=EngineError(words, code="adapter").info))

    def _loaded(self, asked: LoadAdapter) -> int:
        if self._adapters is None:
            raise ConfigError("this engine serves no adapters", param="enable_lora", hint="start it with --enable-lora")
        return self._adapters.load(asked.adapter_id, asked.folder)
