"""`/ledger/hops` of the gateway: a client's own hops, kept beside the requests of its trace."""

import asyncio

from splittime.api.hop_answers import MAX_HOPS_BYTES, hops_answer, keep_hops
from splittime.gateway.service import GatewayService
from splittime.web import http
from splittime.web.tenants import tenant_of


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
