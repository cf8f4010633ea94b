"""`GET` and `DELETE /v1/responses/ID`, `POST /v1/responses/ID/cancel`: asked of the upstream that keeps the response.

They take one of the key's requests, no place in the queue, and have no account: no model is asked.
"""

import asyncio
import time

from splittime.core.errors import NotFound, RequestError, SplittimeError, UpstreamError
from splittime.gateway.breaks import BROKEN, AttemptBreaks, Deadline
from splittime.gateway.decoded_answer import KeyMask, PassedAnswer, read_whole
from splittime.gateway.endpoints import RESPONSES
from splittime.gateway.responses.held import keeper_of
from splittime.gateway.sent_headers import sent_headers
from splittime.gateway.service import GatewayService
from splittime.gateway.told_error import decoded
from splittime.gateway.upstreams import Upstream
from splittime.gateway.verdict import ANSWERED, GOOD, AnswerVerdict, AttemptAsked, bad_answer, of_answer
from splittime.web import http
from splittime.web.tenants import tenant_of

CANCEL = "/cancel"
KINDS = ("response", "response.deleted")
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
    return isinstance(told, dict) and told.get("object") in KINDS


def _error_of(verdict: AnswerVerdict | None) -> SplittimeError:
    return (verdict and verdict.error) or UpstreamError("there is no answer")
