"""An upstream that answers at once and never with an answer: it prints its port and does so until it is ended.

    python -m benchmarks.scenarios.black_hole refusing|missing|page|empty|cut|error

refusing: 401, with the caller's key in its words. missing: 404 of the model. page: HTML with 200. empty: 200 and
nothing. cut: 200 and half an object. error: a stream whose first event is an error.
"""

import asyncio
import json
import re
import sys

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def fault(message: str, code: int) -> bytes:
    return json.dumps({"error": {"message": message, "type": "error", "code": code}}).encode()


def answer(kind: str, head: bytes) -> bytes:
    if kind == "refusing":
        return whole(401, fault(f"no such key in {head.decode('latin-1')}", 401))
    if kind == "missing":
        return whole(404, fault("the model does not exist", 404))
    if kind == "page":
        return whole(200, b"<html>welcome</html>", "text/html")
    if kind == "empty":
        return whole(200, b"")
    if kind == "cut":
        return whole(200, b'{"id": "x", "choices": [{"te')
    event = b"data: " + fault("out of memory", 500) + b"\n\n"
    return STREAM + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


KINDS = ("refusing", "missing", "page", "empty", "cut", "error")


async def main(kind: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(answer(kind, head))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] not in [[kind] for kind in KINDS]:
        sys.exit(f"one of {', '.join(KINDS)}")
    asyncio.run(main(sys.argv[1]))
