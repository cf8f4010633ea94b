"""What `cluster.toml` may say, and what follows from it: how a replica is started, and by which names it is asked.

Each error names the key, its value, what it may be and a way out.

How many replicas a load needs, from how many it has needed of late: at once upward, slowly downward.

Load is in tokens that run and wait, capacity in tokens that a replica has room for. What needs fewer replicas now and
needed more a moment ago keeps those it has; what needs more replicas for a blink of `up_delay_s` gets none.
"""

import difflib
import re
import tomllib
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from splittime.assemble import model_source
from splittime.assemble.settings import BY_NAME, Settings, load
from splittime.bench.own_server import as_typed
from splittime.core.errors import ConfigError
from splittime.core.settings import Doc, meaning_of
from splittime.gateway.config import CanaryConfig, Strictly
from splittime.gateway.config_file import check_table
from splittime.runner.config import RunnerConfig

Opinions = deque[tuple[int, int]]  # when, how many
EMPTY = "name a file in TOML; an empty one will do to begin with"
OWN_OF_REPLICAS = {  # settings of `serve` that cannot be the same for all, or that the cluster itself decides on
    **dict.fromkeys(("host", "port"), "each replica has a port of its own; [gateway] has the address for clients"),
    **dict.fromkeys(("api_key", "api_keys_file", "metrics_api_key"), "key_env in [replica] names the replicas' key"),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile"), "give [gateway] a certificate; replicas speak plain HTTP"),
    **dict.fromkeys(("ledger_file", "root_path"), "give [gateway] a ledger_file"),
    **dict.fromkeys(
        ("kv_peers", "kv_peer_key", "kv_export"),
        "leave it out, and set shares_blocks in [replica]: each replica has another port",
    ),
}
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)


class ScaleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[scale]`: between which numbers of replicas, and how fast."""

    min_replicas: Annotated[int, Doc("Replicas at the least; 0: none while nobody asks.", 0, 10_000)] = 1
    max_replicas: Annotated[int, Doc("Replicas that serve, at the most.", 1, 10_000)] = 4
    spare: Annotated[int, Doc("Replicas beyond what the load needs: so many may be lost.", 0, 1000)] = 1
    target: Annotated[float, Doc("Of its capacity, what a replica is to have to do.", 0.01, 1)] = 0.7
    up_delay_s: Annotated[float, Doc("For how long more must be needed before more are started.", 0, 600)] = 2.0
    down_delay_s: Annotated[float, Doc("For how long fewer must be enough before one is drained.", 1, 86400)] = 300.0
    idle_s: Annotated[float, Doc("Without a request, until none is kept; with min_replicas = 0.", 1, 10**6)] = 600.0
    warm_pool: Annotated[int, Doc("Sleeping replicas beside those that serve.", 0, 1000)] = 0
    surge: Annotated[int, Doc("Replicas beyond max_replicas while others end.", 1, 1000)] = 1
    drain_s: Annotated[float, Doc("How long a replica may take to finish what it has.", 1, 86400)] = 600.0


class ScaleLoad(NamedTuple):
    """tokens: that run and wait, at replicas and before them. capacity_tokens: of one replica; 0: not known yet."""

    tokens: int
    capacity_tokens: float


class ReplicaCount:
    """`noted` takes a load at an instant and returns how many replicas there should be, of as many as there are.
    num_before: so many are taken to have been needed until now: somebody else had decided on them."""

    def __init__(self, settings: ScaleSettings, num_before: int = 0) -> None:
        self._settings, self._num_before = settings, min(num_before, settings.max_replicas)
        self._falling: Opinions = deque()  # each the most from then on, so there are no more than replicas
        self._rising: Opinions = deque()  # each the least from then on
        self._busy_ns: int | None = None
        self.needed = 0  # for the latest load alone

    def noted(self, at_ns: int, load: ScaleLoad, num_awake: int) -> int:
        settings = self._settings
        if self._busy_ns is None:
            self._falling.append((at_ns, self._num_before))
        if load.tokens or self._busy_ns is None:
            self._busy_ns = at_ns
        self.needed = self._needed(at_ns - self._busy_ns, load)
        while self._falling and self._falling[-1][1] <= self.needed:
            self._falling.pop()
        while self._rising and self._rising[-1][1] >= self.needed:
            self._rising.pop()
        least = _first_since(self._rising, at_ns, self.needed, settings.up_delay_s)
        most = _first_since(self._falling, at_ns, self.needed, settings.down_delay_s)
        if self.needed == 0 or num_awake == 0:
            return self.needed
        return min(max(num_awake, least), most)

    def _needed(self, idle_ns: int, load: ScaleLoad) -> int:
        settings = self._settings
        if settings.min_replicas == 0 and idle_ns >= settings.idle_s * 1e9:
            return 0
        room = load.capacity_tokens * settings.target
        busy = max(1, ceil(load.tokens / room)) if room else 1
        return min(max(busy + settings.spare, settings.min_replicas), settings.max_replicas)


def _first_since(opinions: Opinions, at_ns: int, number: int, delay_s: float) -> int:
    """Add an opinion, forget those that are older than the delay, and return what the oldest says that is left."""
    opinions.append((at_ns, number))
    while opinions[0][0] < at_ns - delay_s * 1e9:
        opinions.popleft()
    return opinions[0][1]


class ReplicaConfig(Strictly, frozen=True, kw_only=True):
    """`[replica]`: what each is given, and how it is looked at."""

    cpus: Annotated[float, Doc("CPU cores that Ray sets aside for it.", 0, 4096)] = 1.0
    gpus: Annotated[float, Doc("GPUs that Ray sets aside for it.", 0, 64)] = 0.0
    resources: Annotated[dict[str, float], Doc("Other resources of Ray's that it needs, by name.")] = msgspec.field(
        default_factory=dict
    )
    key_env: Annotated[str | None, Doc("The environment variable with the key that replicas ask for.")] = None
    on_network: Annotated[bool, Doc("It listens on its node's address and not on loopback; needs key_env.")] = False
    capacity_tokens: Annotated[
        int | None, Doc("Tokens that may run and wait there while it keeps its SLO; default: of its KV cache.", 1)
    ] = None
    sleep_level: Annotated[int, Doc("How deep it sleeps in the warm pool: 1 keeps weights, 2 does not.", 1, 2)] = 2
    start_s: Annotated[float, Doc("One that is not ready by then is given up.", 1, 86400)] = 600.0
    shares_blocks: Annotated[
        bool, Doc("One that starts takes the cached blocks that those which serve used latest, and asks them for more.")
    ] = False


class UpstreamTimes(Strictly, frozen=True, kw_only=True):
    """`[times]`: how long the gateways wait for replicas, in seconds; what is left out is as of `[[upstream]]`."""

    connect_s: Annotated[float | None, Doc("To connect.", 0.001, 3600)] = None
    first_byte_s: Annotated[
        float | None,
        Doc("To a stream's first byte; of a whole answer: until it is asked whether it lives.", 0.001, 86400),
    ] = None
    whole_answer_s: Annotated[float | None, Doc("To an answer that is no stream.", 0.001, 86400)] = None
    between_s: Annotated[float | None, Doc("Between two pieces of an answer.", 0.001, 86400)] = None
    total_s: Annotated[float | None, Doc("For a request, all attempts and waiting included.", 0.001, 86400)] = None


class ClusterConfig(Strictly, frozen=True, kw_only=True):
    """The file's own keys and its tables. serve: settings as of `splittime serve`. gateway: as of `gateway.toml`, but
    for its upstreams. canary: None: another revision is not tried first."""

    model: Annotated[str | None, Doc("As of `splittime serve`; default: the model in the package.")] = None
    runner: Annotated[
        Literal["local", "ray"], Doc("What starts replicas: processes of this machine, or actors of Ray.")
    ] = "local"
    ray_address: Annotated[
        str | None, Doc("HOST:PORT of a Ray cluster; default: one on this machine, for as long as this runs.")
    ] = None
    gateways: Annotated[
        int, Doc("Gateways, on ports one after the other; shared_port in [gateway]: and at that one.", 1, 16)
    ] = 1
    folder: Annotated[str | None, Doc("For its files; default: the config's name with .run behind it.")] = None
    serve: dict[str, Any] = msgspec.field(default_factory=dict)
    gateway: dict[str, Any] = msgspec.field(default_factory=dict)
    replica: ReplicaConfig = ReplicaConfig()
    scale: ScaleSettings = ScaleSettings()
    times: UpstreamTimes = UpstreamTimes()
    canary: CanaryConfig | None = None


TABLES: dict[str, type[msgspec.Struct]] = {
    "replica": ReplicaConfig,
    "scale": ScaleSettings,
    "times": UpstreamTimes,
    "canary": CanaryConfig,
}


class ReplicaLaunch(msgspec.Struct, frozen=True):
    """All that makes one replica like another. flags: of `splittime serve`. models: by which names it is asked."""

    flags: tuple[str, ...]
    models: tuple[str, ...]
    max_num_seqs: int
    block_size: int
    replica: ReplicaConfig

    @property
    def revision(self) -> str:
        """Returns a name for it that another launch does not have."""
        return sha256(msgspec.json.encode(self)).hexdigest()[:12]


class Cluster(NamedTuple):
    """A config with what follows from it. folder: for files of the running cluster."""

    config: ClusterConfig
    launch: ReplicaLaunch
    folder: Path


def read_cluster(path: Path) -> Cluster:
    """Returns what the file says, checked. Raises `ConfigError`. Fetches the model's files where they are on a hub."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # errors of TOML and of UTF-8 are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}", param="config", value=str(path), hint=EMPTY) from error
    config = cluster_config(told)
    return Cluster(config, launch_of(config), _folder(path, config.folder))


def folder_of(path: Path) -> Path:
    """Returns the folder that the file names, whatever else is wrong with it; the default where it cannot be read."""
    try:
        named = tomllib.loads(path.read_text(encoding="utf-8")).get("folder")
    except (OSError, ValueError):
        named = None
    return _folder(path, named if isinstance(named, str) else None)


def _folder(path: Path, named: str | None) -> Path:
    return (Path(named) if named else path.with_suffix(".run")).absolute()


def cluster_config(told: Mapping[str, Any]) -> ClusterConfig:
    """Returns the config that a mapping describes. Raises `ConfigError`."""
    try:
        config = msgspec.convert(told, ClusterConfig)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    for name in ("", "replica", "scale", "times", "canary"):
        table = getattr(config, name) if name else config
        if table is not None:
            check_table(name, table)
    _check_together(config)
    return config


def launch_of(config: ClusterConfig) -> ReplicaLaunch:
    """Returns how a replica is started. Raises `ConfigError` for settings that `splittime serve` would refuse."""
    secret = "leave it out: it would stand in each replica's command line and in state.json"
    for name in config.serve:
        is_secret = name in BY_NAME and BY_NAME[name].doc.is_secret
        hint = OWN_OF_REPLICAS.get(name) or (secret if is_secret else None)
        if hint is not None:
            raise ConfigError(f"serve.{name} is not for replicas", param=f"serve.{name}", hint=hint)
    settings = load({"model": config.model, **config.serve}, config=Path("/dev/null"), environ={})
    folder = model_source.locate(config.model, settings["load_format"])
    _check_sharing(config.replica, settings, folder)
    flags = [word for name in config.serve for word in as_typed(name, settings[name])]
    flags += ["--kv-export"] * config.replica.shares_blocks
    names = settings["served_model_name"] or (model_source.default_name(config.model, folder),)
    model = [] if config.model is None else [config.model]
    return ReplicaLaunch(
        tuple(model + flags), tuple(names), settings["max_num_seqs"], settings["block_size"], config.replica
    )


def _check_sharing(replica: ReplicaConfig, settings: Settings, folder: Path) -> None:
    """Raises `ConfigError` where replicas cannot share blocks, as far as that is known before one has begun."""
    if not replica.shares_blocks:
        return
    auto = "triton" if replica.gpus else "native"
    kernels = auto if settings["kernels"] == "auto" else settings["kernels"]
    obstacles = RunnerConfig(model_path=str(folder), **settings.part("runner")).sharing_obstacles(kernels)
    if obstacles:
        hint = "leave shares_blocks out of [replica], or leave out of [serve] what stands in its way"
        message = f"replica.shares_blocks does not go with {obstacles[0]}"
        raise ConfigError(message, param="replica.shares_blocks", value=True, hint=hint)


def _check_together(config: ClusterConfig) -> None:
    scale, replica = config.scale, config.replica
    if scale.min_replicas > scale.max_replicas:
        message = f"scale.min_replicas = {scale.min_replicas} is more than max_replicas"
        hint = "raise max_replicas, or lower min_replicas"
        raise ConfigError(
            message, param="scale.min_replicas", value=scale.min_replicas, limit=scale.max_replicas, hint=hint
        )
    if replica.on_network and replica.key_env is None:
        hint = "set key_env to the name of an environment variable that holds a key"
        raise ConfigError("replica.on_network needs a key", param="replica.on_network", value=True, hint=hint)
    if replica.on_network and config.runner != "ray":
        hint = 'leave it out: replicas of this machine listen on loopback; runner = "ray" has other machines'
        raise ConfigError("replica.on_network is for Ray", param="replica.on_network", value=True, hint=hint)
    if config.ray_address is not None and config.runner != "ray":
        hint = 'set runner = "ray", or leave ray_address out'
        raise ConfigError("ray_address is for Ray", param="ray_address", value=config.ray_address, hint=hint)
    if config.gateway.get("port") == 0:
        hint = "name a port, or leave it out: 8100 it is then; the controller and clients must know it"
        raise ConfigError(
            "gateway.port = 0 is not for a cluster", param="gateway.port", value=0, limit=[1, 65535], hint=hint
        )
    if "upstream" in config.gateway:
        hint = "the replicas are its upstreams; leave it out"
        raise ConfigError("gateway.upstream is not for a cluster", param="gateway.upstream", hint=hint)


def _refusal(message: str) -> ConfigError:
    unknown = _UNKNOWN.search(message)
    if not unknown:
        _, _, where = message.partition(" - at `$.")
        path, _, key = where.rstrip("`").rpartition(".")
        hint = meaning_of(TABLES.get(path, ClusterConfig), key)
        return ConfigError(message.replace(" - at `$.", " - at `"), param="config", hint=hint)
    table: type[msgspec.Struct] = TABLES.get(unknown[2] or "") or ClusterConfig
    near = difflib.get_close_matches(unknown[1], table.__struct_fields__, n=1)
    name = f"{unknown[2]}.{unknown[1]}" if unknown[2] else unknown[1]
    hint = f"did you mean {near[0]}?" if near else meaning_of(table, unknown[1])
    return ConfigError(f"{name}: no such key", code="unknown_key", param=name, hint=hint)
