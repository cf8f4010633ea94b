"""What an operator may ask of the config: which version serves, another one, and the one before again."""

import asyncio
import tomllib
from typing import TYPE_CHECKING, Annotated

import msgspec

from splittime.api.decode import decode_once
from splittime.core.errors import ConfigError, RequestError
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import config_unread
from splittime.web import http
from splittime.web.tenants import tenant_of

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService
    from splittime.gateway.versions.swap import GatewayVersions

CONFIG, ROLLBACK = "/admin/config", "/admin/rollback"
MAX_BODY_BYTES, BODY_TIMEOUT_S = 2**20, 10.0


class ApplyBody(msgspec.Struct, forbid_unknown_fields=True):
    """toml: the config's file. canary: the share of tenants that try it first; None: all get it at once."""

    toml: str
    canary: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


async def status(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Which version serves, what the canary has seen, and the latest changes."""
    await http.respond_json(send, _versions(gateway).stats())


async def apply(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Change to the config in the body, whole or as a canary."""
    by = _named_operator(scope)
    data = await http.read_body_in_time(scope, receive, MAX_BODY_BYTES, BODY_TIMEOUT_S)
    try:
        body = decode_once(data, ApplyBody)
        config = await asyncio.get_running_loop().run_in_executor(gateway.pool, _config, body.toml)
        await _versions(gateway).apply(config, by, body.canary)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError is one
        raise RequestError(f"the body: {error}", code="invalid_json") from error
    except ConfigError as error:  # of the body's config, not of this process's
        info = error.info
        raise RequestError(
            info.message, code=info.code, param=info.param, value=info.value, limit=info.limit, hint=info.hint
        ) from error
    await http.respond_json(send, _versions(gateway).stats())


async def rollback(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """End the canary, or go back to the config before."""
    await _versions(gateway).roll_back(_named_operator(scope))
    await http.respond_json(send, _versions(gateway).stats())


def _config(text: str) -> GatewayConfig:
    try:
        return config_unread(tomllib.loads(text))
    except ValueError as error:
        raise ConfigError(f"the config is no TOML: {error}", param="toml", hint="--check says what is wrong") from None


def _named_operator(scope: http.Scope) -> str:
    """Returns whose key it is. Raises `RequestError` where no key is asked for: who can connect could redirect
    everybody's prompts."""
    name = tenant_of(scope).name
    if not name:
        hint = "give a [[tenant]] with operator = true, or change the file and send SIGHUP"
        raise RequestError("a config is changed with an operator's key", code="operator_only", status=403, hint=hint)
    return name


def _versions(gateway: "GatewayService") -> "GatewayVersions":
    assert gateway.versions is not None, "served by versions"
    return gateway.versions
