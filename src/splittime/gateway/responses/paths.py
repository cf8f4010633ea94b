"""`GET` and `DELETE /v1/responses/ID`, `POST /v1/responses/ID/cancel`: asked of the upstream that keeps the response.

They take one of the key's requests, no place in the queue, and have no account: no model is asked.
"""

import asyncio
import time

from splittime.core.errors import NotFound, RequestError, UpstreamError
from splittime.gateway.endpoints import RESPONSES
from splittime.gateway.passed_answer import KeyMask, PassedAnswer
from splittime.gateway.responses.held import keeper_of
from splittime.gateway.sent_headers import sent_headers
from splittime.gateway.service import GatewayService
from splittime.gateway.upstreams import Upstream
from splittime.gateway.verdict import AttemptAsked, of_answer
from splittime.gateway.whole_answers import read_whole
from splittime.web import http
from splittime.web.tenants import tenant_of

CANCEL = "/cancel"
now_ns = time.monotonic_ns


async def retrieve(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The response, as its upstream tells it."""
    await _ask(gateway, scope, send, "GET", scope[http.PATH_REST])


async def delete(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Whether it is forgotten, there and here."""
    response_id = scope[http.PATH_REST]
    if await _ask(gateway, scope, send, "DELETE", response_id) == 200:
        gateway.held.forget(tenant_of(scope).name, response_id)


async def cancel(gateway: GatewayService, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
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
    """Returns the upstream's whole answer. Raises `UpstreamError` where there is none in time, or none for a client."""
    config, name = upstream.config, upstream.name
    headers = sent_headers(scope, upstream, http.new_request_id(), now_ns() + int(config.first_byte_s * 1e9), None)
    most = gateway.config.max_answer_bytes
    asking = gateway.connections.ask(
        method, upstream.address, path, headers, b"" if method == "POST" else None, connect_s=config.connect_s
    )
    try:
        async with asyncio.timeout(config.first_byte_s):
            answer = await asking
            body = await read_whole(answer, config.first_byte_s, most)
    except TimeoutError:
        message = f"no answer from upstream {name!r} within {config.first_byte_s:g} s"
        raise UpstreamError(message, code="upstream_first_byte_timeout", status=504) from None
    except (OSError, ValueError) as error:
        raise UpstreamError(f"upstream {name!r} did not answer", code="upstream_unreachable") from error
    if body is None:
        raise UpstreamError(f"the upstream answered more than {most} bytes", code="upstream_bad_answer", limit=most)
    verdict = of_answer(AttemptAsked(name, RESPONSES, ""), KeyMask(upstream.key).passed(answer, body))
    if verdict.answer is None:
        raise verdict.error or UpstreamError("there is no answer")
    return verdict.answer
