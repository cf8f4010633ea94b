"""From `gateway.toml` to a `GatewayConfig`, or a `ConfigError` that names the key, its value, its limit and a way out.

A key that is planned and not built is refused by its name: nobody believes in a cache that is not there.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.settings import check
from splittime.gateway.budgets import check_budgets
from splittime.gateway.config import (
    AffinityConfig,
    AuditConfig,
    BreakerConfig,
    CacheConfig,
    CacheRoute,
    CanaryConfig,
    DegradationConfig,
    DifficultyConfig,
    EmbedderConfig,
    EscalateConfig,
    GatewayConfig,
    LintConfig,
    QueueConfig,
    RetryConfig,
    RuleConfig,
    TenantConfig,
    TiedConfig,
    TracingConfig,
    UpstreamConfig,
    VerifierConfig,
)
from splittime.gateway.degrade.check import check_ladder
from splittime.gateway.listening import check_listening
from splittime.gateway.routing.bounds import bounds_of
from splittime.gateway.routing.check import check_routing
from splittime.gateway.routing.judge import ChosenThreshold, DifficultyJudge, judges_of
from splittime.gateway.routing.regions import check_regions
from splittime.gateway.tied import check_tied
from splittime.web.certificate import check_certificate
from splittime.web.tenants import Tenant, check_key
from splittime.wire.target import Target

TABLES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("[[upstream]]", UpstreamConfig),
    ("[[tenant]]", TenantConfig),
    ("[[rule]]", RuleConfig),
    ("[[difficulty]]", DifficultyConfig),
    ("[difficulty.escalate]", EscalateConfig),
    ("[queue]", QueueConfig),
    ("[retries]", RetryConfig),
    ("[tied]", TiedConfig),
    ("[affinity]", AffinityConfig),
    ("[breaker]", BreakerConfig),
    ("[cache]", CacheConfig),
    ("[[cache_route]]", CacheRoute),
    ("[embedder]", EmbedderConfig),
    ("[verifier]", VerifierConfig),
    ("[[degradation]]", DegradationConfig),
    ("[tracing]", TracingConfig),
    ("[lint]", LintConfig),
    ("[canary]", CanaryConfig),
    ("[audit]", AuditConfig),
)
NOT_BUILT = {
    "api_key": "keys stand in no config file; use key_env or key_file",
    "budget": "a tenant's are tokens_per_day and tokens_per_month, kept in budget_file or limits_valkey",
    "cors_origins": "pages of other origins are not let in",
    "embeddings": "requests for them are passed on as others are; [embedder] names who makes vectors for the cache",
    "health_check": "upstreams are not probed; requests and the breaker tell",
    "hedge": "after_s in [tied] says when what has had no byte is sent to a second upstream",
    "key": "keys stand in no config file; use key_env, key_file or (a tenant) sha256",
    "root_path": "the gateway's paths begin at /",
    "salt": "tenants share an upstream's prefix cache; give a tenant upstreams of its own to keep them apart",
    "semantic_cache": "set semantic = true in a [[cache_route]]; it needs an [embedder] and a [verifier]",
    "shed": "shed_from in [queue] says from where on newcomers are refused by chance",
}
TRACING = "[tracing]"
EMBEDDER = "[embedder]"  # among upstreams' keys: no upstream has such a name
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_AT = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_INDEX = re.compile(r"\[[^\]]*\]")  # of a table among others


class Secrets(NamedTuple):
    """What the config only points at. upstream_keys: by the upstream's name. holders: digests of tenants' keys. judges,
    bounds: made of files of labels, by the model of their `[[difficulty]]`."""

    upstream_keys: dict[str, str]
    holders: tuple[tuple[bytes, Tenant], ...]
    judges: Mapping[str, DifficultyJudge] = {}
    bounds: Mapping[str, ChosenThreshold] = {}


def read_config(path: Path) -> GatewayConfig:
    """Returns what the file says, checked. Raises `ConfigError`."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # errors of TOML and of UTF-8 are ValueErrors
        hint = "docs/guides/gateway.md has one to begin with"
        raise ConfigError(f"cannot read {path}: {error}", param="config", value=str(path), hint=hint) from error
    return config_of(told)


