"""From `gateway.toml` to a `GatewayConfig`, or a `ConfigError` that names the key, its value, its limit and a way out.

A key that is planned and not built is refused by its name: nobody believes in a cache that is not there.

Its tables are checked together: no rule names what is not there, and each ladder of degradation can be climbed.

Reads the keys that a config points at, and the files of labels that it names.

Keys stand in no config. A file of one is small and regular, so nobody waits for it.

A running gateway's next config is checked against the one that it has: what only a restart changes stays, one from
elsewhere reaches for nothing of this host, and a canary has the same tenants.
"""

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.files import read_small
from splittime.core.settings import check, meaning_of
from splittime.gateway import config as sections
from splittime.gateway.budgets import budgets_of, check_budgets
from splittime.gateway.config import (
    EmbedderConfig,
    GatewayConfig,
    MetricsConfig,
    TenantConfig,
    TracingConfig,
    UpstreamConfig,
)
from splittime.gateway.routing.difficulty import ChosenBound, bounds_of
from splittime.gateway.routing.policy import MAX_HEADER_CHARS, pools_of
from splittime.gateway.upstreams import check_regions, held_line
from splittime.web.http import is_loopback
from splittime.web.ports import check_certificate
from splittime.web.tenants import Tenant, check_key
from splittime.wire.target import Target

MAX_KEY_BYTES = 64 * 1024
TRACING = "[tracing]"
EMBEDDER = "[embedder]"  # among upstreams' keys: no upstream has such a name
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

KeyedTable = UpstreamConfig | TenantConfig | EmbedderConfig | TracingConfig | MetricsConfig
FIXED = (
    *("host", "port", "shared_port", "ssl_certfile", "ssl_keyfile", "body_timeout_s", "slow_reader_s"),
    *(
        "ledger_file",
        "max_file_accounts",
        "budget_file",
        "audit",
        "cache",
        "cache_route",
        "embedder",
        "verifier",
        "tracing",
        "lint",
    ),
)
TABLES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("[[upstream]]", sections.UpstreamConfig),
    ("[[tenant]]", sections.TenantConfig),
    ("[[rule]]", sections.RuleConfig),
    ("[[difficulty]]", sections.DifficultyConfig),
    ("[difficulty.escalate]", sections.EscalateConfig),
    ("[queue]", sections.QueueConfig),
    ("[retries]", sections.RetryConfig),
    ("[affinity]", sections.AffinityConfig),
    ("[breaker]", sections.BreakerConfig),
    ("[cache]", sections.CacheConfig),
    ("[[cache_route]]", sections.CacheRoute),
    ("[embedder]", sections.EmbedderConfig),
    ("[verifier]", sections.VerifierConfig),
    ("[[degradation]]", sections.DegradationConfig),
    ("[metrics]", sections.MetricsConfig),
    ("[tracing]", sections.TracingConfig),
    ("[lint]", sections.LintConfig),
    ("[canary]", sections.CanaryConfig),
    ("[audit]", sections.AuditConfig),
)
NOT_BUILT = {
    "api_key": "keys stand in no config file; use key_env or key_file",
    "budget": "a tenant's are tokens_per_day and tokens_per_month, kept in budget_file",
    "cors_origins": "pages of other origins are not let in",
    "embeddings": "requests for them are passed on as others are; [embedder] names who makes vectors for the cache",
    "health_check": "requests tell how an upstream is; one that fails is asked by the gateway itself (breaker.open_s)",
    "hedge": "nothing is sent twice; first_byte_s in [[upstream]] bounds how long an upstream may say nothing",
    "key": "keys stand in no config file; use key_env, key_file or (a tenant) sha256",
    "root_path": "the gateway's paths begin at /",
    "salt": "tenants share an upstream's prefix cache; give a tenant upstreams of its own to keep them apart",
    "semantic_cache": "set semantic = true in a [[cache_route]]; it needs an [embedder] and a [verifier]",
    "shed": "shed_from in [queue] says from where on newcomers are refused by chance",
}
BY_TEXT = "the text decides nothing, as it told no better than chance; escalate = { below = -1.0 } goes by first tokens"
REMOVED = {
    "difficulty.labels": BY_TEXT,
    "difficulty.neighbours": BY_TEXT,
    "limits_valkey": "limits by the minute are each gateway's own, so give each its part; gateways that share a "
    "budget_file share budgets by day and month",
    "tied": "no stream is sent to two upstreams; first_byte_s in [[upstream]] bounds how long one may say nothing",
}
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_AT = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_INDEX = re.compile(r"\[[^\]]*\]")  # of a table among others
_HEADER = re.compile(r"[a-z0-9-]{1,64}")
_SECRET = re.compile(r"(^|-)(api-?key|key|authorization|auth|token|secret|password|cookie|signature)(-|$)")


