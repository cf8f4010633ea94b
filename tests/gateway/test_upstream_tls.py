"""Connections to upstreams over TLS, with a certificate made here."""

import asyncio
import ssl

import pytest
import uvloop

from server.test_https import files, trusting  # noqa: F401 (files is a fixture)
from splittime.gateway.upstream_connections import NoConnection, RoundTrips, UpstreamConnections
from splittime.wire.target import Address

from .test_upstream_connections import CHUNKED, CLOSES, LENGTH, all_of, ask, read_request

RUN = uvloop.run


async def test_an_answer_over_tls_is_whole_by_what_it_says_of_its_length_alone(files) -> None:  # noqa: F811
    served = []

    async def serve(reader, writer):
        served.append(writer)
        for said in (LENGTH, CHUNKED, CLOSES) if len(served) == 1 else (CLOSES,):
            await read_request(reader)
            writer.write(said)
        writer.close()

    async def asked(connections: UpstreamConnections, address: Address) -> None:
        connections._tls = trusting(files)
        for _ in range(2):
            assert await all_of(await ask(connections, address)) == b"abcdefg"
        answer = await ask(connections, address)
        with pytest.raises(ConnectionError):
            await all_of(answer)
        assert len(served) == 1
        assert await (await ask(connections, address)).piece(5) == b"abcdefg"
        connections._tls = ssl.create_default_context()
        with pytest.raises(NoConnection):  # nobody vouches for it
            await ask(connections, address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    connections = UpstreamConnections(RoundTrips())
    try:
        async with asyncio.timeout(20):
            await asked(connections, Address(True, "127.0.0.1", server.sockets[0].getsockname()[1], ""))
    finally:
        connections.close()
        server.close()
