"""The gateways' config files: what `[gateway]` says, with the replicas that serve as their upstreams.

A gateway reads its file when it starts and on SIGHUP, so the file is the truth, whoever of both was killed.

What `splittime up` holds its gateways and replicas to; `splittime fleet` has the same on paper.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from splittime.cluster.config import ClusterConfig, ReplicaLaunch, UpstreamTimes
from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.config_keys import secrets_of
from splittime.gateway.routing.policy import version_of

DEFAULT_PORT = 8100
HOLD = {"name": "none-yet", "url": "http://127.0.0.1:9", "max_in_flight": 0}  # nobody: what comes waits
SIGN_OF_LIFE_S = 1.0
FILES_OF_ONE = (("ledger_file",), ("budget_file",), ("audit", "file"), ("cache", "file"))  # two cannot both write them
LOST_S = 10.0  # without an answer to a question that takes a millisecond: a replica is lost
FIRST_FAILURES = 5  # after which a gateway leaves a dead replica alone, by its breaker's default
MAX_ATTEMPTS = 5  # of one request: replicas die side by side; so many die of a request that kills them


class RetryBounds(TypedDict):
    """What `[retries]` says where the cluster's config does not."""

    max_attempts: int
    spare: int


def max_in_flight(max_num_seqs: int) -> int:
    """Returns how many requests a replica is given at once: so many run, and as many wait to follow."""
    return 2 * max_num_seqs


def retry_bounds(max_num_seqs: int) -> RetryBounds:
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
    table["retries"] = {**retry_bounds(launch.max_num_seqs)} | dict(table.get("retries", {}))
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