class Secrets(NamedTuple):
    """What the config only points at. upstream_keys: by the upstream's name. holders: digests of tenants' keys.
    metrics_key: the digest of that for `/metrics` alone. bounds: found in files of labels, by the model of their
    `[[difficulty]]`."""

    upstream_keys: dict[str, str]
    holders: tuple[tuple[bytes, Tenant], ...]
    metrics_key: bytes | None = None
    bounds: Mapping[str, ChosenBound] = {}


def secrets_of(config: GatewayConfig, environment: Mapping[str, str] | None = None) -> Secrets:
    """Returns the keys and labels that the config points at. Raises `ConfigError`, without the key, for one that is not
    there."""
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
    return Secrets(keys, tuple(holders), metrics_key, bounds_of(config))


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


def check_change(old: GatewayConfig, new: GatewayConfig) -> None:
    """Raises `ConfigError` for a key that only a restart can change."""
    for name in FIXED:
        if getattr(old, name) != getattr(new, name):
            raise _fixed(name)
    if budgets_of(old.tenant) != budgets_of(new.tenant):
        raise _fixed("tenant.tokens_per_day or tokens_per_month")


def _fixed(name: str) -> ConfigError:
    hint = "leave it as it is, or restart the gateway with the new file"
    return ConfigError(f"{name} cannot change while the gateway runs", code="needs_restart", param=name, hint=hint)


def check_reach(known: GatewayConfig, new: GatewayConfig) -> None:
    """Raises `ConfigError` for a config from elsewhere that points at a file or a variable of this host that `known`, a
    config of this host, does not point at, or has its key sent to another address. Nothing is looked at: not even
    whether there is such a file is told."""
    upstreams = {(one.key_env, one.key_file, Target(url=one.url).address) for one in known.upstream}
    for number, one in enumerate(new.upstream):
        if _points(one) and (one.key_env, one.key_file, Target(url=one.url).address) not in upstreams:
            raise _beyond(f"upstream[{number}].key_env or key_file")
    tenants = {(one.name, one.key_env, one.key_file) for one in known.tenant}
    for number, tenant in enumerate(new.tenant):
        if _points(tenant) and (tenant.name, tenant.key_env, tenant.key_file) not in tenants:
            raise _beyond(f"tenant[{number}].key_env or key_file")
    labels = _labels(known)
    for number, graded in enumerate(new.difficulty):
        if not _labels(msgspec.structs.replace(new, difficulty=(graded,))) <= labels:
            raise _beyond(f"difficulty[{number}].escalate.labels")
    if new.metrics is not None and _points(new.metrics) and new.metrics != known.metrics:
        raise _beyond("metrics.key_env or key_file")


def _points(table: UpstreamConfig | TenantConfig | MetricsConfig) -> bool:
    return table.key_env is not None or table.key_file is not None


def _labels(config: GatewayConfig) -> set[str]:
    """Returns the files of labels that a config names."""
    return {one.escalate.labels for one in config.difficulty if one.escalate.labels is not None}


def _beyond(name: str) -> ConfigError:
    hint = "write it into the file that the gateway was started with, and send SIGHUP; tenants may have sha256"
    message = f"{name} points at something of this host that its own config does not use there"
    return ConfigError(message, code="needs_own_file", param=name, hint=hint)


