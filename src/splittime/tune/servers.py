"""The servers that a change is measured on: one of our own for each set of settings, or one that runs already.

    with servers.serving({"max_num_seqs": 32}) as target: ...

Our own are started after the former has stopped, so that no two share the machine, are ended by their process id, and
end with this process however it ends.
One that runs already takes live knobs only, and has on leaving what it had before, whatever happened in between.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from splittime.core.errors import ConfigError, EngineError
from splittime.tune.knobs import KNOBS
from splittime.wire.get_json import get_json, patch_json
from splittime.wire.target import Target

START_S = 300.0
STOP_S = 30.0
STARTED = """import signal, sys
from splittime.cli.main import main
from splittime.core.parent import end_with
end_with(int(sys.argv.pop(1)), signal.SIGTERM)
main()"""


class Servers(Protocol):
    """Where settings can be tried."""

    @property
    def is_live(self) -> bool:
        """Returns whether only what a running server takes can be tried."""
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

    @contextmanager
    def serving(self, changes: Mapping[str, Any]) -> Iterator[Target]:
        """Raises EngineError, with its last words, for a server that does not start."""
        served = ["serve", *self.flags(changes), "--port", "0", "--json"]
        command = [sys.executable, "-c", STARTED, str(os.getpid()), *served]
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, start_new_session=True)
            try:
                yield Target(url=_url(process, words))
            finally:
                _end(process)


class RunningServer:
    """A server that somebody else started."""

    is_live = True

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
        self.set({**self.before, **changes})
        try:
            yield self._target
        finally:
            self.set(self.before)

    def set(self, knobs: Mapping[str, Any]) -> None:
        patch_json(self._url, dict(knobs), self._target.api_key)


def as_typed(name: str, value: Any) -> list[str]:
    """Returns a setting as it is typed on a command line: [] where it is None, several words for a list."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (f"--{flag}", str(one))]
    return [f"--{flag}", str(value)]


def _url(process: "subprocess.Popen[bytes]", words: Any) -> str:
    """Waits until the server says where it is."""
    assert process.stdout is not None
    until = time.monotonic() + START_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not part:
            raise _not_started(process, words, in_time=bool(ready))
        line += part
    return str(json.loads(line)["url"])


def _not_started(process: "subprocess.Popen[bytes]", words: Any, in_time: bool) -> EngineError:
    words.seek(0)
    said = words.read().decode(errors="replace").strip().splitlines()
    why = f"it ended with status {process.wait(STOP_S)}" if in_time else f"it was not ready after {START_S:g} s"
    return EngineError(f"the server did not start: {why}", hint=" ".join(said[-3:])[-500:] or None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks it to end, and ends it if it does not."""
    for sign, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            break
        process.send_signal(sign)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()
