"""How many requests wait at upstreams that keep no accounts: asked of their `/metrics`, once a second each.

Only where `queue_wait_s` is set. What is asked is the address of the config, with its key; redirects are not followed,
and at most `MAX_BYTES` of an answer are read. A poll that fails tells nothing, and the limit stays as it is; the first
that fails is logged, for each upstream.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from splittime.gateway.upstreams import Upstream
from splittime.wire.scrape import parse

log = logging.getLogger("splittime.gateway")

PERIOD_S, TIMEOUT_S = 1.0, 5.0
MAX_BYTES = 4 * 2**20
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")


class QueuePolls:
    """on_change: called when a limit may have risen. `begin` and `end` inside the event loop."""

    def __init__(self, upstreams: Sequence[Upstream], on_change: Callable[[], None]) -> None:
        self._polled = [one for one in upstreams if one.adapted is not None and not one.keeps_accounts]
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._silent: set[str] = set()

    def begin(self, session: aiohttp.ClientSession) -> None:
        self._tasks = [asyncio.create_task(self._poll(session, upstream)) for upstream in self._polled]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, session: aiohttp.ClientSession, upstream: Upstream) -> None:
        while True:
            count = await waiting_at(session, upstream)
            if count is not None and upstream.adapted is not None:
                upstream.adapted.note_waiting(count, upstream.requests, time.monotonic_ns())
                self._on_change()
            elif upstream.name not in self._silent:
                self._silent.add(upstream.name)
                log.warning("upstream %r does not tell how many wait there (/metrics): %s", upstream.name, _KEPT)
            await asyncio.sleep(PERIOD_S)


async def waiting_at(session: aiohttp.ClientSession, upstream: Upstream) -> int | None:
    """Returns how many requests wait there, of all its models; None if it does not tell."""
    headers = {"accept-encoding": "identity"}
    if upstream.key is not None:
        headers["authorization"] = f"Bearer {upstream.key}"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            url = upstream.base_url + "/metrics"
            async with session.get(url, headers=headers, allow_redirects=False) as response:
                text = await _text(response) if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return None
    samples = [value for value in parse(text, WAITING).values() if 0 <= value < 1e9]  # a NaN is neither
    return round(sum(samples)) if samples else None


async def _text(response: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            response.close()
            return ""
    return body.decode("utf-8", "replace")


_KEPT = "its limit stays as it is"
