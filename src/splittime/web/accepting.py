"""The server that accepts connections: many in a turn of its loop, and those that wait at a port that it leaves."""

import asyncio
import contextlib
import socket
from typing import Any, cast

import uvicorn

from splittime.web.connection import CLOSE, ConnectionProtocol

ACCEPTS_PER_TURN = 16
HANDSHAKE_S = 5.0  # of TLS: until then a connection has a descriptor, and no place that it could give to a newcomer


class ManyAcceptingServer(uvicorn.Server):
    """Leaves signals alone, and accepts many connections in a turn of the event loop. libuv accepts one from each
    listening socket, so there are several that share one queue. With a single one, a client that came while turns were
    long waited for as many turns as there were newcomers before it."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        own = list(sockets or ())
        await super().serve([*own, *(one.dup() for one in own for _ in range(ACCEPTS_PER_TURN - 1))])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does for sockets, with a bound of our own on handshakes."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self._protocol, sock=one, backlog=self.config.backlog, **self._tls())
            for one in sockets or ()
        ]
        self.started = True

    def _tls(self) -> dict[str, Any]:
        return {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S} if self.config.ssl else {}

    def leave(self, listener: socket.socket) -> None:
        """Stop listening where others go on to, and serve whoever the system has let in there. Each answer from here on
        ends its connection: the next one leads to the others. listener: one more of that address, and the last."""
        address, loop = listener.getsockname(), asyncio.get_running_loop()
        for one in self.servers:
            if one.sockets and one.sockets[0].getsockname() == address:
                one.close()
        waiting = _accepted(listener, self.config.backlog)
        listener.close()
        self.config.encoded_headers.append(CLOSE)
        self.server_state.default_headers.append(CLOSE)
        for open_one in self.server_state.connections:
            cast(ConnectionProtocol, open_one).end_soon()
        adopting = (loop.connect_accepted_socket(self._protocol, one, **self._tls()) for one in waiting)
        self._adopted = asyncio.gather(*adopting, return_exceptions=True)

    def _protocol(self) -> asyncio.Protocol:
        """Returns the protocol of one more connection, as uvicorn makes it."""
        made = self.config.http_protocol_class
        return cast(
            asyncio.Protocol,
            made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state),  # type: ignore[call-arg]
        )

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def _accepted(listener: socket.socket, most: int) -> list[socket.socket]:
    """Returns the connections that wait there, without waiting for any."""
    listener.setblocking(False)
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):  # there is no other, or no descriptor for it
        while len(found) < most:
            found.append(listener.accept()[0])
    for one in found:
        one.setblocking(False)
    return found
