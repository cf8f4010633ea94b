"""An upstream that failed again and again is asked by the gateway itself whether it lives, before any request is.

Asked is `GET /v1/models` of the config's address, with its key: it costs an upstream nothing, and tells a key that is
refused, a page of a proxy, and a server that is not there. Who answers it is tried by one request, which another
upstream may still have; who does not stays alone. A server that does not have the path tells nothing, and is tried. So
is one that lets this key list no models, unless it has refused the key when requests came.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.sent_headers import ANTHROPIC_KEY, key_headers
from splittime.gateway.told_error import decoded, told_error
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.gateway.upstreams import Upstream
from splittime.gateway.verdict import KEY_REFUSED

PATH = "/v1/models"
PERIOD_S = 0.1  # between two looks at which are to be asked
MOST_S = 5.0
MAX_BYTES = 2**20
TELLS_NOTHING = (404, 405, 429, 501)


class HealthChecks:
    """All of the upstreams of one version of the config. on_look: called each `PERIOD_S`, as a pause may have ended
    since the last time, or an opening. `begin` and `end` inside the event loop."""

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
            await asyncio.sleep(PERIOD_S)

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
            connections, upstream.address, PATH, None, within_s=within_s, max_bytes=MAX_BYTES, headers=headers
        )
    except (OSError, ValueError):
        return False
    if status in KEY_REFUSED:
        return not upstream.is_key_refused
    told = [] if body is None else decoded(body)  # a list of models, in whatever form
    return status in TELLS_NOTHING or (status == 200 and isinstance(told, dict | list) and told_error(told) is None)
