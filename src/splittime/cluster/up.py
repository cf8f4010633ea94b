"""`splittime up`: the process from which a cluster hangs. It starts gateways and the controller, starts again those of
them that end, and ends all: gateways first, so that what is open is finished, then the controller, which ends replicas.

Whatever it started ends with it, even if it is killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from splittime.cluster.config import Cluster
from splittime.cluster.gateway_files import gateway_config, write_whole
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.replica_process import STARTED
from splittime.cluster.running import REREAD, STATE, STATUS, UP, GatewayFiles, read_mark, write_mark
from splittime.cluster.state import ClusterState, StateFile
from splittime.core.errors import ConfigError, EngineError

POLL_S, TELL_S = 0.1, 0.5
AGAIN_S = 1.0  # from the end of a process until it is started again
LISTEN_S = 60.0
END_S = 90.0  # for each kind of process, beyond what it waits for itself
WORDS = 500


class UpProcess:
    """A process that is to run for as long as the cluster does. out: what it prints, if that is read."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], mark: Path | None = None) -> None:
        self.name, self._command, self._mark = name, command, mark
        self._log, self._out = folder / f"{name}.log", folder / f"{name}.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_s: float | None = None
        self.has_told = False

    def start(self) -> None:
        with self._log.open("ab") as words, self._out.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=words, start_new_session=True
            )
        self._ended_s, self.has_told = None, False

    def attend(self) -> bool:
        """Start it again if it has ended a while ago; note whether it has told that it listens. Returns whether it has
        just ended."""
        if self.is_alive:
            if not self.has_told and self._out.read_bytes().endswith(b"\n"):
                self.has_told = True
                if self._mark is not None:
                    write_mark(self._mark, self.pid)
            return False
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            return True
        if time.monotonic() - self._ended_s > AGAIN_S:
            self.start()
        return False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-WORDS:]

    @property
    def last_line(self) -> str:
        return self.words.rpartition("\n")[2] or "it said nothing"

    def signal(self, sign: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, sign)

    def wait(self, seconds: float, is_hurried: Callable[[], bool]) -> None:
        """Return when it has ended; kill it where that takes too long, or as soon as somebody is in a hurry."""
        until_s = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < until_s and not is_hurried():
            time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()


class UpCluster:
    """path: of the config. say: is told what happens. `run` returns when all has ended."""

    def __init__(self, path: Path, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._path, self._cluster, self._say = path, cluster, say
        self._gateways: list[UpProcess] = []
        self._controller: UpProcess | None = None
        self._num_signals = 0
        self._told, self._tell_s = "", 0.0

    def run(self, on_ready: Callable[[list[str]], None] = lambda urls: None) -> None:
        """on_ready: is told the gateways' addresses once they listen. Raises `EngineError` where they do not."""
        folder = self._cluster.folder
        signal.signal(signal.SIGHUP, self._on_hangup)
        _claim(folder)
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, self._on_end)
        try:
            StateFile(folder).write(ClusterState.begun(self._cluster))
            self._start(folder)
            on_ready([ManagedGateways(self._cluster).url(number) for number in range(len(self._gateways))])
            while not self._num_signals:
                self._attend()
                time.sleep(POLL_S)
        finally:
            self._end()
            (folder / UP).unlink(missing_ok=True)

    def _on_end(self, sign: int, frame: object) -> None:
        self._num_signals += 1

    def _on_hangup(self, sign: int, frame: object) -> None:
        """The controller finds it, and so does the next one."""
        if self._cluster.folder.is_dir():
            (self._cluster.folder / REREAD).touch()

    # ---- begin

    def _start(self, folder: Path) -> None:
        config, ray_address = self._cluster.config, ""
        if config.runner == "ray":
            from splittime.cluster.ray_places import start_ray

            self._say("starting Ray" if config.ray_address is None else f"Ray at {config.ray_address}")
            ray_address = config.ray_address or start_ray(self._cluster)
        for number in range(config.gateways):
            self._gateways.append(self._gateway(GatewayFiles(folder, number)))
        keeping = [sys.executable, "-m", "splittime.cluster", str(self._path), str(folder), str(os.getpid())]
        self._controller = UpProcess(folder, "controller", [*keeping, ray_address])
        for process in (*self._gateways, self._controller):
            process.start()
        self._await_gateways()

    def _gateway(self, files: GatewayFiles) -> UpProcess:
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
        for process in (*self._gateways, self._controller):
            if process.attend():
                self._say(f"{process.name} has ended, and is started again: {process.last_line}")
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_S
            self._tell_replicas()

    def _tell_replicas(self) -> None:
        """Say which replicas there are, where that has changed."""
        status = read_status(self._cluster.folder)
        if status is None:
            return
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
        for processes, seconds in ((self._gateways, grace_s + END_S), (controller, END_S)):
            for process in processes:
                process.signal(signal.SIGTERM)
            for process in processes:
                process.wait(seconds, lambda: self._num_signals > max(1, first))


def read_status(folder: Path) -> dict[str, Any] | None:
    """Returns what the controller wrote last; None where there is nothing yet."""
    try:
        return dict(json.loads((folder / STATUS).read_text()))
    except (OSError, ValueError):
        return None


def _claim(folder: Path) -> None:
    """Raises `ConfigError` where a cluster runs in this folder; else leaves nothing there of one that ran."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    running = read_mark(folder / UP)
    if running is not None:
        hint = "end it with Ctrl-C or SIGTERM, or set folder in one of the two configs"
        message = f"a cluster runs in {folder}, process {running.pid}"
        raise ConfigError(message, param="folder", value=str(folder), hint=hint)
    for name in (STATE, STATUS, REREAD):
        (folder / name).unlink(missing_ok=True)
    for mark in folder.glob("gateway-*.json"):
        mark.unlink()
    write_mark(folder / UP, os.getpid())
