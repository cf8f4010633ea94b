"""The gateway's routes that ask no model: kept answers and responses, hops, lint, and the versions of its config.

Operators and tenants may take kept answers out, and say of a hit that it was wrong.

`GET` and `DELETE /v1/responses/ID`, `POST /v1/responses/ID/cancel`: asked of the upstream that keeps the
response.

These take one of the key's requests, no place in the queue, and have no account: no model is asked.

For an operator: hops, `GET /lint`, and the versions of the config.

`/ledger/hops` keeps a client's own hops beside the requests of its trace. `/admin/config` says which version of the
config serves, and takes another one; `/admin/rollback` takes back the one before.
"""

import asyncio
import time
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from splittime.api.decode import decode_once
from splittime.api.ledger_answers import MAX_HOPS_BYTES, hops_body, keep_hops
from splittime.core.clock import utc_text
from splittime.core.errors import ConfigError, NotFound, RequestError, SplittimeError, UpstreamError
from splittime.gateway.breaks import BROKEN, AttemptBreaks, Deadline
from splittime.gateway.cache.answers import KINDS
from splittime.gateway.cache.stores import STORE_ERRORS, Purge
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import config_unread
from splittime.gateway.decoded_answer import KeyMask, PassedAnswer, read_whole
from splittime.gateway.forwarded import RESPONSES
from splittime.gateway.responses import keeper_of
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Upstream, sent_headers
from splittime.gateway.verdict import ANSWERED, GOOD, AnswerVerdict, AttemptAsked, bad_answer, decoded, of_answer
from splittime.gateway.versions import GatewayVersions
from splittime.web import http
from splittime.web.tenants import forbidden, tenant_of

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache

PURGE, WRONG = "/cache/purge", "/cache/wrong"
MAX_PURGE_BYTES = 4096
BodyKind = TypeVar("BodyKind")
CANCEL = "/cancel"
RESPONSE_KINDS = ("response", "response.deleted")
now_ns = time.monotonic_ns
LINT = "/lint"
ACCOUNTS = 1000  # that say what a token takes
CONFIG, ROLLBACK = "/admin/config", "/admin/rollback"
MAX_CONFIG_BYTES, BODY_TIMEOUT_S = 2**20, 10.0


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which answers go; an empty object takes all that the key may see. tenant: for an operator to name."""

    model: str | None = None
    tenant: str | None = None
    entry: str | None = None
    older_than_s: float | None = None


class WrongBody(msgspec.Struct, forbid_unknown_fields=True):
    """entry: as `X-Cache-Entry` of the hit told."""

    entry: str


async def purge(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Take answers out: a tenant its own, an operator anybody's."""
    cache, tenant = _cache(gateway), tenant_of(scope)
    body = await _body(scope, receive, PurgeBody)
    if tenant.sees is not None and body.tenant not in (None, tenant.sees):
        raise forbidden(tenant, PURGE)
    which = Purge(
        tenant=body.tenant if tenant.sees is None else tenant.sees,
        model=body.model,
        key=None if body.entry is None else _parted(body.entry)[1],
        older_than_unix_s=None if body.older_than_s is None else time.time() - body.older_than_s,
    )
    await http.respond_json(send, {"purged": await _purged(cache, which)})


