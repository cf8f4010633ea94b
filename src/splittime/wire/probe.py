"""What the way to a server costs when it has nothing to do: probed on its own, before and after the load.

A connect is from asking for a connection to having one (with TLS, if the address says https), the name looked up
before. A round trip is one GET of a cheap path on a connection that was open already: so it holds the network both
ways, the server's HTTP layer and this client's, but no queue and no model. It is what `join` allows for the network.
"""

import asyncio
import contextlib
import time

import aiohttp

from splittime.core.errors import ConfigError
from splittime.wire.pool import addresses
from splittime.wire.scrape import get
from splittime.wire.target import Address, Target

NUM_CONNECTS = 20
NUM_ROUND_TRIPS = 50
PROBE_TIMEOUT_S = 5.0

now_ns = time.monotonic_ns


async def connect_times(target: Target, count: int = NUM_CONNECTS) -> tuple[int, ...]:
    """How long each of `count` fresh connections took, one after another, to the first address that takes any."""
    address = target.address
    times_ns: list[int] = []
    for place in await _places(address):
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(count):
                times_ns.append(await _connect(place, address))
        if times_ns:
            break
    return tuple(times_ns)


async def _places(address: Address) -> list[str]:
    """Returns where the name leads, each once: `localhost` may be two addresses with a server on one of them."""
    with contextlib.suppress(ConfigError):
        return list(dict.fromkeys(str(place[0]) for _, place in await addresses(address)))
    return []


async def _connect(place: str, address: Address) -> int:
    begin_ns = now_ns()
    name = address.host if address.is_tls else None
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        _, writer = await asyncio.open_connection(place, address.port, ssl=address.is_tls, server_hostname=name)
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