def config_of(told: Mapping[str, Any]) -> GatewayConfig:
    """Returns the config that a mapping describes, as TOML reads it. Raises `ConfigError`."""
    try:
        config = msgspec.convert(told, GatewayConfig)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    _check_bounds(config)
    check_certificate(config.ssl_certfile, config.ssl_keyfile)
    _check_upstreams(config.upstream)
    _check_names("tenant", [tenant.name for tenant in config.tenant])
    check_cache(config)
    check_tied(config)
    _check_names("degradation", [stage.name for stage in config.degradation])
    check_ladder(config)
    check_budgets(config)
    _check_names("rule", [rule.name for rule in config.rule])
    check_routing(config)
    check_regions(config)
    if config.tracing is not None:
        _check_url("tracing.url", config.tracing.url)
    check_listening(config)
    return config


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
    return Secrets(keys, tuple(holders), judges_of(config), bounds_of(config))


# ---- what is refused


def _refusal(message: str) -> ConfigError:
    """Say which key, and whether it is unknown, not built, missing or of a wrong type."""
    unknown, missing, located = _UNKNOWN.search(message), _MISSING.search(message), _AT.match(message)
    if unknown:
        return _unknown_key(unknown[1], unknown[2] or "")
    if missing:
        name = _join(missing[2], missing[1])
        return ConfigError(f"{name} is missing", param=name, hint="docs/guides/gateway.md lists every key")
    param = located[2] if located else None
    what = located[1] if located else message
    return ConfigError(f"{param}: {what}", param=param, hint="docs/guides/gateway.md lists every key")


def _unknown_key(name: str, path: str) -> ConfigError:
    full = _join(path, name)
    if name in NOT_BUILT:
        hint = f"take it out: {NOT_BUILT[name]}"
        return ConfigError(f"{full} is not built", code="not_built", param=full, hint=hint)
    known = [field.name for field in msgspec.structs.fields(_struct_of(path))]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}"
    return ConfigError(f"{full}: no such key", code="unknown_key", param=full, hint=hint)


def _struct_of(path: str) -> type[msgspec.Struct]:
    tables, table = {name.strip("[]"): kind for name, kind in TABLES}, _INDEX.sub("", path).lstrip(".")
    return tables.get(table) or tables.get(table.split(".")[0], GatewayConfig)


def _check_bounds(config: GatewayConfig) -> None:
    names = ("upstream", "tenant", "rule", "difficulty", "cache_route", "degradation")
    lists = {name: getattr(config, name) for name in names}
    check_table("", config)
    for name in ("queue", "retries", "tied", "affinity", "breaker", "cache", "embedder", "verifier", "canary", "audit"):
        if getattr(config, name) is not None:
            check_table(name, getattr(config, name))
    for name, tables in lists.items():
        for number, table in enumerate(tables):
            check_table(f"{name}[{number}]", table)
    for number, route in enumerate(config.difficulty):
        if route.escalate is not None:
            check_table(f"difficulty[{number}].escalate", route.escalate)


def check_table(path: str, table: msgspec.Struct) -> None:
    """As `core.settings.check`, with the table's name before the key's."""
    try:
        check(table)
    except ConfigError as error:
        info, param = error.info, _join(path, error.info.param or "")
        message = info.message.replace(info.param or "", param, 1)
        raise ConfigError(message, param=param, value=info.value, limit=info.limit, hint=info.hint) from None


def _check_upstreams(upstreams: Sequence[UpstreamConfig]) -> None:
    if not upstreams:
        hint = '[[upstream]] with name = "a", url = "http://127.0.0.1:8000" and models = ["m"]'
        raise ConfigError("there is no [[upstream]]", param="upstream", hint=hint)
    _check_names("upstream", [upstream.name for upstream in upstreams])
    for number, upstream in enumerate(upstreams):
        path = f"upstream[{number}]"
        if not upstream.models or not all(upstream.models):
            hint = "list the names that requests use; GET /v1/models of the upstream tells them"
            raise ConfigError(f"{path}.models is empty, or has an empty name", param=f"{path}.models", hint=hint)
        _check_url(f"{path}.url", upstream.url)


