"""Replicas as actors of Ray: it finds a node with what each needs, and the actor runs our server as its child.

An actor is detached and has a name, so a controller that was started anew finds it. It does not restart its server:
whether there is to be another, and where, is the controller's to decide. No request passes through Ray.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from splittime.bench.own_server import as_typed
from splittime.cluster.config import Cluster, ReplicaLaunch
from splittime.cluster.places import END_S, key_of
from splittime.cluster.replica_process import ReplicaProcess, ReplicaSeen

LOOPBACK = "127.0.0.1"
LOOK_S = 1.0  # for actors to answer
ALONE_S = 300.0  # an actor that is not asked for so long has no cluster any more


class ReplicaActor:
    """What runs in Ray's worker: one server, which ends with it; and both end where nobody has looked for long."""

    def __init__(
        self, name: str, flags: tuple[str, ...], key: str | None, on_network: bool, in_background: bool = False
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"splittime-{name}-"))
        self._process = ReplicaProcess(self._folder, name)
        self._last: tuple[bool, str | None, str] | None = None
        flags = (*flags, "--host", _own_address() if on_network else LOOPBACK)
        self._process.begin(flags, key, os.getpid(), in_background=in_background)
        self._looked_s = time.monotonic()
        threading.Thread(target=self._end_alone, name="end-alone", daemon=True).start()

    def look(self) -> tuple[bool, str | None, str]:
        """Returns what `ReplicaSeen` has. Takes the files away of a server that has ended."""
        self._looked_s = time.monotonic()
        seen = self._last or self._process.look()
        if not seen[0]:
            self._last = (seen[0], seen[1], seen[2])
            shutil.rmtree(self._folder, ignore_errors=True)
        return seen[0], seen[1], seen[2]

    def end(self, sign: int) -> None:
        self._process.end(signal.Signals(sign))

    def _end_alone(self) -> None:
        while time.monotonic() - self._looked_s < ALONE_S:
            time.sleep(ALONE_S / 100)
        self._process.end()
        until_s = time.monotonic() + END_S
        while self._process.look().is_alive and time.monotonic() < until_s:
            time.sleep(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


class RayPlaces:
    """address: of the Ray cluster."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        import ray

        self._ray: Any = ray
        self._namespace = namespace_of(cluster.folder)
        self._ray.init(address=address, namespace=self._namespace, log_to_driver=False, logging_level="ERROR")
        self._actors: dict[str, Any] = {}
        for name in self._ray.util.list_named_actors():
            with suppress(ValueError):  # it has ended since
                self._actors[name] = self._ray.get_actor(name)
        self._seen: dict[str, ReplicaSeen] = {}
        self._ending: dict[str, float] = {}  # until when

    def start(
        self, name: str, launch: ReplicaLaunch, peers: Sequence[str] = (), *, in_background: bool = False
    ) -> None:
        told = launch.replica
        made = self._ray.remote(ReplicaActor).options(
            name=name,
            lifetime="detached",
            num_cpus=told.cpus,
            num_gpus=told.gpus,
            resources=dict(told.resources),
            max_restarts=0,
        )
        flags = (*launch.flags, *as_typed("kv_peers", peers))
        self._actors[name] = made.remote(name, flags, key_of(launch), told.on_network, in_background)

    def look(self) -> Mapping[str, ReplicaSeen]:
        """One that has no place yet, or does not answer in time, is as it was."""
        self._look()
        self._kill_late()
        begun = ReplicaSeen(is_alive=True, url=None)
        return {name: self._seen.get(name, begun) for name in self._actors if name not in self._ending}

    def _look(self) -> None:
        asked = {actor.look.remote(): name for name, actor in self._actors.items()}
        if not asked:
            return
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)
        for reference in answered:
            try:
                self._seen[asked[reference]] = ReplicaSeen(*self._ray.get(reference))
            except self._ray.exceptions.RayActorError as error:
                self._seen[asked[reference]] = ReplicaSeen(is_alive=False, url=None, words=str(error)[-500:])

    def end(self, name: str) -> None:
        if name in self._actors:
            self._actors[name].end.remote(int(signal.SIGTERM))
            self._ending[name] = time.monotonic() + END_S

    def close(self) -> None:
        for name in self._actors:
            if name not in self._ending:
                self.end(name)
        while self._ending:
            self._look()
            self._kill_late()
            time.sleep(0.05)
        self._ray.shutdown()

    def _kill_late(self) -> None:
        """Take away actors whose servers have ended, or have had long enough; a server ends with its actor."""
        for name, until_s in list(self._ending.items()):
            seen = self._seen.get(name)
            has_begun = seen is not None and seen.is_alive
            if not has_begun or time.monotonic() > until_s:
                self._ray.kill(self._actors.pop(name))
                self._seen.pop(name, None)
                del self._ending[name]


def namespace_of(folder: Path) -> str:
    """Returns where this cluster's actors are, apart from others': by its folder."""
    return "splittime" + str(folder).replace("/", "-")


def _own_address() -> str:
    """Returns this node's address."""
    import ray

    return str(ray.util.get_node_ip_address())
