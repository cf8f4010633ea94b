"""Connections to upstreams, against sockets that say what a test writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from patience import until_async
from splittime.gateway import upstream_connections
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import (
    MAX_HEAD_BYTES,
    MAX_UNREAD_BYTES,
    NoConnection,
    RoundTrips,
    UpstreamAnswer,
    UpstreamConnections,
)
from splittime.wire.target import Address

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream; charset=utf-8\r\nX-A: 1\r\nx-a: 2\r\n"
CHUNKED = WHOLE + b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n3\r\nefg\r\n0\r\ntrailer: x\r\n\r\n"
LENGTH = WHOLE + b"content-length: 7\r\n\r\nabcdefg"
CLOSES = WHOLE + b"\r\nabcdefg"
RUN = uvloop.run
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def upstream(serve: Serve) -> AsyncIterator[tuple[UpstreamConnections, Address]]:
    """Runs an upstream that serves each connection so; yields connections to it, and its address."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connections = UpstreamConnections(RoundTrips())
    try:
        async with asyncio.timeout(20):
            yield connections, Address(False, "127.0.0.1", server.sockets[0].getsockname()[1], "/at")
    finally:
        connections.close()
        server.close()


async def ask(connections: UpstreamConnections, address: Address, body: bytes = b"{}") -> UpstreamAnswer:
    return await connections.ask("POST", address, "/v1/x", {"a": "b"}, body, connect_s=5)


async def all_of(answer: UpstreamAnswer) -> bytes:
    pieces = []
    while piece := await answer.piece(5):
        pieces.append(piece)
    return b"".join(pieces)


async def read_request(reader: asyncio.StreamReader, length: int = 2) -> bytes:
    return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(length)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("said", [CHUNKED, LENGTH, CLOSES])
async def test_an_answer_is_whole_however_its_bytes_come(said: bytes, size: int) -> None:
    requests = []

    async def serve(reader, writer):
        requests.append(await read_request(reader))
        for at in range(0, len(said), size):
            writer.write(said[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address)
        assert await all_of(answer) == b"abcdefg"
        assert (answer.status, answer.content_type, answer.headers[b"x-a"]) == (200, "text/event-stream", b"1")
        assert await answer.piece(5) == b""
    head = requests[0].split(b"\r\n")
    assert head[0] == b"POST /at/v1/x HTTP/1.1"
    assert head[1].startswith(b"host: 127.0.0.1:")
    assert requests[0].endswith(b"a: b\r\ncontent-length: 2\r\n\r\n{}")


async def test_a_connection_is_used_again_after_a_whole_answer_alone() -> None:
    served = []

    async def serve(reader, writer):
        served.append(writer)
        for said in (LENGTH, CHUNKED, WHOLE + b"content-length: 99\r\n\r\nabc"):
            await read_request(reader)
            writer.write(b"HTTP/1.1 100 Continue\r\nx-a: 0\r\n\r\n" + said)
        await reader.read()

    async with upstream(serve) as (connections, address):
        for _ in range(2):
            answer = await ask(connections, address)
            assert await all_of(answer) == b"abcdefg"
            assert answer.headers[b"x-a"] == b"1"
        half = await ask(connections, address)
        assert await half.piece(5) == b"abc"
        half.close()
        assert await all_of(await ask(connections, address)) == b"abcdefg"
    assert len(served) == 2


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nZ", b"Z"])
async def test_what_stands_behind_an_answer_is_nobodys(behind: bytes) -> None:
    """An upstream that says more than it was asked must not answer the next request with it."""

    async def serve(reader, writer):
        await read_request(reader)
        writer.write(LENGTH + behind)
        await reader.read()

    async with upstream(serve) as (connections, address):
        for _ in range(2):
            assert await all_of(await ask(connections, address)) == b"abcdefg"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1), ValueError),
        (WHOLE + b"transfer-encoding: chunked\r\n\r\nZZ\r\n", ValueError),
        (WHOLE, ConnectionError),
        (WHOLE + b"content-length: 9\r\n\r\nabc", ConnectionError),
        (WHOLE + b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n", ConnectionError),
        (b"", ConnectionError),
    ],
)
async def test_what_is_no_whole_answer_is_an_error_behind_what_it_said(said: bytes, error: type[Exception]) -> None:
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(said)
        writer.close()

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address)
        with pytest.raises(error):
            await all_of(answer)
        with pytest.raises(error):  # and stays one
            await answer.piece(5)
        answer.close()


