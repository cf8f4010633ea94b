"""How long it takes until a dead engine process gets a successor: longer, the more died one after the other."""

import asyncio
import logging
import time

log = logging.getLogger("splittime.engine")
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0)  # after deaths in a row; a minute of health starts over
HEALTHY_AFTER_S = 60.0


class DeathsInRow:
    def __init__(self) -> None:
        self._number = 0

    def begin(self, started_ns: int) -> None:
        """A process died that was started then."""
        if time.monotonic_ns() - started_ns > HEALTHY_AFTER_S * 1e9:
            self._number = 0

    async def wait(self, num_restarts: int) -> None:
        """Returns when the next process is to be started, which may fail too. num_restarts: with that one."""
        delay_s = RESTART_DELAYS_S[min(self._number, len(RESTART_DELAYS_S) - 1)]
        self._number += 1
        log.warning("starting a new engine process in %.0f s (restart %d)", delay_s, num_restarts)
        await asyncio.sleep(delay_s)
