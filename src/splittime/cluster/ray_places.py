"""Replicas as actors of Ray: it finds a node with what each needs, and the actor runs our server as its child.

An actor is detached and has a name, so a controller that was started anew finds it. It does not restart its server:
whether there is to be another, and where, is the controller's to decide. No request passes through Ray.

A Ray of a cluster's own, on this machine: loopback only, no dashboard, and a token without which it takes nothing.

A process of its own starts it, and ends it when it is told to or `splittime up` has ended. Ray gives itself half a
minute to start, which a busy machine may not have, and has been seen to wait for itself for longer: what is left of
such a start ends with that process, and another one tries again. One that ends by itself again and again cannot start.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from splittime.bench.own_server import as_typed
from splittime.cluster.config import Cluster, ReplicaLaunch
from splittime.cluster.places import END_S, key_of
from splittime.cluster.replica_process import POLL_S, ReplicaProcess, ReplicaSeen, UpProcess
from splittime.core.errors import ConfigError, EngineError
from splittime.core.this_process import end_when_gone

START_S, TRY_S, SAY_S, RAY_END_S = 180.0, 60.0, 10.0, 30.0  # of all attempts, and of one
MAX_ENDED = 3  # attempts that ended by themselves
OWN_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what it calls "no cluster": all its ports are on loopback, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_gcs_server_port_wait_time_s": f"{TRY_S:.0f}",
    "RAY_raylet_start_wait_time_s": f"{TRY_S:.0f}",
}
LOOPBACK = "127.0.0.1"
LOOK_S = 1.0  # for actors to answer
ALONE_S = 300.0  # an actor that is not asked for so long has no cluster any more


class RayHead:
    """folder: for its files. `start`, then `check` now and then, then `end`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "splittime.cluster.ray_places", str(os.getpid())]
        self._process = UpProcess(folder, "ray", command)

    def start(self, say: Callable[[str], None], is_hurried: Callable[[], bool]) -> str:
        """Returns its address, and leaves in the environment what its clients need; "" where somebody was in a hurry.
        Raises `EngineError` if it is not there in `START_S`, or has ended by itself `MAX_ENDED` times."""
        os.environ.update(OWN_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))
        self._process.start()
        begin_s, said_s, tried_s, num_ended = time.monotonic(), 0.0, 0.0, 0
        while not self._process.has_told and not is_hurried():
            lasted_s = time.monotonic() - begin_s
            if lasted_s - tried_s > TRY_S:
                self._process.signal(signal.SIGKILL)
            if self._process.attend():
                num_ended += lasted_s - tried_s <= TRY_S
                tried_s = lasted_s
                if num_ended == MAX_ENDED:
                    raise self._not_started(f"it ended {num_ended} times: {self._process.last_line}")
                say(f"Ray did not start, and is started again: {self._process.last_line}")
            if lasted_s >= said_s:
                say(f"starting Ray, for {lasted_s:.0f} of {START_S:.0f} s")
                said_s += SAY_S
            if lasted_s > START_S:
                raise self._not_started(f"not in {START_S:.0f} s")
            time.sleep(POLL_S)
        return self._process.printed if self._process.has_told else ""

    def _not_started(self, why: str) -> EngineError:
        hint = f"start one with `ray start --head`, and set ray_address. {self._process.words}"
        return EngineError(f"Ray did not start: {why}", hint=hint)

    def check(self) -> None:
        """Raises `EngineError` if it has ended: replicas have ended with it, and another would not know of them."""
        if not self._process.is_alive:
            hint = f"start the cluster again. {self._process.words}"
            raise EngineError("Ray has ended", hint=hint)

    def end(self, is_hurried: Callable[[], bool]) -> None:
        """Return when it has ended; it is killed after `RAY_END_S`, or as soon as somebody is in a hurry."""
        self._process.signal(signal.SIGTERM)
        self._process.wait(RAY_END_S, is_hurried)


def check_ray() -> None:
    """Raises `ConfigError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        hint = "pip install 'splittime[cluster]', or leave runner out: it is \"local\" then"
        raise ConfigError('runner "ray" needs Ray', param="runner", value="ray", hint=hint)


def main() -> None:
    end_when_gone(int(sys.argv[1]))
    import ray

    ended = threading.Event()
    with contextlib.redirect_stdout(sys.stderr):
        context = ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda sign, frame: ended.set())
    print(context.address_info["gcs_address"], flush=True)
    ended.wait()
    ray.shutdown()


if __name__ == "__main__":
    main()


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