def _check_url(param: str, url: str) -> None:
    hint = "a base URL is as http://127.0.0.1:8000, and its key comes from key_env or key_file"
    if "@" in url or "?" in url or "#" in url or any(character.isspace() for character in url):
        raise ConfigError(f"{param} has more than an address", param=param, hint=hint)  # without it: it may have a key
    try:
        _ = Target(url=url).address
    except ConfigError as error:
        raise ConfigError(f"{param}: {error.info.message}", param=param, value=url, hint=hint) from None


def check_cache(config: GatewayConfig) -> None:
    """Raises `ConfigError` for a route of a model that nobody serves or that stands twice, or for two stores."""
    served = {model for upstream in config.upstream for model in upstream.models}
    served |= {route.model for route in config.difficulty}
    for number, route in enumerate(config.cache_route):
        param = f"cache_route[{number}].model"
        if route.model not in served:
            hint = f"the upstreams serve {', '.join(sorted(served))}"
            raise ConfigError(f"{param}: no upstream serves {route.model!r}", param=param, value=route.model, hint=hint)
        if route.model in [other.model for other in config.cache_route[:number]]:
            raise ConfigError(f"{param}: {route.model!r} stands twice", param=param, value=route.model, hint="keep one")
        if route.semantic:
            _check_semantic(config, f"cache_route[{number}].semantic")
    _check_verifier(config)
    if config.embedder is not None:
        _check_url("embedder.url", config.embedder.url)
    if config.cache.file is not None and config.cache.valkey is not None:
        message = "cache.file: there is cache.valkey too"
        raise ConfigError(message, param="cache.file", value=config.cache.file, hint="keep one of them")


def _check_semantic(config: GatewayConfig, param: str) -> None:
    """Raises `ConfigError` where one of the two that must agree on a like question is not there."""
    lacking = [f"[{name}]" for name in ("embedder", "verifier") if getattr(config, name) is None]
    if lacking:
        hint = "add what lacks, or take semantic out: near questions alone are given wrong answers"
        message = f"{param} needs an [embedder] and a [verifier], and there is no {' and no '.join(lacking)}"
        raise ConfigError(message, param=param, hint=hint)


def _check_verifier(config: GatewayConfig) -> None:
    models = dict.fromkeys(model for upstream in config.upstream for model in upstream.models)
    if config.verifier is not None and config.verifier.model not in models:
        name, param = config.verifier.model, "verifier.model"
        hint = f"the upstreams serve {', '.join(models)}"
        raise ConfigError(f"{param}: no upstream serves {name!r}", param=param, value=name, hint=hint)


def _check_names(table: str, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            param = f"{table}[{number}].name"
            raise ConfigError(f"{param}: {name!r} stands twice", param=param, value=name, hint="give each its own")


def _join(path: str | None, name: str) -> str:
    return f"{path.lstrip('.')}.{name}" if path else name


# ---- keys


def _key_of(
    table: UpstreamConfig | TenantConfig | EmbedderConfig | TracingConfig, path: str, environment: Mapping[str, str]
) -> str | None:
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
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = "write the key, and nothing else, into that file"
        raise ConfigError(f"{param}: cannot read {path}: {error}", param=param, value=path, hint=hint) from error


def _holder(tenant: TenantConfig, path: str, environment: Mapping[str, str]) -> tuple[bytes, Tenant]:
    key = _key_of(tenant, path, environment)
    if (key is None) == (tenant.sha256 is None):
        hint = "give one of key_env, key_file and sha256"
        raise ConfigError(f"{path} needs one key", param=f"{path}.key_env", hint=hint)
    if key is None and not _DIGEST.fullmatch(tenant.sha256 or ""):
        hint = "as `printf %s KEY | sha256sum` prints it"
        raise ConfigError(f"{path}.sha256 is not 64 hexadecimal digits", param=f"{path}.sha256", hint=hint)
    known = bytes.fromhex(tenant.sha256 or "") if key is None else sha256(key.encode()).digest()
    if known == sha256(b"").digest():  # who sends no key would have it
        raise ConfigError(f"{path}.sha256 is that of an empty key", param=f"{path}.sha256", hint="hash a key")
    return known, Tenant(
        name=tenant.name,
        is_operator=tenant.operator,
        max_open_requests=tenant.max_open_requests,
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
    )