def check_canary(old: GatewayConfig, new: GatewayConfig) -> None:
    """Raises `ConfigError` where a share of tenants cannot try this config."""
    if old.tenant != new.tenant:
        message = "a canary has the tenants of the config that it is compared with"
        hint = "apply the [[tenant]] tables first, whole, and then the rest as a canary"
        raise ConfigError(message, code="canary_tenants", param="tenant", hint=hint)
    if len(old.tenant) < 2:
        hint = "apply it whole, or give keys to two tenants or more"
        message = f"a canary is a share of tenants, and there are {len(old.tenant)}"
        raise ConfigError(message, code="canary_tenants", param="canary", value=len(old.tenant), limit=2, hint=hint)


def read_config(path: Path) -> sections.GatewayConfig:
    """Returns what the file says, checked. Raises `ConfigError`."""
    try:
        told = tomllib.loads(read_small(path).decode())
    except (OSError, ValueError) as error:  # errors of TOML and of UTF-8 are ValueErrors
        hint = "splittime gateway --help has one to begin with"
        raise ConfigError(f"cannot read {path}: {error}", param="config", value=str(path), hint=hint) from error
    return config_of(told)


def config_of(told: Mapping[str, Any]) -> sections.GatewayConfig:
    """Returns the config that a mapping describes, as TOML reads it. Raises `ConfigError`."""
    config = config_unread(told)
    check_certificate(config.ssl_certfile, config.ssl_keyfile)
    return config


def config_unread(told: Mapping[str, Any]) -> sections.GatewayConfig:
    """As `config_of`, and no file that it names is looked at: who tells it may not be of this host."""
    try:
        config = msgspec.convert(told, sections.GatewayConfig)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    _check_bounds(config)
    _check_upstreams(config.upstream)
    _check_names("tenant", [tenant.name for tenant in config.tenant])
    check_cache(config)
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


# ---- what is refused


def _refusal(message: str) -> ConfigError:
    """Say which key, and whether it is unknown, not built, missing or of a wrong type."""
    unknown, missing, located = _UNKNOWN.search(message), _MISSING.search(message), _AT.match(message)
    if unknown:
        return _unknown_key(unknown[1], unknown[2] or "")
    if missing:
        name = _join(missing[2], missing[1])
        return ConfigError(f"{name} is missing", param=name, hint=meaning_of(_struct_of(missing[2] or ""), missing[1]))
    what, param = located.groups() if located else (message, "")
    path, _, key = _INDEX.sub("", param).rpartition(".")
    return ConfigError(f"{param}: {what}", param=param, hint=meaning_of(_struct_of(path), key))


def _unknown_key(name: str, path: str) -> ConfigError:
    full = _join(path, name)
    if (removed := _INDEX.sub("", full)) in REMOVED:
        hint = f"take it out: {REMOVED[removed]}"
        return ConfigError(f"{full} was removed", code="removed", param=full, hint=hint)
    if name in NOT_BUILT:
        hint = f"take it out: {NOT_BUILT[name]}"
        return ConfigError(f"{full} is not built", code="not_built", param=full, hint=hint)
    table = _struct_of(path)
    near = difflib.get_close_matches(name, table.__struct_fields__, n=1)
    hint = f"did you mean {near[0]}?" if near else meaning_of(table, name)
    return ConfigError(f"{full}: no such key", code="unknown_key", param=full, hint=hint)


def _struct_of(path: str) -> type[msgspec.Struct]:
    tables, table = {name.strip("[]"): kind for name, kind in TABLES}, _INDEX.sub("", path).lstrip(".")
    return tables.get(table) or tables.get(table.split(".")[0], sections.GatewayConfig)


def _check_bounds(config: sections.GatewayConfig) -> None:
    names = ("upstream", "tenant", "rule", "difficulty", "cache_route", "degradation")
    lists = {name: getattr(config, name) for name in names}
    check_table("", config)
    for name in ("queue", "retries", "affinity", "breaker", "cache", "embedder", "verifier", "canary", "audit"):
        if getattr(config, name) is not None:
            check_table(name, getattr(config, name))
    for name, tables in lists.items():
        for number, table in enumerate(tables):
            check_table(f"{name}[{number}]", table)
    for number, route in enumerate(config.difficulty):
        check_table(f"difficulty[{number}].escalate", route.escalate)


