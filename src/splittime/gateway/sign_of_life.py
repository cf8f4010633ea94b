"""While a stream waits for an upstream, its client is told that it does, and how long that may last at the most.

The head of the answer goes first, so that what refuses the request afterwards is an error event and no status of its
own. Comments are no events: clients skip them, and proxies between see that the connection lives.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from splittime.gateway.upstreams import Routed
from splittime.web import http

now_ns = time.monotonic_ns
HEAD: http.Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class SignOfLife:
    """every_s: between two comments; None for none. has_begun: the client has the head, by this or by a stream that
    broke off behind a whole event."""

    def __init__(self, send: http.Send, headers: Callable[[], http.Headers], every_s: float | None) -> None:
        self._send, self._headers, self._every_s = send, headers, every_s
        self.has_begun = False

    async def during(self, waiting: Coroutine[Any, Any, Routed], until_ns: int) -> Routed:
        """Returns what was waited for. until_ns: when the wait ends at the latest."""
        if self._every_s is None:
            return await waiting
        loop, telling = asyncio.get_running_loop(), list[asyncio.Task[None]]()

        def begin(every_s: float) -> None:
            telling.append(loop.create_task(self._tell(every_s, until_ns)))

        timer = loop.call_later(self._every_s, begin, self._every_s)
        try:
            return await waiting
        finally:
            timer.cancel()
            for task in telling:
                task.cancel()  # and not waited for: who is cancelled here would lose the place that it has just got

    async def _tell(self, every_s: float, until_ns: int) -> None:
        try:
            while True:
                await self._tell_once(max(0.0, (until_ns - now_ns()) / 1e9))
                await asyncio.sleep(every_s)
        except http.Disconnected:
            pass  # the request's own task sees it too

    async def _tell_once(self, left_s: float) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*HEAD, *self._headers()]})
        comment = b": queued; it has an upstream or is refused within %.1f s\n\n" % left_s
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})
