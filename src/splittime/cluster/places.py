"""Where replicas run: what the controller asks of this machine or of Ray, and this machine's answer."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from splittime.bench.own_server import as_typed
from splittime.cluster.config import ReplicaLaunch
from splittime.cluster.replica_process import ReplicaProcess, ReplicaSeen
from splittime.core.errors import ConfigError

KEPT_LOGS = 16  # of replicas that have ended
END_S = 60.0  # from SIGTERM until a replica is killed: longer than `--grace-s`, and what comes behind it


class ReplicaPlaces(Protocol):
    """None of these waits for a replica. Names are the controller's, and none is used twice."""

    def start(
        self, name: str, launch: ReplicaLaunch, peers: Sequence[str] = (), *, in_background: bool = False
    ) -> None:
        """peers: the addresses of replicas whose cached blocks it may have. in_background: it leaves the processors to
        those that serve beside it for a while (`core.background`)."""
        ...

    def look(self) -> Mapping[str, ReplicaSeen]:
        """Returns what is seen of all that were started and not ended, also by a controller before this one."""
        ...

    def end(self, name: str) -> None:
        """Have it finish what it has, and end; kill it if it does not. Nothing is done about one that is not known."""
        ...

    def close(self) -> None:
        """Return when all have ended."""
        ...


class LocalPlaces:
    """Processes of this machine. ends_with: the process with which they end, however that ends."""

    def __init__(self, folder: Path, ends_with: int) -> None:
        if not sys.platform.startswith("linux"):
            hint = "use Linux, or one `splittime serve` for each replica and `splittime gateway` in front"
            raise ConfigError(
                'runner "local" needs Linux', param="runner", value=sys.platform, limit=["linux"], hint=hint
            )
        self._folder, self._ends_with = folder, ends_with
        folder.mkdir(exist_ok=True)
        self._known = {name: ReplicaProcess(folder, name) for name in ReplicaProcess.names(folder)}
        self._ending: dict[str, float] = {}  # until when

    def start(
        self, name: str, launch: ReplicaLaunch, peers: Sequence[str] = (), *, in_background: bool = False
    ) -> None:
        process = self._known[name] = ReplicaProcess(self._folder, name)
        flags = (*launch.flags, *as_typed("kv_peers", peers))
        process.begin(flags, key_of(launch), self._ends_with, in_background=in_background)

    def look(self) -> Mapping[str, ReplicaSeen]:
        self._kill_late()
        return {name: process.look() for name, process in self._known.items() if name not in self._ending}

    def end(self, name: str) -> None:
        if name in self._known:
            self._known[name].end()
            self._ending[name] = time.monotonic() + END_S

    def close(self) -> None:
        for name in self._known:
            if name not in self._ending:
                self.end(name)
        while self._ending:
            self._kill_late()
            time.sleep(0.02)

    def _kill_late(self) -> None:
        for name, until_s in list(self._ending.items()):
            if not self._known[name].look().is_alive:
                self._known.pop(name).forget()
                del self._ending[name]
                self._forget_logs()
            elif time.monotonic() > until_s:
                self._known[name].end(signal.SIGKILL)

    def _forget_logs(self) -> None:
        ended = [path for path in self._folder.glob("*.log") if path.stem not in self._known]
        for path in sorted(ended, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_LOGS]:
            path.unlink()


def key_of(launch: ReplicaLaunch) -> str | None:
    """Returns the key that replicas ask for. Raises `ConfigError` if the environment has none."""
    name = launch.replica.key_env
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key:
        message = f"replica.key_env: the environment has no {name}"
        raise ConfigError(
            message, param="replica.key_env", value=name, hint=f"set it before the cluster starts: {name}=..."
        )
    return key
