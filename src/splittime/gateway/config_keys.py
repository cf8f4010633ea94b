"""Reads the keys that a config points at, and the files of labels that it names.

Keys stand in no config. A file of one is small and regular, so nobody waits for it.
"""

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from splittime.core.errors import ConfigError
from splittime.core.small_file import read_small
from splittime.gateway.config import (
    EmbedderConfig,
    GatewayConfig,
    MetricsConfig,
    TenantConfig,
    TracingConfig,
    UpstreamConfig,
)
from splittime.gateway.routing.first_tokens import bounds_of
from splittime.gateway.routing.judge import ChosenThreshold, DifficultyJudge, judges_of
from splittime.web.tenants import Tenant, check_key

MAX_KEY_BYTES = 64 * 1024
TRACING = "[tracing]"
EMBEDDER = "[embedder]"  # among upstreams' keys: no upstream has such a name
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

KeyedTable = UpstreamConfig | TenantConfig | EmbedderConfig | TracingConfig | MetricsConfig


class Secrets(NamedTuple):
    """What the config only points at. upstream_keys: by the upstream's name. holders: digests of tenants' keys.
    metrics_key: the digest of that for `/metrics` alone. judges, bounds: made of files of labels, by the model of their
    `[[difficulty]]`."""

    upstream_keys: dict[str, str]
    holders: tuple[tuple[bytes, Tenant], ...]
    metrics_key: bytes | None = None
    judges: Mapping[str, DifficultyJudge] = {}
    bounds: Mapping[str, ChosenThreshold] = {}


def secrets_of(config: GatewayConfig, environment: Mapping[str, str] | None = None) -> Secrets:
    """Returns the keys and labels that the config points at. Raises `ConfigError`, without the key, for one that is not
    there. Takes up to half a minute for long files of labels."""
    environment = os.environ if environment is None else environment
    keys = {}
    for number, upstream in enumerate(config.upstream):
        key = _key_of(upstream, f"upstream[{number}]", environment)
        if key is not None:
            keys[upstream.name] = key
    if config.embedder is not None and (key := _key_of(config.embedder, "embedder", environment)) is not None:
        keys[EMBEDDER] = key
    if config.tracing is not None and (key := _key_of(config.tracing, "tracing", environment)) is not None:
        keys[TRACING] = key
    holders = [_holder(tenant, f"tenant[{number}]", environment) for number, tenant in enumerate(config.tenant)]
    metrics_key = None if config.metrics is None else _digest_of(config.metrics, "metrics", environment)
    return Secrets(keys, tuple(holders), metrics_key, judges_of(config), bounds_of(config))


def _key_of(table: KeyedTable, path: str, environment: Mapping[str, str]) -> str | None:
    """Returns the key that a table points at; None if it points at none."""
    if table.key_env is not None and table.key_file is not None:
        raise ConfigError(f"{path} has key_env and key_file", param=f"{path}.key_env", hint="keep one of them")
    if table.key_env is not None:
        key, param = environment.get(table.key_env, ""), f"{path}.key_env"
        if not key:
            hint = f"set it before the gateway starts: {table.key_env}=..."
            message = f"{param}: the environment has no {table.key_env}"
            raise ConfigError(message, param=param, value=table.key_env, hint=hint)
    elif table.key_file is not None:
        param = f"{path}.key_file"
        key = _read_key(table.key_file, param)
    else:
        return None
    check_key(key, param)
    return key


def _read_key(path: str, param: str) -> str:
    try:
        return read_small(path, MAX_KEY_BYTES).decode().strip()
    except (OSError, ValueError) as error:  # a path with a NUL, and what is no UTF-8
        hint = "write the key, and nothing else, into that file"
        raise ConfigError(f"{param}: cannot read {path}: {error}", param=param, value=path, hint=hint) from error


def _holder(tenant: TenantConfig, path: str, environment: Mapping[str, str]) -> tuple[bytes, Tenant]:
    return _digest_of(tenant, path, environment), Tenant(
        name=tenant.name,
        is_operator=tenant.operator,
        weight=tenant.weight,
        max_open_requests=tenant.max_open_requests,
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
    )


def _digest_of(table: TenantConfig | MetricsConfig, path: str, environment: Mapping[str, str]) -> bytes:
    """Returns the digest of the one key that a table has, or points at."""
    key = _key_of(table, path, environment)
    if (key is None) == (table.sha256 is None):
        hint = "give one of key_env, key_file and sha256"
        raise ConfigError(f"{path} needs one key", param=f"{path}.key_env", hint=hint)
    if key is None and not _DIGEST.fullmatch(table.sha256 or ""):
        hint = "as `printf %s KEY | sha256sum` prints it"
        raise ConfigError(f"{path}.sha256 is not 64 hexadecimal digits", param=f"{path}.sha256", hint=hint)
    known = bytes.fromhex(table.sha256 or "") if key is None else sha256(key.encode()).digest()
    if known == sha256(b"").digest():  # who sends no key would have it
        raise ConfigError(f"{path}.sha256 is that of an empty key", param=f"{path}.sha256", hint="hash a key")
    return known
