"""`splittime up`: the process from which a cluster hangs. It starts gateways and the controller, starts again those of
them that end, and ends all: gateways first, so that what is open is finished, then the controller, which ends replicas.

Whatever it started ends with it, even if it is killed.
"""

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splittime.cluster import state
from splittime.cluster.config import Cluster
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.replica_process import POLL_S, STARTED, UpProcess, read_mark, write_mark
from splittime.cluster.state import gateway_config, write_whole
from splittime.core.errors import ConfigError, EngineError
from splittime.web.ports import hold_shared_port

if TYPE_CHECKING:
    from splittime.cluster.ray_places import RayHead

TELL_S = 0.5
LISTEN_S = 60.0
END_S = 90.0  # for each kind of process, beyond what it waits for itself


class UpCluster:
    """path: of the config. say: is told what happens. `run` returns when all has ended."""

    def __init__(self, path: Path, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._path, self._cluster, self._say = path, cluster, say
        self._gateways: list[UpProcess] = []
        self._controller: UpProcess | None = None
        self._ray: RayHead | None = None
        self._num_signals = 0
        self._told, self._tell_s = "", 0.0
        self._shared_port = ExitStack()  # holds it, if there is one: no other cluster gets it while a gateway is away
        self._said: deque[tuple[float, str]] = deque(maxlen=state.KEPT_EVENTS)  # when whose last words were told

    def run(self, on_ready: Callable[[ManagedGateways], None] = lambda gateways: None) -> None:
        """on_ready: is told the gateways once they listen. Raises `EngineError` where they do not."""
        folder = self._cluster.folder
        signal.signal(signal.SIGHUP, self._on_hangup)
        _claim(folder)
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, self._on_end)
        try:
            state.StateFile(folder).write(state.ClusterState.begun(self._cluster))
            self._start(folder)
            if not self._num_signals:
                on_ready(ManagedGateways(self._cluster))
            while not self._num_signals:
                self._attend()
                time.sleep(POLL_S)
        finally:
            self._end()
            self._shared_port.close()
            (folder / state.UP).unlink(missing_ok=True)

    def _on_end(self, sign: int, frame: object) -> None:
        self._num_signals += 1

    def _on_hangup(self, sign: int, frame: object) -> None:
        """The controller finds it, and so does the next one."""
        if self._cluster.folder.is_dir():
            (self._cluster.folder / state.REREAD).touch()

    # ---- begin

    def _start(self, folder: Path) -> None:
        config = self._cluster.config
        self._hold_shared_port()
        ray_address = self._ray_address(folder) if config.runner == "ray" else ""
        if self._num_signals:
            return
        for number in range(config.gateways):
            self._gateways.append(self._gateway(state.GatewayFiles(folder, number)))
        keeping = [sys.executable, "-m", "splittime.cluster", str(self._path), str(folder), str(os.getpid())]
        self._controller = UpProcess(folder, "controller", [*keeping, ray_address])
        for process in (*self._gateways, self._controller):
            process.start()
        self._await_gateways()

    def _hold_shared_port(self) -> None:
        made, _ = gateway_config(self._cluster.config, self._cluster.launch, 0, ())
        if made.shared_port is not None:
            self._shared_port.enter_context(hold_shared_port(made.host, made.shared_port))

    def _ray_address(self, folder: Path) -> str:
        """Returns where Ray is, which is started here unless the config names one."""
        from splittime.cluster.ray_places import RayHead, check_ray

        check_ray()
        address = self._cluster.config.ray_address
        if address is None:
            self._ray = RayHead(folder)
            address = self._ray.start(self._say, lambda: self._num_signals > 0)
        if address:
            self._say(f"Ray at {address}")
        return address

    def _gateway(self, files: state.GatewayFiles) -> UpProcess:
        """Its file has no replica yet; what comes waits."""
        _, text = gateway_config(self._cluster.config, self._cluster.launch, files.number, ())
        write_whole(files.config, text.encode())
        command = [sys.executable, "-c", STARTED, str(os.getpid()), "gateway", "--config", str(files.config), "--json"]
        return UpProcess(files.folder, f"gateway-{files.number}", command, files.mark)

    def _await_gateways(self) -> None:
        until_s = time.monotonic() + LISTEN_S
        while not all(gateway.has_told for gateway in self._gateways) and not self._num_signals:
            for gateway in self._gateways:
                if gateway.attend() or time.monotonic() > until_s:
                    raise EngineError(f"{gateway.name} did not start", hint=gateway.words or None)
            time.sleep(POLL_S)

    # ---- while it runs

    def _attend(self) -> None:
        assert self._controller is not None, "started"
        if self._ray is not None:
            self._ray.check()
        for process in (*self._gateways, self._controller):
            if process.attend():
                self._say(f"{process.name} has ended, and is started again: {process.last_line}")
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_S
            self._tell_replicas()

    def _tell_replicas(self) -> None:
        """Say which replicas there are, where that has changed, and the last words of those that have ended."""
        status = read_status(self._cluster.folder)
        if status is None:
            return
        for event in status["events"]:
            key = (event["at_unix_s"], event["name"])
            if event.get("words") and key not in self._said:
                self._said.append(key)
                self._say(f"{event['name']} has ended, and said: {event['words']}")
        told = ", ".join(f"{one['name']} {one['phase']}" for one in status["replicas"]) or "none"
        if told != self._told:
            self._told = told
            self._say(f"replicas: {told}")

    # ---- the end

    def _end(self) -> None:
        """A second signal leaves nobody time."""
        first, config = self._num_signals, self._cluster.config
        grace_s = float(config.gateway.get("grace_s", 30.0))
        controller = [] if self._controller is None else [self._controller]

        def is_hurried() -> bool:
            return self._num_signals > max(1, first)

        for processes, seconds in ((self._gateways, grace_s + END_S), (controller, END_S)):
            for process in processes:
                process.signal(signal.SIGTERM)
            for process in processes:
                process.wait(seconds, is_hurried)
        if self._ray is not None:
            self._ray.end(is_hurried)


def read_status(folder: Path) -> dict[str, Any] | None:
    """Returns what the controller wrote last; None where there is nothing yet."""
    try:
        return dict(json.loads((folder / state.STATUS).read_text()))
    except (OSError, ValueError):
        return None


def _claim(folder: Path) -> None:
    """Raises `ConfigError` where a cluster runs in this folder; else leaves nothing there of one that ran."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    running = read_mark(folder / state.UP)
    if running is not None:
        hint = "end it with Ctrl-C or SIGTERM, or set folder in one of the two configs"
        message = f"a cluster runs in {folder}, process {running.pid}"
        raise ConfigError(message, param="folder", value=str(folder), hint=hint)
    for name in (state.STATE, state.STATUS, state.REREAD):
        (folder / name).unlink(missing_ok=True)
    for mark in folder.glob("gateway-*.json"):
        mark.unlink()
    write_mark(folder / state.UP, os.getpid())
