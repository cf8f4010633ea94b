"""Probes: so many as asked, on fresh or on kept connections, and none from a server that does not answer."""

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from patience import until_async
from splittime.bench import servers
from splittime.bench.servers import connect_times, round_trips
from splittime.wire.target import Address, Target

DELAY_S = 0.02


async def test_round_trips_keep_one_connection_and_wait_for_the_answer() -> None:
    """50 GETs and one before them that opens the connection."""
    peers = []

    async def slow(request: web.Request) -> web.Response:
        peers.append(request.transport.get_extra_info("peername"))
        await asyncio.sleep(DELAY_S)
        return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/cheap", slow)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        times_ns = await round_trips(session, Target(url=str(server.make_url("/v1"))), "/cheap", 10)
    assert len(times_ns) == 10
    assert min(times_ns) >= DELAY_S * 1e9
    assert len(peers) == 11
    assert len(set(peers)) == 1


def test_each_connect_is_a_new_connection_without_a_request() -> None:
    begun, requests = [], []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(writer.get_extra_info("peername"))
        requests.append(await reader.read())
        writer.close()

    async def main() -> tuple[int, ...]:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            times_ns = await connect_times(Target(url=f"http://127.0.0.1:{port}"), 7)
            await until_async(lambda: len(requests) >= 7)
            return times_ns

    times_ns = asyncio.run(asyncio.wait_for(main(), 60))
    assert len(times_ns) == 7
    assert all(took_ns > 0 for took_ns in times_ns)
    assert len(set(begun)) == 7
    assert set(requests) == {b""}


def test_a_name_of_two_addresses_with_a_server_on_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async def two(address: Address) -> list[tuple[int, tuple[str, int]]]:
        return [(socket.AF_INET, (host, address.port)) for host in ("127.0.0.2", "127.0.0.1")]

    async def main() -> tuple[int, ...]:
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
            return await connect_times(Target(url=f"http://here:{server.sockets[0].getsockname()[1]}"), 3)

    monkeypatch.setattr(servers, "addresses", two)
    assert len(asyncio.run(main())) == 3


def test_nobody_there() -> None:
    async def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
        target = Target(url=f"http://127.0.0.1:{unused_port()}")
        async with aiohttp.ClientSession() as session:
            return await connect_times(target), await round_trips(session, target, "/")

    assert asyncio.run(main()) == ((), ())
    assert asyncio.run(connect_times(Target(url="http://no-such-host.invalid:1"))) == ()
