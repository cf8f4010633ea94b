"""How many requests wait at upstreams that keep no accounts: asked of their `/metrics`, once a second each.

Only where `queue_wait_s` is set. What is asked is the address of the config, with its key; redirects are not followed,
and at most `MAX_BYTES` of an answer are read. A poll that fails tells nothing, and the limit stays as it is; the first
that fails is logged, for each upstream.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.upstreams import Upstream
from splittime.wire.dialects.dialect import parse

log = logging.getLogger("splittime.gateway")

PERIOD_S, TIMEOUT_S = 1.0, 5.0
MAX_BYTES = 4 * 2**20
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")


class QueuePolls:
    """on_change: called when a limit may have risen. `begin` and `end` inside the event loop."""

    def __init__(self, upstreams: Sequence[Upstream], on_change: Callable[[], None]) -> None:
        self._polled = [one for one in upstreams if one.in_flight_limit is not None and not one.keeps_accounts]
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._silent: set[str] = set()

    def begin(self, connections: UpstreamConnections) -> None:
        self._tasks = [asyncio.create_task(self._poll(connections, upstream)) for upstream in self._polled]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, connections: UpstreamConnections, upstream: Upstream) -> None:
        while True:
            count = await waiting_at(connections, upstream)
            if count is not None and upstream.in_flight_limit is not None:
                upstream.in_flight_limit.note_waiting(count, upstream.requests, time.monotonic_ns())
                self._on_change()
            elif upstream.name not in self._silent:
                self._silent.add(upstream.name)
                log.warning("upstream %r does not tell how many wait there (/metrics): %s", upstream.name, _KEPT)
            await asyncio.sleep(PERIOD_S)


async def waiting_at(connections: UpstreamConnections, upstream: Upstream) -> int | None:
    """Returns how many requests wait there, of all its models; None if it does not tell."""
    where = connections, upstream.address, "/metrics"
    try:
        status, body = await ask_whole(*where, upstream.key, within_s=TIMEOUT_S, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return None
    text = body.decode("utf-8", "replace") if status == 200 and body else ""
    samples = [value for value in parse(text, WAITING).values() if 0 <= value < 1e9]  # a NaN is neither
    return round(sum(samples)) if samples else None


_KEPT = "its limit stays as it is"