def check_table(path: str, table: msgspec.Struct) -> None:
    """As `core.settings.check`, with the table's name before the key's."""
    try:
        check(table)
    except ConfigError as error:
        info, param = error.info, _join(path, error.info.param or "")
        message = info.message.replace(info.param or "", param, 1)
        raise ConfigError(message, param=param, value=info.value, limit=info.limit, hint=info.hint) from None


def _check_upstreams(upstreams: Sequence[sections.UpstreamConfig]) -> None:
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


def check_cache(config: sections.GatewayConfig) -> None:
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


def _check_semantic(config: sections.GatewayConfig, param: str) -> None:
    """Raises `ConfigError` where one of the two that must agree on a like question is not there."""
    lacking = [f"[{name}]" for name in ("embedder", "verifier") if getattr(config, name) is None]
    if lacking:
        hint = "add what lacks, or take semantic out: near questions alone are given wrong answers"
        message = f"{param} needs an [embedder] and a [verifier], and there is no {' and no '.join(lacking)}"
        raise ConfigError(message, param=param, hint=hint)


def _check_verifier(config: sections.GatewayConfig) -> None:
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


def check_listening(config: sections.GatewayConfig) -> None:
    """Raises `ConfigError` for an address that needs a key and has none, keys without an operator's, and a shared port
    that cannot be."""
    if not is_loopback(config.host) and not config.tenant:
        hint = "give a [[tenant]] with a key, or bind to 127.0.0.1"
        message = f"host {config.host} can be reached from other machines and there is no [[tenant]]"
        raise ConfigError(message, param="host", value=config.host, hint=hint)
    if config.tenant and not any(tenant.operator for tenant in config.tenant):
        hint = "set operator = true for one: else nobody may ask for /metrics or everybody's accounts"
        raise ConfigError("no [[tenant]] is an operator", param="tenant", hint=hint)
    if config.shared_port is not None:
        _check_shared(config.shared_port, config.port)


def _check_shared(shared: int, own: int) -> None:
    if shared == own:
        hint = "give each gateway a port of its own, where its metrics and its state are"
        raise ConfigError(f"shared_port = {shared} is port too", param="shared_port", value=shared, hint=hint)
    if sys.platform != "linux":
        hint = "leave it out, and put a balancer in front of the gateways' own ports"
        message = f"shared_port needs Linux, which shares connections out; this is {sys.platform}"
        raise ConfigError(message, param="shared_port", value=shared, hint=hint)


def check_routing(config: sections.GatewayConfig) -> None:
    """Raises `ConfigError` naming the first rule or alias that cannot be meant."""
    models = [model for upstream in config.upstream for model in upstream.models]
    for number, route in enumerate(config.difficulty):
        _check_difficulty(f"difficulty[{number}]", route, config, models)
    models += [route.model for route in config.difficulty]
    for alias, model in config.aliases.items():
        if alias in models:
            hint = "take the alias out, or the model from `models`; or write a [[rule]] with models and model"
            raise ConfigError(f"aliases.{alias} is a model itself", param=f"aliases.{alias}", hint=hint)
        _among(f"aliases.{alias}", model, models)
    kept = [held_line(upstream.name) for upstream in config.upstream]
    for pool in (*pools_of(config.rule, config.upstream), *kept):
        if pool in models:
            hint = "give the rule, or the model, another name: requests wait under this one"
            raise ConfigError(f"a model is called {pool!r}, as a line of requests is", param="rule", hint=hint)
    for number, rule in enumerate(config.rule):
        _check_rule(f"rule[{number}]", rule, config)


def _check_rule(path: str, rule: sections.RuleConfig, config: sections.GatewayConfig) -> None:
    upstreams = [one for one in config.upstream if not rule.upstreams or one.name in rule.upstreams]
    for name in rule.upstreams:
        _among(f"{path}.upstreams", name, [upstream.name for upstream in config.upstream])
    for name in rule.tenants:
        _among(f"{path}.tenants", name, [tenant.name for tenant in config.tenant])
    if rule.model is not None:
        graded = [] if rule.upstreams else [route.model for route in config.difficulty]
        served = [model for upstream in upstreams for model in upstream.models]
        _among(f"{path}.model", rule.model, [*served, *graded])
    elif not rule.upstreams:
        hint = "say which model or which upstreams the requests that it matches get"
        raise ConfigError(f"{path} decides nothing", param=f"{path}.model", hint=hint)
    low, high = rule.min_prompt_tokens or 0, rule.max_prompt_tokens
    if high is not None and low > high:
        said = f"{path} matches no length: min_prompt_tokens = {low} is more than max_prompt_tokens"
        raise ConfigError(said, param=f"{path}.min_prompt_tokens", value=low, limit=high, hint="swap them")
    for name, value in rule.headers.items():
        _check_header(f"{path}.headers.{name}", name, value)


