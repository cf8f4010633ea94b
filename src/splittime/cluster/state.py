"""What the controller has decided and would have to know again if it were killed: kept in one file, written whole.

The folder of a running cluster: which file is what.

state.json            what the controller decided, and by which config (`state`)
status.json           what it sees, for `splittime up --status`
up.json               the process of `splittime up`
reread                is there where the config's file is to be taken
gateway-N.toml, .json each gateway's config and process
replicas/             files of replicas on this machine
*.log                 what each process had to say

The gateways' config files: what `[gateway]` says, with the replicas that serve as their upstreams.

A gateway reads its file when it starts and on SIGHUP, so the file is the truth, whoever of both was killed.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.cluster.config import Cluster, ClusterConfig, ReplicaLaunch, UpstreamTimes
from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.routing.policy import version_of

DEFAULT_PORT = 8100
HOLD = {"name": "none-yet", "url": "http://127.0.0.1:9", "max_in_flight": 0}  # nobody: what comes waits
SIGN_OF_LIFE_S = 1.0
FILES_OF_ONE = (("ledger_file",), ("audit", "file"), ("cache", "file"))  # two cannot both write them
LOST_S = 10.0  # without an answer to a question that takes a millisecond: a replica is lost
FIRST_FAILURES = 5  # after which a gateway leaves a dead replica alone, by its breaker's default
MAX_ATTEMPTS = 5  # of one request: replicas die side by side; so many die of a request that kills them
STATE, STATUS, UP, REPLICAS = "state.json", "status.json", "up.json", "replicas"
REREAD = "reread"
KEPT_EVENTS = 64  # in status.json


def max_in_flight(max_num_seqs: int) -> int:
    """Returns how many requests a replica is given at once: so many run, and as many wait to follow."""
    return 2 * max_num_seqs


def _retries(max_num_seqs: int) -> dict[str, Any]:
    """Returns bounds with room for a replica's end: all that it had without a byte of an answer is sent again, though
    there may be few other requests."""
    return {"max_attempts": MAX_ATTEMPTS, "spare": max_in_flight(max_num_seqs) + FIRST_FAILURES}


class ListedReplica(NamedTuple):
    """One that serves. resumes: another may go on with its streams."""

    name: str
    url: str
    launch: ReplicaLaunch
    resumes: bool


def gateway_config(
    config: ClusterConfig, launch: ReplicaLaunch, number: int, listed: Sequence[ListedReplica]
) -> tuple[GatewayConfig, str]:
    """Returns the config of the gateway of this number, from 0 on, and its file's text. Raises `ConfigError`."""
    table = dict(config.gateway)
    port = table.get("port", DEFAULT_PORT)
    table["port"] = port + number if isinstance(port, int) and port else port
    table["queue"] = {"sign_of_life_s": SIGN_OF_LIFE_S} | dict(table.get("queue", {}))
    table["retries"] = _retries(launch.max_num_seqs) | dict(table.get("retries", {}))
    if number:
        table = _with_own_files(table, number)
    table["upstream"] = [_upstream(one, config.times) for one in listed] or [{**HOLD, "models": list(launch.models)}]
    try:
        return config_of(table), toml_of(table)
    except ConfigError as error:
        info = error.info
        param = f"gateway.{info.param}"
        raise ConfigError(
            f"[gateway]: {info.message}", param=param, value=info.value, limit=info.limit, hint=info.hint
        ) from None


def _with_own_files(table: Mapping[str, Any], number: int) -> dict[str, Any]:
    own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}
    for *tables, name in FILES_OF_ONE:
        inner = own.get(tables[0], {}) if tables else own
        if isinstance(inner, dict) and isinstance(inner.get(name), str):
            path = Path(inner[name])
            inner[name] = str(path.with_stem(f"{path.stem}-{number}"))
    return own


def _upstream(one: ListedReplica, times: UpstreamTimes) -> dict[str, Any]:
    key = one.launch.replica.key_env
    given = {name: told for name, told in msgspec.structs.asdict(times).items() if told is not None}
    return {
        "name": one.name,
        "url": one.url,
        "models": list(one.launch.models),
        "kind": "splittime",
        "resume": one.resumes,
        "max_in_flight": max_in_flight(one.launch.max_num_seqs),
        **({} if key is None else {"key_env": key}),
        **given,
    }


def digest_of(config: GatewayConfig) -> str:
    """Returns what the gateway that has taken this config says of it."""
    return version_of(config)


def operator_key(config: GatewayConfig) -> str | None:
    """Returns a key with which a gateway's state may be read; None where none is asked for. Raises `ConfigError` where
    there is none to be had."""
    secrets_of(config)  # says what is wrong with keys
    if not config.tenant:
        return None
    readable = [one for one in config.tenant if one.operator and (one.key_env or one.key_file)]
    if not readable:
        hint = "give a [[gateway.tenant]] with operator = true its key by key_env or key_file"
        raise ConfigError("no operator's key can be read", param="gateway.tenant", hint=hint)
    one = readable[0]
    return os.environ[one.key_env] if one.key_env else Path(str(one.key_file)).read_text(encoding="utf-8").strip()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it has all of the old one or all of the new one."""
    coming = path.with_name(path.name + ".new")
    coming.touch(mode=0o600)
    coming.write_bytes(data)
    os.replace(coming, path)


def toml_of(table: Mapping[str, Any]) -> str:
    """Returns a table as TOML, a key a line."""
    return "".join(f"{_text(name)} = {_value(value)}\n" for name, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)} = {_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise ConfigError(f"{value!r} is no value of a gateway's config", param="gateway", value=str(value))


def _text(text: str) -> str:
    """Returns a text as TOML has it: as JSON, but for pairs of surrogates and one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