async def test_each_wait_has_its_own_limit() -> None:
    """A later, shorter limit counts although a longer one was set before; and one that is over does not count on."""

    async def serve(reader, writer):
        await read_request(reader)
        for piece in (WHOLE + b"\r\na", b"b"):
            writer.write(piece)
            await asyncio.sleep(0.3)
        await reader.read()

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address)
        assert await answer.piece(60) == b"a"
        assert await answer.piece(60) == b"b"
        with pytest.raises(TimeoutError):
            await answer.piece(0.05)
        with pytest.raises(TimeoutError):
            await answer.piece(0.0)
        answer.close()


async def test_a_wait_that_is_longer_than_the_first_lasts_as_long() -> None:
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(WHOLE + b"\r\na")
        await asyncio.sleep(0.5)
        writer.write(b"b")
        await reader.read()

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address)
        assert await answer.piece(0.4) == b"a"
        assert await answer.piece(10) == b"b"
        answer.close()


async def test_an_upstream_is_not_read_ahead_of_who_takes_its_answer() -> None:
    """It can send little more than the buffers of the system hold while nobody takes anything, and all in the end."""
    size, sent = 64 * 2**20, 0

    async def serve(reader, writer):
        nonlocal sent
        await read_request(reader)
        writer.write(WHOLE + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(2**20))
            await writer.drain()
            sent += 2**20

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address)
        num_read = len(await answer.piece(5))
        await asyncio.sleep(0.5)
        assert sent < size
        while piece := await answer.piece(5):
            num_read += len(piece)
        assert num_read == size


async def test_a_status_is_enough_where_nobody_reads_the_body() -> None:
    """Of one that never ends too; without a head there is none."""
    answers = [LENGTH[:-1], LENGTH, LENGTH, b"HTTP/1.1 200 OK\r\n"]
    connected = []

    async def serve(reader, writer):
        connected.append(writer)
        while answers:
            await read_request(reader)
            writer.write(answers.pop(0))
        writer.close()

    async with upstream(serve) as (connections, address):
        where = connections, address, "/v1/traces", None, b"{}"
        for _ in range(3):
            assert await ask_whole(*where, within_s=15, max_bytes=0) == (200, None)
        with pytest.raises(ConnectionError):
            await ask_whole(*where, within_s=15, max_bytes=0)
        assert len(connected) == 2, "a whole answer keeps its connection"


async def test_nobody_there() -> None:
    async def serve(reader, writer):
        writer.close()

    async with upstream(serve) as (connections, address):
        nobody = address._replace(port=1)
        with pytest.raises(NoConnection) as caught:
            await ask(connections, nobody)
        assert not caught.value.is_too_late
        with pytest.raises(NoConnection):
            await ask(connections, address._replace(host="no-such-name.invalid"))


async def test_one_that_closes_its_idle_connection_is_connected_to_anew() -> None:
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(LENGTH)
        writer.close()

    async with upstream(serve) as (connections, address):
        for _ in range(3):
            assert await all_of(await ask(connections, address)) == b"abcdefg"
            await asyncio.sleep(0.05)


async def test_an_answer_that_is_taken_late_does_not_read_on_for_the_next_one() -> None:
    """The first is whole and lies there, untaken; the second has filled its buffer on the same connection."""
    first, size, sent = MAX_UNREAD_BYTES + 1000, 64 * 2**20, 0

    async def serve(reader, writer):
        nonlocal sent
        await read_request(reader)
        writer.write(WHOLE + b"content-length: %d\r\n\r\n" % first + bytes(first))
        await read_request(reader)
        writer.write(WHOLE + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(2**20))
            await writer.drain()
            sent += 2**20

    async with upstream(serve) as (connections, address):
        early = await ask(connections, address)
        await until_async(lambda: early._is_whole)
        late = await ask(connections, address)
        assert late._connection is early._connection
        await until_async(lambda: late._num_unread > MAX_UNREAD_BYTES)
        assert len(await early.piece(5)) == first
        unread = late._num_unread
        await asyncio.sleep(0.3)
        assert late._num_unread == unread
        late.close()


@pytest.mark.parametrize("said", [LENGTH, WHOLE + b"connection: close\r\ncontent-length: 7\r\n\r\nabcdefg"])
async def test_an_answer_before_the_request_is_sent_ends_the_connection(said: bytes) -> None:
    """At once: the upstream may never read the rest."""
    released, served = asyncio.Event(), []

    async def serve(reader, writer):
        served.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await released.wait()
        writer.close()

    async with upstream(serve) as (connections, address):
        answer = await ask(connections, address, bytes(64 * 2**20))
        assert await all_of(answer) == b"abcdefg"
        assert answer._connection.transport.is_closing()
        await until_async(lambda: not answer._connection.is_open)
        released.set()
        assert await all_of(await ask(connections, address)) == b"abcdefg"
    assert len(served) == 2


