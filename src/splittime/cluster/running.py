"""The folder of a running cluster: which file is what.

state.json            what the controller decided, and by which config (`state`)
status.json           what it sees, for `splittime up --status`
up.json               the process of `splittime up`
reread                is there where the config's file is to be taken
gateway-N.toml, .json each gateway's config and process
replicas/             files of replicas on this machine
*.log                 what each process had to say
"""

import json
from pathlib import Path
from typing import NamedTuple

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
