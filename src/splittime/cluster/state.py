"""What the controller has decided and would have to know again if it were killed: kept in one file, written whole.

The folder of a running cluster: which file is what.

state.json            what the controller decided, and by which config (`state`)
status.json           what it sees, for `splittime up --status`
up.json               the process of `splittime up`
reread                is there where the config's file is to be taken
gateway-N.toml, .json each gateway's config and process
replicas/             files of replicas on this machine
*.log                 what each process had to say
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from splittime.cluster.config import Cluster, ClusterConfig, ReplicaLaunch
from splittime.cluster.gateway_files import write_whole
from splittime.cluster.replica_process import ProcessMark

STATE, STATUS, UP, REPLICAS = "state.json", "status.json", "up.json", "replicas"
REREAD = "reread"
KEPT_EVENTS = 64  # in status.json


class GatewayFiles(NamedTuple):
    """The files of one gateway."""

    folder: Path
    number: int

    @property
    def config(self) -> Path:
        return self.folder / f"gateway-{self.number}.toml"

    @property
    def mark(self) -> Path:
        """Its process; it is there once the gateway listens, and may be told of another config."""
        return self.folder / f"gateway-{self.number}.json"


def write_mark(path: Path, pid: int) -> None:
    mark = ProcessMark.of(pid)
    if mark is not None:
        write_whole(path, json.dumps(mark).encode())


def read_mark(path: Path) -> ProcessMark | None:
    """Returns the process that a file names; None if there is none, or it has ended."""
    try:
        mark = ProcessMark(*json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return mark if mark.is_alive else None


class ReplicaPhase(StrEnum):
    """What a replica was last told to be; whether it is there yet, its process and its answers tell."""

    STARTING = "starting"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    WAKING = "waking"


class ManagedReplica(msgspec.Struct):
    """One replica. since_unix_s: when its phase began."""

    revision: str
    phase: ReplicaPhase
    since_unix_s: float
    url: str | None = None


class ClusterState(msgspec.Struct):
    """config: that was taken last. launches: how replicas of a revision are started, by its name. revision: that all
    should have. trial: that one has, to be compared. num_started: of all time, for names."""

    config: ClusterConfig
    revision: str
    launches: dict[str, ReplicaLaunch]
    trial: str | None = None
    num_started: int = 0
    replicas: dict[str, ManagedReplica] = {}

    @classmethod
    def begun(cls, cluster: Cluster) -> "ClusterState":
        """Names go on behind those of earlier clusters in this folder, whose replicas may still be there."""
        numbers = (path.stem[1:] for path in (cluster.folder / REPLICAS).glob("r*.json"))
        num_started = max((int(number) for number in numbers if number.isdecimal()), default=0)
        launch = cluster.launch
        return cls(cluster.config, launch.revision, {launch.revision: launch}, num_started=num_started)

    def forget_launches(self) -> None:
        """Keep the launches of revisions that are wanted, tried or there."""
        used = {self.revision, self.trial, *(one.revision for one in self.replicas.values())}
        self.launches = {name: launch for name, launch in self.launches.items() if name in used}


def taken_cluster(folder: Path) -> Cluster | None:
    """Returns the cluster by the config that was taken last, whatever its file says by now; None where none was."""
    state = StateFile(folder).read()
    return None if state is None else Cluster(state.config, state.launches[state.revision], folder)


class StateFile:
    """Writes a state where it has changed. `read` gives None where there is none, or one that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path, self._written = folder / STATE, b""

    def read(self) -> ClusterState | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: ClusterState) -> None:
        data = msgspec.json.encode(state)
        if data != self._written:
            write_whole(self._path, data)
            self._written = data
