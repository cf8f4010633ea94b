"""What replicas and gateways say of what they have to do, over HTTP: bounded in time and bytes, None where they do not.

A replica is as full as the fuller of its two bounds: tokens of its KV cache that running requests hold and waiting
prompts will, and requests beside `max_num_seqs`.
"""

import asyncio
import ssl
from typing import Any, NamedTuple

import aiohttp
import msgspec
import orjson

from splittime.cluster.config import ReplicaLaunch
from splittime.core.engine_stats import EngineStats
from splittime.core.sleep import AWAKE

TIMEOUT_S = 2.0
MAX_BYTES = 64 * 2**20  # of accounts; the gauges have some hundred


class ReplicaGauges(NamedTuple):
    """tokens: that run and wait there; capacity_tokens: that it has room for. is_ready: its engine can be asked."""

    tokens: int
    capacity_tokens: int
    is_awake: bool
    is_ready: bool = True


class GatewayGauges(NamedTuple):
    """held_tokens: of requests that wait there for a replica. digest: of the config that it has."""

    held_tokens: int
    digest: str


async def replica_gauges(
    session: aiohttp.ClientSession, url: str, launch: ReplicaLaunch, key: str | None
) -> ReplicaGauges | None:
    told = await ask(session, "GET", f"{url}/stats", key)
    try:
        if not told:
            return None
        gauges = gauges_of(msgspec.convert(told["engine"], EngineStats), launch)
        return gauges._replace(is_ready=bool(told["server"]["is_engine_ready"]))
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def gauges_of(stats: EngineStats, launch: ReplicaLaunch) -> ReplicaGauges:
    """Returns the load of a replica, in tokens of its capacity."""
    room = stats.blocks_total * launch.block_size
    capacity = launch.replica.capacity_tokens or room
    held = stats.blocks_used * launch.block_size + stats.waiting_prompt_tokens
    requests = stats.num_running + stats.num_waiting
    filled = max(held / room if room else 0.0, requests / launch.max_num_seqs)
    tokens = held if launch.replica.capacity_tokens else round(filled * capacity)
    return ReplicaGauges(max(tokens, requests), capacity, stats.rest.state == AWAKE)


async def gateway_gauges(
    session: aiohttp.ClientSession, url: str, key: str | None, trust: ssl.SSLContext
) -> GatewayGauges | None:
    told = await ask(session, "GET", f"{url}/stats", key, trust=trust)
    try:
        queue = told["queue"] if told else {}
        held = max(int(queue["tokens"]), int(queue["requests"]))
        return GatewayGauges(held, str(told["config"]).partition(":")[2]) if told else None
    except (KeyError, TypeError, ValueError):
        return None


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: str | None,
    timeout_s: float = TIMEOUT_S,
    trust: ssl.SSLContext | bool = True,
) -> dict[str, Any] | None:
    """Returns the answer's JSON object; None for any other answer than 200, and where none comes in time. trust: whose
    certificates are taken; True: those of this machine's authorities."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with asyncio.timeout(timeout_s):
            async with session.request(method, url, headers=headers, allow_redirects=False, ssl=trust) as response:
                body = await _body(response) if response.status == 200 else b"null"
                told = orjson.loads(body)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return None
    return told if isinstance(told, dict) else None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            response.close()
            return b"null"
    return bytes(body)
