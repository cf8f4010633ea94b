"""What a new version takes over from the one before: upstreams, limits and retries that are configured alike keep their
state, so a swap forgets no request in flight, no open breaker and no used-up limit."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from splittime.core.errors import ConfigError
from splittime.gateway.budgets import budgets_of
from splittime.gateway.config import GatewayConfig, MetricsConfig, TenantConfig, UpstreamConfig
from splittime.gateway.upstreams import Upstream
from splittime.web.quota import Quota
from splittime.web.tenants import Tenant
from splittime.wire.target import Address, Target

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService

FIXED = (
    *("host", "port", "shared_port", "ssl_certfile", "ssl_keyfile", "body_timeout_s", "slow_reader_s"),
    *(
        "ledger_file",
        "max_file_accounts",
        "budget_file",
        "limits_valkey",
        "audit",
        "cache",
        "cache_route",
        "embedder",
        "verifier",
        "tracing",
        "lint",
    ),
)


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
            raise _beyond(f"difficulty[{number}].labels")
    if new.metrics is not None and _points(new.metrics) and new.metrics != known.metrics:
        raise _beyond("metrics.key_env or key_file")


def _points(table: UpstreamConfig | TenantConfig | MetricsConfig) -> bool:
    return table.key_env is not None or table.key_file is not None


def _labels(config: GatewayConfig) -> set[str]:
    """Returns the files of labels that a config names."""
    tables = [table for one in config.difficulty for table in (one, one.escalate) if table is not None]
    return {table.labels for table in tables if table.labels is not None}


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


def upstreams_of(before: "GatewayService | None", made: Sequence[Upstream]) -> list[Upstream]:
    """Returns the upstreams of a new version: those of living ones where they are configured alike, key included. Who
    is configured otherwise takes over what its address has in flight, under whichever name it had that."""
    at: dict[Address, list[Upstream]] = {}
    for one in _living(before):
        at.setdefault(one.address, []).append(one)
    kept = {(one.name, one.address) for one in made}
    return [_carried(one, at.get(one.address, ()), kept) for one in made]


def _living(before: "GatewayService | None") -> list[Upstream]:
    if before is None:
        return []
    services = [before, *(before.versions.living if before.versions is not None else [])]
    return list(dict.fromkeys(one for service in services for one in service.router.upstreams))


def _carried(made: Upstream, same: Sequence[Upstream], kept: Collection[tuple[str, Address]]) -> Upstream:
    """same: the upstreams of its address before."""
    of_name = [one for one in same if one.name == made.name]
    for one in of_name:
        if (one.config, one.key) == (made.config, made.key) and one.breaker.config == made.breaker.config:
            return one
    for one in of_name or [one for one in same if (one.name, one.address) not in kept]:
        made.take_over(one)
        break
    return made


def quota_of(before: "GatewayService | None", tenant: Tenant) -> Quota:
    """Returns the earlier version's, which goes on with other limits when this version begins (`Quota.change`)."""
    old = None if before is None else before.quotas.get(tenant.name)
    return old if old is not None else Quota(tenant)
