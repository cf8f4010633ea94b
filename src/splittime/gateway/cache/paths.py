"""What operators and tenants may do to kept answers: take them out, and say of a hit that it was wrong."""

import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from splittime.api.decode import decode_once
from splittime.core.clock import utc_text
from splittime.core.errors import NotFound, RequestError
from splittime.gateway.cache.kept import KINDS
from splittime.gateway.cache.stores import STORE_ERRORS, Purge
from splittime.web import http
from splittime.web.tenants import forbidden, tenant_of

if TYPE_CHECKING:
    from splittime.gateway.cache.service import ResponseCache
    from splittime.gateway.service import GatewayService

PURGE, WRONG = "/cache/purge", "/cache/wrong"
MAX_BODY_BYTES, BODY_TIMEOUT_S = 4096, 10.0
BodyKind = TypeVar("BodyKind")


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
    data = await http.read_body_in_time(scope, receive, MAX_BODY_BYTES, BODY_TIMEOUT_S)
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
