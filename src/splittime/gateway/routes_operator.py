"""Routes of the gateway for an operator: hops, `GET /lint`, and the versions of its config.

`/ledger/hops` keeps a client's own hops beside the requests of its trace. `/admin/config` says which version of the
config serves, and takes another one; `/admin/rollback` takes back the one before.
"""

import asyncio
import tomllib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from splittime.api.decode import decode_once
from splittime.api.hop_answers import MAX_HOPS_BYTES, hops_answer, keep_hops
from splittime.core.errors import ConfigError, NotFound, RequestError
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import config_unread
from splittime.gateway.service import GatewayService
from splittime.web import http
from splittime.web.tenants import tenant_of

if TYPE_CHECKING:
    from splittime.gateway.versions.swap import GatewayVersions

LINT = "/lint"
ACCOUNTS = 1000  # that say what a token takes
CONFIG, ROLLBACK = "/admin/config", "/admin/rollback"
MAX_BODY_BYTES, BODY_TIMEOUT_S = 2**20, 10.0


async def post_hops(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Keep what is posted, all or none. The hops are the tenant's whose key posts them."""
    body = await http.read_body_in_time(scope, receive, MAX_HOPS_BYTES, gateway.config.body_timeout_s)
    await http.respond_json(send, keep_hops(gateway.ledger, body, tenant_of(scope).name))


async def hops(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The hops of a trace that the key may see."""
    trace_id, tenant = scope[http.PATH_REST], tenant_of(scope)
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(gateway.pool, hops_answer, gateway.ledger, trace_id, tenant.sees)
    await http.respond_json(send, found)


async def send_lint(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The report. Raises `NotFound` where no prompt is looked at."""
    lint = gateway.lint
    if lint is None:
        message = "no prompts are looked at: a table [lint] in the config turns that on"
        raise NotFound(message, code="lint_off", hint="add [lint] and restart the gateway")

    def work() -> dict[str, Any]:
        return lint.report(gateway.ledger.accounts(None, ACCOUNTS))

    await http.respond_json(send, await asyncio.get_running_loop().run_in_executor(gateway.pool, work))


class ApplyBody(msgspec.Struct, forbid_unknown_fields=True):
    """toml: the config's file. canary: the share of tenants that try it first; None: all get it at once."""

    toml: str
    canary: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


async def status(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Which version serves, what the canary has seen, and the latest changes."""
    await http.respond_json(send, _versions(gateway).stats())


async def apply(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
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


async def rollback(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
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


def _versions(gateway: GatewayService) -> "GatewayVersions":
    assert gateway.versions is not None, "served by versions"
    return gateway.versions
