"""A gateway and its upstreams in one event loop: upstreams say the bytes of a test, and clients have no sockets."""

import asyncio
import contextlib
import json
import tomllib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from splittime.gateway.app import GatewayApp
from splittime.gateway.breaks import LoopLag
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.service import GatewayService
from splittime.gateway.versions import GatewayVersions
from splittime.ledger.store import Ledger

from .conftest import upstream
from .hostile import whole

CHAT = "/v1/chat/completions"
MOMENT_S = 0.01
PATIENT = "[retries]\npause_s = 0.0\n"


class Told(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def code(self) -> str | None:
        """Of an error, as an answer or as the last event."""
        data = self.body.rstrip().split(b"data: ")[-1] if b"data: " in self.body else self.body
        if data == b"[DONE]":
            return None
        error = json.loads(data).get("error")
        return None if error is None else error["code"]


class Saying:
    """An upstream that answers each POST with these bytes, a moment after each other if they are several, by the
    request's body if they are a function of it, and ends the connection where it `hangs_up`. asked: heads and bodies.
    models: what it answers to the gateway's own question."""

    def __init__(
        self,
        said: bytes | list[bytes] | Callable[[bytes], list[bytes]],
        hangs_up: bool = False,
        models: bytes | None = None,
    ) -> None:
        self.said, self.hangs_up, self.asked = said, hangs_up, list[tuple[bytes, bytes]]()
        self.models = whole(200, {"object": "list", "data": []}) if models is None else models
        self.num_checks = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET "):
            self.num_checks += 1
            writer.write(self.models)
            return True
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.asked.append((head, await reader.readexactly(length)))
        said = self.said(self.asked[-1][1]) if callable(self.said) else self.said
        for number, piece in enumerate([said] if isinstance(said, bytes) else said):
            await asyncio.sleep(MOMENT_S * (number > 0))
            writer.write(piece)
            await writer.drain()
        return not self.hangs_up


async def asked(
    app: GatewayApp,
    headers: dict[str, str] | None = None,
    path: str = CHAT,
    method: str = "POST",
    leaves: asyncio.Event | None = None,
    **fields,
) -> Told:
    """Ask the application itself, as a client that leaves then."""
    body = json.dumps({"model": "m", "messages": [], "max_tokens": 3, **fields}).encode()
    given = {"host": "127.0.0.1", "content-length": str(len(body)), **(headers or {})}
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "http_version": "1.1"}
    scope |= {
        "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
        "scheme": "http",
        "extensions": {},
    }
    waiting, told = [{"type": "http.request", "body": body, "more_body": False}], list[dict]()

    async def receive():
        if waiting:
            return waiting.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        told.append(message)

    async with asyncio.timeout(20):
        await app(scope, receive, send)
    if not told:
        return Told(0, {}, b"")
    return Told(told[0]["status"], dict(told[0]["headers"]), b"".join(one.get("body", b"") for one in told[1:]))


@contextlib.asynccontextmanager
async def gateway_before(
    upstreams: dict[str, Saying | str], text: str = PATIENT, **more
) -> AsyncIterator[tuple[GatewayApp, GatewayService]]:
    """Runs a gateway in front of these, by name. Of two, the first in the dict is asked first. more: keys of each
    `[[upstream]]`."""
    for name, one in upstreams.items():
        url = one if isinstance(one, str) else await one.start()
        text += upstream(name, url, "m", **{"connect_s": 15.0, **more})  # a busy machine connects late
    config = config_of(tomllib.loads(text))
    versions = GatewayVersions(config, secrets_of(config), Ledger())
    await versions.open()
    versions.current.lag = LoopLag()  # one that does not run: a busy machine's would excuse upstreams that are too late
    for number, one in enumerate(versions.current.router.upstreams):
        one.in_flight.plain_tokens += number * 10**6
    try:
        yield GatewayApp(versions), versions.current
    finally:
        await versions.close()
        for one in upstreams.values():
            one.stop() if isinstance(one, Saying) else None
        await asyncio.sleep(0)


def counted(gateway: GatewayService, name: str, **labels: str) -> float:
    """Returns the sum of a metric's series with these labels."""
    lines = gateway.metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith(f"splittime_gateway_{name}{{")]
    found = [line for line in found if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)
