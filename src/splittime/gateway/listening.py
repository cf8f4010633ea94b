"""Where a gateway may listen, and who has to be there then."""

import sys

from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig
from splittime.web.http import is_loopback


def check_listening(config: GatewayConfig) -> None:
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
