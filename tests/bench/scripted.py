"""A server that answers each request with prepared bytes: what no well-behaved server would send."""

import asyncio
from contextlib import asynccontextmanager

from splittime.bench.alarm import Alarm
from splittime.bench.client import Client
from splittime.bench.share import LoadShare
from splittime.wire.target import Target

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str = "a") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % text.encode()


def whole(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def scripted(*answers, closes=True):
    """Each connection's next request gets the next answer: bytes, or pieces of bytes with pauses between."""
    left = list(answers)
    seen = []

    async def serve(reader, writer):
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append((head, await reader.readexactly(length)))
                answer = left.pop(0)
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


def client_of(
    target: Target, alarm: Alarm, kind: str = "mock", model: str | None = None, timeout_s: float = 60.0
) -> Client:
    """A client of one server, as a load makes it."""
    names = {"kinds": (kind,), "models": (model,), "run_id": "t"}
    return Client(LoadShare(jobs=(), targets=(target,), timeout_s=timeout_s, **names), 0, alarm)
