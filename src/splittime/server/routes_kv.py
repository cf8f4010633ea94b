"""`POST /kv/blocks`: blocks of KV cache, for another server of the same model (`--kv-peers` there, `--kv-export` here).

For the operator's key alone: whoever can name a block had its text and its salt, but the latest are given without a
name. Both bodies are msgpack (`core.kv_blocks`). It answers while the server drains, since one that leaves has most to
give.
"""

import asyncio

import msgspec

from splittime.core.errors import NotFound, RequestError
from splittime.core.kv_blocks import MAX_NAMES, NAME_BYTES, BlocksAsk, with_digests
from splittime.server.service import Service
from splittime.web import http

MAX_ASK_BYTES = MAX_NAMES * (NAME_BYTES + 2) + 1024
CONTENT_TYPE = b"application/msgpack"


async def blocks(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with those that there are, as many as one answer holds; 404 where none are given."""
    raw = await http.read_body_in_time(scope, receive, MAX_ASK_BYTES, service.config.body_timeout_s)
    try:
        ask = msgspec.msgpack.decode(raw, type=BlocksAsk)
    except msgspec.MsgspecError as error:
        raise RequestError(f"the body asks for no blocks: {error}", code="invalid_msgpack") from error
    told = await service.client.export(ask)
    if told is None:
        hint = "start it with --kv-export; its weights, types, kernels and version must be those of the one that asks"
        raise NotFound("this server gives no blocks of that layout", code="no_blocks", hint=hint)
    loop = asyncio.get_running_loop()
    body = await loop.run_in_executor(service.pool, with_digests, ask.layout, told)
    await http.respond(send, body, content_type=CONTENT_TYPE)
