"""Answers of upstreams that are read whole, and what the gateway asks for itself: queues, embeddings, spans taken."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

from splittime import __version__
from splittime.gateway.decoded_answer import begun
from splittime.gateway.upstream_answer import UpstreamAnswer
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.wire.target import Address

USER_AGENT = f"splittime-gateway/{__version__}"


async def read_whole(answer: UpstreamAnswer, within_s: float, max_bytes: int) -> bytes | None:
    """Returns the body; None for one of more than `max_bytes`. within_s: between two pieces. Raises `OSError` or
    `ValueError` where it does not end as it should."""
    body = bytearray()
    try:
        decoded, piece = await begun(answer, within_s)
        while piece:
            body += piece
            if len(body) > max_bytes:
                return None
            piece = await decoded.piece(within_s)
    finally:
        answer.close()
    return bytes(body)


async def ask_whole(
    connections: UpstreamConnections,
    address: Address,
    path: str,
    key: str | None,
    body: bytes | None = None,
    *,
    within_s: float,
    max_bytes: int,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes | None]:
    """Returns the status and what `read_whole` does. body: JSON, to be posted. headers: beside the usual ones.
    Raises `OSError` or `ValueError` where no whole answer came, a `TimeoutError` after `within_s`."""
    async with asyncio.timeout(within_s):
        answer = await _asked(connections, address, path, key, body, within_s, headers)
        read = await read_whole(answer, within_s, max_bytes)
        return answer.status, read


async def _asked(
    connections: UpstreamConnections,
    address: Address,
    path: str,
    key: str | None,
    body: bytes | None,
    within_s: float,
    more: Mapping[str, str],
) -> UpstreamAnswer:
    headers = {**more, "accept-encoding": "identity", "user-agent": USER_AGENT}
    headers |= {} if body is None else {"content-type": "application/json"}
    headers |= {} if key is None else {"authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    return await connections.ask(method, address, path, headers, body, connect_s=within_s)
