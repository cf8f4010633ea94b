"""A version of the config: a number that rises with each change of this process, and the hash of what it says.

A word on the disk that a canary runs: a gateway that ends in the middle of one says so when it starts again.

It starts with the config of its file, so for its tenants the canary is rolled back; what tried it may have ended it.
The mark lies beside the ledger's file, since that is the gateway's own; without one a canary is forgotten, as accounts
are. It is there before a tenant comes in by the canary, and goes when that has been promoted or rolled back.
"""

import contextlib
import logging
from pathlib import Path

import msgspec

from splittime.core.whole_file import write_whole
from splittime.gateway.config import GatewayConfig
from splittime.gateway.routing.policy import version_of

log = logging.getLogger("splittime.gateway")
MAX_BYTES = 64 * 1024
UNKNOWN = "?"


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


class CanaryMark:
    """ledger_file: beside which it lies; None for none. Its calls wait for a disk."""

    def __init__(self, ledger_file: str | None) -> None:
        self._path = None if ledger_file is None else Path(f"{ledger_file}.canary")

    def put(self, change: ConfigChange) -> None:
        """change: the canary's beginning. Raises `ConfigError` where it cannot be written."""
        if self._path is not None:
            write_whole(self._path, msgspec.json.encode(change), param="ledger_file")

    def take(self) -> ConfigChange | None:
        """Returns the beginning of a canary that an earlier process did not end, and forgets it."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                told = file.read(MAX_BYTES)
        except OSError:
            return None
        self.remove()
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(told, type=ConfigChange)
        return ConfigChange(at_unix_s=0.0, what="canary", version=UNKNOWN, by="", why="tenants unknown")

    def remove(self) -> None:
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed (%s): the next start will tell of its canary", self._path, error)
