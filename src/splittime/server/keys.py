"""Which key is whose, compared so that the time it takes tells nothing: digests, all of them, whichever is right."""

import hmac
from hashlib import sha256

from splittime.core.errors import ConfigError
from splittime.server.config import ServerConfig
from splittime.server.http import Scope
from splittime.server.keys_file import digest, read_keys_file
from splittime.server.tenants import ANYBODY, Tenant


class Keys:
    """Which key is whose. Raises `ConfigError` for two of one name, or one key for two."""

    def __init__(self, config: ServerConfig) -> None:
        self._holders: list[tuple[bytes, Tenant]] = []
        for number, key in enumerate(config.api_key, 1):
            tenant = Tenant(name=f"key-{number}", salt=f"key:key-{number}", is_operator=number == 1)
            self._add(digest(key), tenant, "api_key")
        if config.api_keys_file is not None:
            for known, tenant in read_keys_file(config.api_keys_file):
                self._add(known, tenant, "api_keys_file")
        self._metrics_digest = digest(config.metrics_api_key) if config.metrics_api_key is not None else None

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._holders]

    def holder(self, scope: Scope, given: bytes) -> Tenant | None:
        """Returns the tenant whose key was given, or None. Takes as long whichever it is."""
        if scope["path"] == "/metrics" and self._metrics_digest is not None:
            is_for_metrics = hmac.compare_digest(self._metrics_digest, sha256(given).digest())
            return ANYBODY if is_for_metrics else self._find(given)
        return self._find(given) if self._holders else ANYBODY

    def _find(self, given: bytes) -> Tenant | None:
        found, asked = None, sha256(given).digest()
        for known, tenant in self._holders:
            if hmac.compare_digest(known, asked):
                found = tenant
        return found

    def _add(self, known: bytes, tenant: Tenant, param: str) -> None:
        if any(other.name == tenant.name for other in self.tenants):
            raise ConfigError(f"two keys have the name {tenant.name!r}", param=param, value=tenant.name)
        twin = next((other.name for each, other in self._holders if each == known), None)
        if twin is not None:
            raise ConfigError(f"{twin!r} and {tenant.name!r} have the same key", param=param, value=tenant.name)
        self._holders.append((known, tenant))
