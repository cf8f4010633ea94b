"""The gateways as the controller sees them: what waits there, and whether each has the config that it should have."""

import signal
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

from splittime.cluster.config import Cluster, ReplicaLaunch
from splittime.cluster.observed import GatewayGauges, ask, gateway_gauges
from splittime.cluster.replica_process import read_mark
from splittime.cluster.state import (
    GatewayFiles,
    ListedReplica,
    digest_of,
    gateway_config,
    operator_key,
    write_whole,
)
from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import check_change

MAX_ACCOUNTS = 1000
FIXED = ("runner", "ray_address", "gateways", "folder")


class SeenGateway(NamedTuple):
    """gauges: None where it does not answer. is_alive: its process runs."""

    url: str
    gauges: GatewayGauges | None
    is_alive: bool


class ManagedGateways:
    """`look`, then `lead`. seen: the gateways at the latest look."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._files = [GatewayFiles(cluster.folder, number) for number in range(cluster.config.gateways)]
        self._written: list[tuple[GatewayConfig, str]] = []
        self._led: tuple[tuple[ListedReplica, ...], ReplicaLaunch] | None = None
        plain = [self.plain(number) for number in range(cluster.config.gateways)]  # says what is wrong with any
        self._key = operator_key(plain[0])
        self._trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # of the gateways' own certificates, whatever their names
        self._trust.check_hostname = False
        self._trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self.seen: list[SeenGateway] = []

    def plain(self, number: int) -> GatewayConfig:
        """Returns the config of a gateway without replicas. Raises `ConfigError`."""
        return gateway_config(self._cluster.config, self._cluster.launch, number, ())[0]

    def change(self, cluster: Cluster) -> None:
        """Take another config. Raises `ConfigError` for what needs a restart, of the cluster or of a gateway."""
        for name in FIXED:
            if getattr(cluster.config, name) != getattr(self._cluster.config, name):
                hint = "leave it as it is, or end the cluster and start it again"
                raise ConfigError(f"{name} cannot change while the cluster runs", param=name, hint=hint)
        made, _ = gateway_config(cluster.config, cluster.launch, 0, ())
        _check_gateway(self.plain(0), made)
        self._key = operator_key(made)
        self._cluster, self._led = cluster, None

    async def look(self, session: aiohttp.ClientSession) -> None:
        seen, certificate = [], self._cluster.config.gateway.get("ssl_certfile")
        if certificate is not None:
            with suppress(OSError):  # beside earlier ones: a gateway has the one that was there when it was started
                self._trust.load_verify_locations(certificate)
        for number, files in enumerate(self._files):
            url, mark = self.url(number), read_mark(files.mark)
            gauges = None if mark is None else await gateway_gauges(session, url, self._key, self._trust)
            seen.append(SeenGateway(url, gauges, mark is not None))
        self.seen = seen

    def url(self, number: int) -> str:
        config = self.plain(number) if not self._written else self._written[number][0]
        return _url(config, config.port)

    @property
    def urls(self) -> list[str]:
        return [self.url(number) for number in range(len(self._files))]

    @property
    def shared_url(self) -> str | None:
        """Returns where all of them listen, if they do."""
        config = self.plain(0)
        return None if config.shared_port is None else _url(config, config.shared_port)

    @property
    def held_tokens(self) -> int:
        return sum(one.gauges.held_tokens for one in self.seen if one.gauges is not None)

    @property
    def have_taken(self) -> bool:
        """Returns whether each gateway that lives had the config of the latest `lead` when it was looked at."""
        wanted = [digest_of(config) for config, _ in self._written]
        return bool(wanted) and all(
            not one.is_alive or (one.gauges is not None and one.gauges.digest == digest)
            for one, digest in zip(self.seen, wanted, strict=True)
        )

    def lead(self, listed: Sequence[ListedReplica], launch: ReplicaLaunch) -> None:
        """Write the files where other replicas are listed, and tell the gateways that have another config."""
        if (tuple(listed), launch) != self._led:
            self._led = (tuple(listed), launch)
            config = self._cluster.config
            self._written = [gateway_config(config, launch, number, listed) for number in range(config.gateways)]
            for files, (_, text) in zip(self._files, self._written, strict=True):
                write_whole(files.config, text.encode())
            self._tell_all()
            return
        for files, one, (written, _) in zip(self._files, self.seen, self._written, strict=True):
            if one.gauges is not None and one.gauges.digest != digest_of(written):
                self._tell(files)

    def _tell_all(self) -> None:
        for files in self._files:
            self._tell(files)

    def _tell(self, files: GatewayFiles) -> None:
        mark = read_mark(files.mark)
        if mark is not None:
            mark.signal(signal.SIGHUP)

    async def accounts(self, session: aiohttp.ClientSession) -> list[dict[str, Any] | None]:
        """Returns what each gateway answers of its latest requests."""
        query = f"/ledger/requests?limit={MAX_ACCOUNTS}"
        living = [one.url for one in self.seen if one.is_alive]
        return [await ask(session, "GET", url + query, self._key, trust=self._trust) for url in living]


def _url(config: GatewayConfig, port: int) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _check_gateway(old: GatewayConfig, new: GatewayConfig) -> None:
    """Raises `ConfigError` for what a gateway that runs would refuse."""
    try:
        check_change(old, new)
    except ConfigError as error:
        hint = "leave it as it is, or end the cluster and start it again"
        message, param = f"[gateway]: {error.info.message}", f"gateway.{error.info.param}"
        raise ConfigError(message, code=error.info.code, param=param, hint=hint) from None
