"""A version of the config: a number that rises with each change of this process, and the hash of what it says."""

import msgspec

from splittime.gateway.config import GatewayConfig
from splittime.gateway.routing.policy import version_of


class ConfigVersion(msgspec.Struct, frozen=True):
    """digest: the beginning of the SHA-256 of the config, as decisions of routing have it. Keys are not in it."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


def numbered(number: int, config: GatewayConfig) -> ConfigVersion:
    return ConfigVersion(number, version_of(config))


class ConfigChange(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the history. what: started, applied, canary, promoted, rolled_back or refused. by: the tenant whose
    key asked for it, "SIGHUP", or "" for the gateway itself."""

    at_unix_s: float
    what: str
    version: str
    by: str
    why: str = ""
