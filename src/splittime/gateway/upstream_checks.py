"""What the gateway itself asks upstreams: whether one that failed again and again lives, and how many wait at it.

One that failed again and again is asked before any request is sent to it.

Asked is `GET /v1/models` of the config's address, with its key: it costs an upstream nothing, and tells a key that is
refused, a page of a proxy, and a server that is not there. Who answers it is tried by one request, which another
upstream may still have; who does not stays alone. A server that does not have the path tells nothing, and is tried. So
is one that lets this key list no models, unless it has refused the key when requests came.

How many requests wait at upstreams that keep no accounts: asked of their `/metrics`, once a second each.

Only where `queue_wait_s` is set. What is asked is the address of the config, with its key; redirects are not followed,
and at most `MAX_METRICS_BYTES` of an answer are read. A poll that fails tells nothing, and the limit stays as it is;
the first that fails is logged, for each upstream.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.upstreams import ANTHROPIC_KEY, Upstream, key_headers
from splittime.gateway.verdict import KEY_REFUSED, decoded, told_error
from splittime.wire.dialects import parse

PATH = "/v1/models"
LOOK_PERIOD_S = 0.1  # between two looks at which are to be asked
MOST_S = 5.0
MAX_LIST_BYTES = 2**20
TELLS_NOTHING = (404, 405, 429, 501)
log = logging.getLogger("splittime.gateway")

POLL_PERIOD_S, TIMEOUT_S = 1.0, 5.0
MAX_METRICS_BYTES = 4 * 2**20
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")


class HealthChecks:
    """All of the upstreams of one version of the config. on_look: called each `LOOK_PERIOD_S`, as a pause may have
    ended since the last time, or an opening. `begin` and `end` inside the event loop."""

    def __init__(self, upstreams: Sequence[Upstream], on_look: Callable[[], None]) -> None:
        self._upstreams, self._on_look = upstreams, on_look
        self._looking: asyncio.Task[None] | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}

    def begin(self, connections: UpstreamConnections) -> None:
        for upstream in self._upstreams:
            upstream.breaker.has_checker = True
        self._looking = asyncio.create_task(self._look(connections))

    async def end(self) -> None:
        tasks = [*self._asking.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, connections: UpstreamConnections) -> None:
        while True:
            at_ns = time.monotonic_ns()
            for upstream in self._upstreams:
                if upstream.breaker.is_to_be_checked(at_ns) and upstream.name not in self._asking:
                    self._asking[upstream.name] = asyncio.create_task(self._check(connections, upstream))
            self._on_look()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _check(self, connections: UpstreamConnections, upstream: Upstream) -> None:
        try:
            is_well = await lives(connections, upstream)
            upstream.breaker.note_checked(time.monotonic_ns(), is_well=is_well)
        finally:
            del self._asking[upstream.name]


async def lives(connections: UpstreamConnections, upstream: Upstream) -> bool:
    """Returns whether an upstream may be tried."""
    within_s = min(MOST_S, upstream.config.first_byte_s)
    headers = key_headers(upstream.key, is_anthropics=(upstream.key or "").startswith(ANTHROPIC_KEY))
    try:
        status, body = await ask_whole(
            connections, upstream.address, PATH, None, within_s=within_s, max_bytes=MAX_LIST_BYTES, headers=headers
        )
    except (OSError, ValueError):
        return False
    if status in KEY_REFUSED:
        return not upstream.is_key_refused
    told = [] if body is None else decoded(body)  # a list of models, in whatever form
    return status in TELLS_NOTHING or (status == 200 and isinstance(told, dict | list) and told_error(told) is None)


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
            await asyncio.sleep(POLL_PERIOD_S)


async def waiting_at(connections: UpstreamConnections, upstream: Upstream) -> int | None:
    """Returns how many requests wait there, of all its models; None if it does not tell."""
    where = connections, upstream.address, "/metrics"
    try:
        status, body = await ask_whole(*where, upstream.key, within_s=TIMEOUT_S, max_bytes=MAX_METRICS_BYTES)
    except (OSError, ValueError):
        return None
    text = body.decode("utf-8", "replace") if status == 200 and body else ""
    samples = [value for value in parse(text, WAITING).values() if 0 <= value < 1e9]  # a NaN is neither
    return round(sum(samples)) if samples else None


_KEPT = "its limit stays as it is"
