"""Reads `--api-keys-file`: `tenants` says what may be in it. No error quotes a key."""

import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from splittime.core.errors import ConfigError
from splittime.server.config import check_key
from splittime.server.tenants import Tenant

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
Limit = Annotated[int, Meta(ge=1)]


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    key: str | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    operator: bool = False
    salt: Annotated[str, Meta(pattern=r"^[ -~]{1,256}$")] | None = None
    max_open_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None

    def known(self) -> bytes:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"{self.name!r} needs key or sha256, one of them")
        if self.key is None:
            return self._known_digest()
        check_key(self.key, f"key of {self.name!r}")
        return digest(self.key)

    def _known_digest(self) -> bytes:
        known = bytes.fromhex(self.sha256 or "")
        if known == sha256(b"").digest():  # who sends no key would have it
            raise ValueError(f"sha256 of {self.name!r} is that of an empty key")
        return known

    def tenant(self) -> Tenant:
        return Tenant(
            name=self.name,
            salt=f"key:{self.name}" if self.salt is None else f"salt:{self.salt}",
            is_operator=self.operator,
            max_open_requests=self.max_open_requests,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[list[Entry], Meta(min_length=1)]


def read_keys_file(path: str) -> list[tuple[bytes, Tenant]]:
    """The digest of each key, and whose it is. Raises `ConfigError`."""
    try:
        told = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), KeysFile)
        return [(entry.known(), entry.tenant()) for entry in told.key]
    except (OSError, ValueError, ConfigError) as error:  # TOML's, msgspec's and UTF-8's errors are ValueErrors
        hint = 'a table for each: [[key]], name = "search", key = "..." or sha256 = "..."'
        message = f"cannot read keys from {path}: {error}"
        raise ConfigError(message, param="api_keys_file", value=path, hint=hint) from error


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