@pytest.mark.parametrize(
    ("early", "words"),
    [
        (b"HTTP/1.1 099 No\r\ncontent-length: 3\r\n\r\nabc", "status is 99"),
        (b"HTTP/1.1 000 No\r\n\r\n", "status is 0"),
        (b"HTTP/1.1 199 Early\r\ncontent-length: 3\r\n\r\nabc", "has a body"),
    ],
)
async def test_nothing_before_the_answer_is_one(early: bytes, words: str) -> None:
    async def serve(reader, writer):
        await read_request(reader)
        writer.write(early + LENGTH)
        await reader.read()

    async with upstream(serve) as (connections, address):
        with pytest.raises(ValueError, match=words):
            await (await ask(connections, address)).piece(5)


async def test_an_address_that_nobody_asks_any_more_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(upstream_connections, "KEEPALIVE_S", 0.05)

    async def serve(reader, writer):
        await read_request(reader)
        writer.write(LENGTH)
        await reader.read()

    async with upstream(serve) as (connections, address):
        assert await all_of(await ask(connections, address)) == b"abcdefg"
        assert list(connections._idle) == [address]
        await until_async(lambda: not connections._idle)
        assert await all_of(await ask(connections, address)) == b"abcdefg"


# ---- kept connections that the upstream has closed


async def answer_once(reader, writer) -> None:
    await read_request(reader)
    writer.write(LENGTH)


async def test_a_kept_connection_that_was_closed_costs_nothing() -> None:
    """The upstream reads the second request and closes without a word: it is sent again over a new connection."""
    served = []

    async def serve(reader, writer):
        served.append(writer)
        await answer_once(reader, writer)
        await read_request(reader)
        writer.transport.abort()

    async with upstream(serve) as (connections, address):
        for _ in range(5):
            assert await all_of(await ask(connections, address)) == b"abcdefg"
            assert await all_of(await ask(connections, address)) == b"abcdefg"
    assert len(served) == 10


@pytest.mark.parametrize(
    ("said", "after_s", "num_served"),
    [(b"", 0.0, 2), (b"", 0.1, 1), (b"H", 0.0, 1), (WHOLE, 0.0, 1), (LENGTH[:-1], 0.0, 1)],
    ids=["ends its server too", "worked at", "a byte", "a head", "half"],
)
async def test_what_fails_is_sent_again_once_if_nothing_was_done_for_it(monkeypatch, said, after_s, num_served):
    """A request that ends its server, of which a byte came, or that was worked at, met no stale connection."""
    if after_s:
        monkeypatch.setattr(upstream_connections, "STALE_WITHIN_S", after_s / 2)
    served = []

    async def serve(reader, writer):
        served.append(writer)
        if len(served) == 1:
            await answer_once(reader, writer)
        await read_request(reader)
        await asyncio.sleep(after_s)
        writer.write(said)
        writer.close() if said else writer.transport.abort()

    async with upstream(serve) as (connections, address):
        assert await all_of(await ask(connections, address)) == b"abcdefg"
        with pytest.raises(ConnectionError):
            await all_of(await ask(connections, address))
    assert len(served) == num_served


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError()])
async def test_who_gives_up_a_whole_answer_cuts_nobodys_connection(error) -> None:
    """Its connection is another's by then."""

    async def serve(reader, writer):
        await answer_once(reader, writer)
        await answer_once(reader, writer)
        await reader.read()

    async with upstream(serve) as (connections, address):
        early = await ask(connections, address)
        await until_async(lambda: early._is_whole)
        late = await ask(connections, address)
        early.end(error)
        assert await all_of(early) == b"abcdefg"
        early.close()
        assert await all_of(late) == b"abcdefg"


async def test_where_nobody_listens_any_more_there_is_no_connection() -> None:
    servers = []

    async def serve(reader, writer):
        await answer_once(reader, writer)
        await read_request(reader)
        servers[0].close()
        writer.transport.abort()

    servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
    connections = UpstreamConnections(RoundTrips())
    address = Address(False, "127.0.0.1", servers[0].sockets[0].getsockname()[1], "/at")
    assert await all_of(await ask(connections, address)) == b"abcdefg"
    with pytest.raises(NoConnection):
        await all_of(await ask(connections, address))
    connections.close()


async def test_who_has_left_meanwhile_is_not_asked_for_again() -> None:
    served = []

    async def serve(reader, writer):
        served.append(writer)
        await answer_once(reader, writer)
        await read_request(reader)
        writer.transport.abort()

    async with upstream(serve) as (connections, address):
        assert await all_of(await ask(connections, address)) == b"abcdefg"
        answer = await ask(connections, address)
        answer.close()
        await asyncio.sleep(0.05)
    assert len(served) == 1
