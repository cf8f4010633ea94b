"""What the way to a server costs when it has nothing to do: probed on its own, before and after the load.

A connect is from asking for a connection to having one (with TLS, if the address says https), the name looked up
before. A round trip is one GET of a cheap path on a connection that was open already: so it holds the network both
ways, the server's HTTP layer and this client's, but no queue and no model. It is what `join` allows for the network.
"""

import asyncio
import contextlib
import socket
import time
from urllib.parse import urlsplit

import aiohttp

from splittime.loadgen.scrape import Target, base_url, get

NUM_CONNECTS = 20
NUM_ROUND_TRIPS = 50
PROBE_TIMEOUT_S = 5.0

now_ns = time.monotonic_ns


async def connect_times(target: Target, count: int = NUM_CONNECTS) -> tuple[int, ...]:
    """How long each of `count` fresh connections took, one after another, to the first address that takes any."""
    parts = urlsplit(base_url(target))
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    times_ns: list[int] = []
    for address in await _addresses(parts.hostname or "", port):
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(count):
                times_ns.append(await _connect(address, port, parts.hostname if is_tls else None))
        if times_ns:
            break
    return tuple(times_ns)


async def _addresses(host: str, port: int) -> list[str]:
    """Where the name leads, each once: `localhost` may be two addresses with a server on one of them."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))


async def _connect(address: str, port: int, tls_host: str | None) -> int:
    begin_ns = now_ns()
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        _, writer = await asyncio.open_connection(address, port, ssl=tls_host is not None, server_hostname=tls_host)
    took_ns = now_ns() - begin_ns
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await writer.wait_closed()
    return took_ns


async def round_trips(
    session: aiohttp.ClientSession, target: Target, path: str, count: int = NUM_ROUND_TRIPS
) -> tuple[int, ...]:
    """How long each of `count` GETs took after one that opened the connection; ends at the first that fails."""
    times_ns: list[int] = []
    for _ in range(count + 1):
        begin_ns = now_ns()
        if await get(session, target, path, PROBE_TIMEOUT_S) is None:
            break
        times_ns.append(now_ns() - begin_ns)
    return tuple(times_ns[1:])
