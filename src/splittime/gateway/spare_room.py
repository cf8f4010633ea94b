"""Asks a model on a request's behalf, in room that nobody else waits for, at that tenant's charge.

It is never queued. Where no upstream of the model has room at once, or others wait for it, it is not asked at all; a
server of ours gets it with the lowest priority. Rules lead it as they lead the tenant's own requests, so a tenant's
text goes to no upstream that its requests may not go to. Its tokens are in the fair queue's count, the limits and the
budgets of its tenant, and in no account: it is no request of a client.
"""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.endpoints import CHAT
from splittime.gateway.forwarded import ForwardedRequest, forwarded
from splittime.gateway.upstreams import Upstream
from splittime.web import http
from splittime.web.tenants import tenant_of, told_tenant
from splittime.wire.sse import AnswerReader

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService

MAX_ANSWER_BYTES = 256 * 1024
LAST_PRIORITY = 2**31 - 1  # of a server of ours; a higher number waits longer


class SpareRoom:
    """tenant, scope: of the request that it is for; they decide where its text may go, and who pays."""

    def __init__(self, gateway: "GatewayService", tenant: str, scope: http.Scope) -> None:
        self._gateway, self._tenant, self._scope = gateway, tenant, scope

    async def ask(self, chat: dict[str, Any], within_s: float) -> bytes | None:
        """Returns the body of the answer; None where there is no room for it now. Raises `OSError` where
        no answer comes in time, and `ValueError` for one that is none."""
        request = self._decided(chat)
        routed = self._gateway.queue.place_now(self._tenant, request.pool, request.tokens, is_charged=True)
        if routed is None:
            return None
        used = request.prompt_tokens  # at the least, of one that is given up
        try:
            told = await self._answer(chat | {"model": request.model}, routed.upstream, within_s)
            used = _used(told) or request.tokens
        finally:
            self._gateway.queue.leave(routed, self._tenant, request.tokens)
            self._charge(request.tokens, used)
        return told

    def _decided(self, chat: dict[str, Any]) -> ForwardedRequest:
        told = forwarded(CHAT, msgspec.json.encode(chat), chat["max_tokens"])
        return self._gateway.policy.routed(told, self._tenant, self._scope)

    async def _answer(self, chat: dict[str, Any], upstream: Upstream, within_s: float) -> bytes:
        is_ours = upstream.keeps_accounts
        body = msgspec.json.encode(chat | ({"priority": LAST_PRIORITY} if is_ours else {}))
        where = (self._gateway.connections, upstream.address, CHAT, upstream.key)
        headers = told_tenant(tenant_of(self._scope)) if is_ours else {}
        most = MAX_ANSWER_BYTES
        status, told = await ask_whole(*where, body, within_s=within_s, max_bytes=most, headers=headers)
        if status >= 500:
            raise ConnectionError(f"upstream {upstream.name!r} answered {status}")
        if status != 200 or told is None:
            raise ValueError(f"upstream {upstream.name!r} answered {status}")
        return told

    def _charge(self, charged: int, used: int) -> None:
        self._gateway.queue.settle(self._tenant, charged, used)
        self._gateway.quotas[self._tenant].use_tokens(used, time.monotonic_ns())
        self._gateway.budgets.use(self._tenant, used)


def _used(told: bytes) -> int | None:
    """Returns the tokens that an answer says it took; None where it does not say both numbers."""
    reader = AnswerReader()
    reader.take(told, 0)
    if reader.prompt_tokens is None or reader.output_tokens is None:
        return None
    return reader.prompt_tokens + reader.output_tokens