async def wrong(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """A hit was wrong: its answer is taken out, and counted against its kind."""
    cache, tenant = _cache(gateway), tenant_of(scope)
    entry = (await _body(scope, receive, WrongBody)).entry
    kind, key = _parted(entry)
    if not await _purged(cache, Purge(tenant=tenant.sees, key=key)):
        hint = f"X-Cache-Entry of the hit names it; it may have been taken out since{await _since(cache)}"
        raise NotFound("no such answer is kept", code="no_such_entry", param="entry", hint=hint)
    cache.wrong[kind] += 1
    await http.respond_json(send, {"removed": True})


async def _since(cache: "ResponseCache") -> str:
    begun_s = await cache.begun_unix_s()
    return "" if begun_s is None else f", and the store has none from before {utc_text(begun_s)}, when it was empty"


def _cache(gateway: "GatewayService") -> "ResponseCache":
    if gateway.cache is None:
        hint = "a [[cache_route]] in the config names a model whose answers are kept"
        raise NotFound("no answers are kept", code="no_cache", hint=hint)
    return gateway.cache


async def _purged(cache: "ResponseCache", which: Purge) -> int:
    try:
        return await cache.purge(which)
    except STORE_ERRORS:
        cache.num_errors += 1
        hint = "the gateway's log and the store's own say why"
        raise RequestError("the store of answers does not answer", code="store_failed", status=503, hint=hint) from None


async def _body(scope: http.Scope, receive: http.Receive, kind: type[BodyKind]) -> BodyKind:
    data = await http.read_body_in_time(scope, receive, MAX_PURGE_BYTES, BODY_TIMEOUT_S)
    try:
        return decode_once(data or b"{}", kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body: {error}", code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _parted(entry: str) -> tuple[str, str]:
    """Returns the kind of a hit and the key of its answer."""
    kind, _, key = entry.partition("-")
    if kind not in KINDS or len(key) != 64 or not key.isalnum():
        message = "entry is not what X-Cache-Entry tells"
        raise RequestError(message, param="entry", value=entry[:80], hint="as equal-... or like-...")
    return kind, key


async def retrieve_response(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The response, as its upstream tells it."""
    await _ask(gateway, scope, send, "GET", scope[http.PATH_REST])


async def delete_response(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Whether it is forgotten, there and here."""
    response_id = scope[http.PATH_REST]
    if await _ask(gateway, scope, send, "DELETE", response_id) == 200:
        gateway.held.forget(tenant_of(scope).name, response_id)


async def cancel_response(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What the upstream says to being asked to end it."""
    response_id, is_cancel = scope[http.PATH_REST].removesuffix(CANCEL), scope[http.PATH_REST].endswith(CANCEL)
    if not is_cancel:
        raise NotFound(f"no such path: POST {scope['path'][:128]}", hint=f"POST {RESPONSES}, or {RESPONSES}/ID{CANCEL}")
    await _ask(gateway, scope, send, "POST", response_id, CANCEL)


async def _ask(
    gateway: GatewayService, scope: http.Scope, send: http.Send, method: str, response_id: str, behind: str = ""
) -> int:
    """Pass it on, and the answer back. Returns the answer's status."""
    _refuse_query(scope)
    tenant = tenant_of(scope)
    gateway.require_serving()
    gateway.require_allowance(tenant)
    upstream, use = keeper_of(gateway, tenant, response_id), gateway.quota(tenant).enter(now_ns())
    try:
        answer = await _answered(gateway, scope, upstream, method, f"{RESPONSES}/{response_id}{behind}")
    finally:
        use.leave(0, now_ns())
    headers = dict(answer.headers)
    kind = headers.pop(b"content-type", b"application/json")
    named = [*headers.items(), (b"x-splittime-upstream", upstream.name.encode())]
    await http.respond(send, answer.body, status=answer.status, content_type=kind, headers=named)
    return answer.status


def _refuse_query(scope: http.Scope) -> None:
    for name in http.query(scope):
        message, hint = f"{name[:64]}: a response is given whole, as it was answered", "ask without a query"
        raise RequestError(message, code="unsupported_field", param=name[:64], hint=hint)


async def _answered(
    gateway: GatewayService, scope: http.Scope, upstream: Upstream, method: str, path: str
) -> PassedAnswer:
    """Returns the upstream's whole answer. Raises `SplittimeError` where none is there in time, or none for clients."""
    config, limit_s, most = upstream.config, upstream.config.first_byte_s, gateway.config.max_answer_bytes
    until_ns, asked = now_ns() + int(limit_s * 1e9), AttemptAsked(upstream.name, RESPONSES, "")
    headers = sent_headers(scope, upstream, http.new_request_id(), until_ns, None)
    said, connect_s = b"" if method == "POST" else None, config.connect_s
    try:
        async with asyncio.timeout(limit_s):
            answer = await gateway.connections.ask(method, upstream.address, path, headers, said, connect_s=connect_s)
            body = await read_whole(answer, limit_s, most)
    except BROKEN as error:
        breaks = AttemptBreaks(config, Deadline(until_ns, is_clients=False))
        raise _error_of(breaks.before(error, limit_s, is_deadline=False)) from error
    if body is None:
        raise _error_of(bad_answer(asked, f"answered more than {most} bytes", limit=most))
    passed = KeyMask(upstream.key).passed(answer, body)
    verdict = GOOD._replace(answer=passed) if _is_response(passed) else of_answer(asked, passed)
    if verdict.answer is None:
        raise _error_of(verdict)
    return verdict.answer


def _is_response(answer: PassedAnswer) -> bool:
    """Returns whether it is a response, or says that one is deleted. How a response failed is no failure to read it."""
    told = decoded(answer.body) if answer.status in ANSWERED else None
    return isinstance(told, dict) and told.get("object") in RESPONSE_KINDS


def _error_of(verdict: AnswerVerdict | None) -> SplittimeError:
    return (verdict and verdict.error) or UpstreamError("there is no answer")


async def post_hops(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Keep what is posted, all or none. The hops are the tenant's whose key posts them."""
    body = await http.read_body_in_time(scope, receive, MAX_HOPS_BYTES, gateway.config.body_timeout_s)
    await http.respond_json(send, keep_hops(gateway.ledger, body, tenant_of(scope).name))


async def hops(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The hops of a trace that the key may see."""
    trace_id, tenant = scope[http.PATH_REST], tenant_of(scope)
    loop = asyncio.get_running_loop()
    body = await loop.run_in_executor(gateway.pool, hops_body, gateway.ledger, trace_id, tenant.sees)
    await http.respond(send, body)


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


async def config_status(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Which version serves, what the canary has seen, and the latest changes."""
    await http.respond_json(send, _versions(gateway).stats())


async def apply_config(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Change to the config in the body, whole or as a canary."""
    by = _named_operator(scope)
    data = await http.read_body_in_time(scope, receive, MAX_CONFIG_BYTES, BODY_TIMEOUT_S)
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


def _versions(gateway: GatewayService) -> GatewayVersions:
    assert isinstance(gateway.versions, GatewayVersions), "served by versions"
    return gateway.versions