def _check_difficulty(
    path: str, route: sections.DifficultyConfig, config: sections.GatewayConfig, models: Sequence[str]
) -> None:
    """Raises `ConfigError` unless its name is its own and both of its models are some upstream's."""
    param, is_twice = f"{path}.model", [one.model for one in config.difficulty].count(route.model) > 1
    if not route.model or route.model in models or is_twice:
        hint = "give it a name of its own; an alias or a [[rule]] can lead other names to it"
        why = "stands twice" if is_twice else "is a model of an upstream" if route.model else "is empty"
        raise ConfigError(f"{param}: {route.model!r} {why}", param=param, value=route.model, hint=hint)
    _among(f"{path}.small", route.small, models)
    _among(f"{path}.large", route.large, models)
    if route.small == route.large:
        raise ConfigError(f"{path}.large is the small one too", param=f"{path}.large", hint="name two models")
    if (route.escalate.below is None) == (route.escalate.labels is None):
        param, hint = f"{path}.escalate.below", 'below = -1.0 is a bound; labels = "judged.jsonl" finds one'
        raise ConfigError(f"{param}: escalate needs it or labels, and not both", param=param, hint=hint)


def _check_header(param: str, name: str, value: str) -> None:
    if _SECRET.search(name):
        hint = "its value would stand in accounts; a rule can ask for tenants"
        raise ConfigError(f"{param} may hold a secret", param=param, hint=hint)
    if not _HEADER.fullmatch(name):
        raise ConfigError(f"{param} is no name of a header", param=param, hint="in small letters, digits and hyphens")
    if not value or len(value) > MAX_HEADER_CHARS:
        hint = 'the value whole, or "*" for any'
        raise ConfigError(
            f"{param} has a value of {len(value)} characters", param=param, limit=[1, MAX_HEADER_CHARS], hint=hint
        )


def _among(param: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        hint = f"there are {', '.join(dict.fromkeys(known)) or 'none'}"
        raise ConfigError(f"{param} names {name!r}, which is not there", param=param, value=name, hint=hint)


def check_ladder(config: sections.GatewayConfig) -> None:
    """Raises `ConfigError`."""
    models = {model for upstream in config.upstream for model in upstream.models}
    for number, stage in enumerate(config.degradation):
        _check_stage(stage, f"degradation[{number}]", models)
    for number, (lighter, stage) in enumerate(pairwise(config.degradation)):
        if stage.enter_wait_s <= lighter.enter_wait_s:
            param, value = f"degradation[{number + 1}].enter_wait_s", stage.enter_wait_s
            message = f"{param} is {value:g}, not more than that of {lighter.name!r} before it"
            raise ConfigError(message, param=param, value=value, limit=lighter.enter_wait_s, hint="order them by it")


def _check_stage(stage: sections.DegradationConfig, path: str, models: set[str]) -> None:
    if sum(one is not None for one in (stage.max_tokens, stage.model, stage.answer)) != 1:
        message = f"{path} needs one of max_tokens, model and answer"
        raise ConfigError(message, param=path, hint="a stage does one thing; those before it go on")
    if stage.leave_wait_s >= stage.enter_wait_s:
        param, limit = f"{path}.leave_wait_s", stage.enter_wait_s
        message = f"{param} is {stage.leave_wait_s:g}, not below enter_wait_s, {limit:g}"
        raise ConfigError(message, param=param, value=stage.leave_wait_s, limit=limit, hint="half of it is a beginning")
    if stage.model is not None and stage.model not in models:
        hint = "name a model of an [[upstream]]"
        raise ConfigError(f"{path}.model: no upstream serves {stage.model!r}", param=f"{path}.model", hint=hint)
