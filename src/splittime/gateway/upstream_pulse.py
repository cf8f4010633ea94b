"""Whether an upstream lives that writes an answer which comes as a whole.

Of such an answer no byte comes before its end, so how long none came says nothing: a limit of `first_byte_s` cut every
long one, had it written again elsewhere, and opened breakers for everybody. From `first_byte_s` on the upstream is
asked for `/health` instead, once a period for all who wait there. Any answer that is no 5xx is a sign of life, so a
server without that path lives too, and so does one that takes its time: it has `SILENT_S` for it. After that, or after
`DEAD_AFTER` answers in a row that were no sign of life, the answers are given up. An upstream that lives has until
`whole_answer_s`.
"""

import asyncio

from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.upstream_answer import UpstreamAnswer
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.wire.target import Address

PATH = "/health"
PERIOD_S = 5.0  # between two questions; first_byte_s where that is less
SILENT_S = 30.0  # for an answer; ten times first_byte_s where that is less
DEAD_AFTER = 4
MAX_BYTES = 64 * 1024


class UpstreamSilent(TimeoutError):
    """An upstream does not say that it lives."""


class UpstreamPulse:
    """Watches over the whole answers of one upstream. quiet_s: how long one is awaited before the upstream is asked."""

    def __init__(self, address: Address, key: str | None, quiet_s: float) -> None:
        self._address, self._key, self._quiet_s = address, key, quiet_s
        self._period_s, self._silent_s = min(PERIOD_S, quiet_s), min(SILENT_S, 10 * quiet_s)
        self._due_s: dict[UpstreamAnswer, float] = {}  # of the loop's clock, the earliest first
        self._asking: asyncio.Task[None] | None = None

    def watch(self, answer: UpstreamAnswer, connections: UpstreamConnections) -> None:
        """Give the answer up, with `UpstreamSilent`, when the upstream does not live; until `leave`."""
        loop = asyncio.get_running_loop()
        self._due_s[answer] = loop.time() + self._quiet_s
        if self._asking is None:
            self._asking = loop.create_task(self._ask(connections))

    def leave(self, answer: UpstreamAnswer) -> None:
        """Nobody waits for it any more."""
        self._due_s.pop(answer, None)

    async def _ask(self, connections: UpstreamConnections) -> None:
        num_silent = 0
        try:
            while self._due_s:
                quiet_s = min(self._due_s.values()) - asyncio.get_running_loop().time()
                if quiet_s > 0:
                    num_silent = 0
                    await asyncio.sleep(quiet_s)
                    continue
                signs, _ = await asyncio.gather(self._no_signs(connections), asyncio.sleep(self._period_s))
                num_silent = num_silent + signs if signs else 0
                if num_silent >= DEAD_AFTER:
                    self._give_up()
        finally:
            self._asking = None

    async def _no_signs(self, connections: UpstreamConnections) -> int:
        """Returns 0 for a sign of life, 1 for an answer that is none, and all that it takes for no answer."""
        where = connections, self._address, PATH, self._key
        try:
            status, _ = await ask_whole(*where, within_s=self._silent_s, max_bytes=MAX_BYTES)
        except TimeoutError:
            return DEAD_AFTER
        except (OSError, ValueError):
            return 1
        return int(status >= 500)

    def _give_up(self) -> None:
        at_s = asyncio.get_running_loop().time()
        for answer in [one for one, due_s in self._due_s.items() if due_s <= at_s]:
            del self._due_s[answer]
            answer.end(UpstreamSilent())
