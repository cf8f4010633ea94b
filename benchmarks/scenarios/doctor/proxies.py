"""Proxies that do what is wrong with some: collect a stream before passing it on, or send small pieces under Nagle.

    async with proxy(upstream_port, Buffering()) as url: ...

Plain TCP in both directions; only the answers' way is spoilt.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

ACK_S = 0.040  # Linux's delayed acknowledgement


class Spoiler(Protocol):
    """What becomes of a server's bytes on their way to the client."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


def _connected(port: int, spoiler: Spoiler) -> socket.socket:
    """A connection to the server, with a window and packets as small as the spoiler wants them."""
    made = socket.socket()
    if isinstance(spoiler, SlowReader):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, spoiler.receive_buffer_bytes)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, spoiler.packet_bytes)
    made.connect(("127.0.0.1", port))
    made.setblocking(False)
    return made


class Buffering:
    """Passes on when so many bytes have gathered, or the answer is over (as a proxy that buffers event streams)."""

    def __init__(self, size: int = 64 * 1024) -> None:
        self._size = size

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held, is_stream = b"", False
        while piece := await reader.read(65536):
            if piece.startswith(b"HTTP/1.1 "):
                is_stream = b"text/event-stream" in piece[:500]
            held += piece
            if not is_stream or len(held) >= self._size or held.endswith(b"0\r\n\r\n"):
                writer.write(held)
                held = b""
                await writer.drain()
        writer.write(held)


class Delaying:
    """Holds each request for so long, as a gateway does that checks it with somebody else; answers go on at once."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pass_on(reader, writer)

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            if piece.startswith(b"POST "):
                await asyncio.sleep(self.delay_s)
            writer.write(piece)


class Deadline:
    """Gives each request so many milliseconds, and leaves answers alone."""

    def __init__(self, ms: int) -> None:
        self.header = b"X-Request-Deadline-Ms: %d\r\n" % ms

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pass_on(reader, writer)

    def with_header(self, piece: bytes) -> bytes:
        line, _, rest = piece.partition(b"\r\n")
        return line + b"\r\n" + self.header + rest if line.endswith(b" HTTP/1.1") else piece


class Failing:
    """Closes every so-manieth connection when it has been asked something, as a proxy does whose pool is too small."""

    def __init__(self, every: int) -> None:
        self._every, self._asked = every, 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _pass_on(reader, writer)

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            if piece.startswith(b"POST "):
                self._asked += 1
                if self._asked % self._every == 0:
                    return
            writer.write(piece)


class DelayedAck:
    """Passes a small piece on only once the piece before has been acknowledged, 40 ms after it went: what Nagle's
    algorithm does against a receiver that delays its acknowledgements. What comes meanwhile goes together."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        acked_at = 0.0
        while piece := await reader.read(65536):
            wait_s = acked_at - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                piece += _ready(reader)
            writer.write(piece)
            acked_at = loop.time() + ACK_S


class SlowReader:
    """A client at the end of a thin line: small packets, a small window, and 4 KiB read every 150 ms. (On loopback
    alone the server's kernel would take megabytes off its hands.)"""

    receive_buffer_bytes, packet_bytes, read_bytes, pause_s = 4096, 536, 4096, 0.15

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_stream = False
        while piece := await reader.read(self.read_bytes):
            writer.write(piece)
            if piece.startswith(b"HTTP/1.1 "):
                is_stream = b"text/event-stream" in piece[:500]
            if is_stream:
                await asyncio.sleep(self.pause_s)


def _ready(reader: asyncio.StreamReader) -> bytes:
    """What has come by now, without waiting."""
    buffered = bytes(reader._buffer)  # type: ignore[attr-defined]
    del reader._buffer[:]  # type: ignore[attr-defined]
    return buffered


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes] = bytes
) -> None:
    while piece := await reader.read(65536):
        writer.write(change(piece))


@asynccontextmanager
async def proxy(upstream_port: int, spoiler: Spoiler) -> AsyncIterator[str]:
    """A proxy on a free loopback port; yields its URL."""

    changes = spoiler.with_header if isinstance(spoiler, Deadline) else bytes

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(
            sock=_connected(upstream_port, spoiler), limit=4096 if isinstance(spoiler, SlowReader) else 2**16
        )
        for one in (writer, up_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            asyncio.create_task(
                spoiler.ask(reader, up_writer)
                if isinstance(spoiler, Delaying | Failing)
                else _pass_on(reader, up_writer, changes)
            ),
            asyncio.create_task(spoiler.carry(up_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for task in ways:
            task.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        up_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
