"""Tied requests: a stream of which no byte has come for a while is sent to a second upstream too.

Whoever gives an event first has the client; the other is cancelled at that moment, before anything of the answer is
passed on (Dean and Barroso, "The Tail at Scale", 2013). Until it comes, a stream may be in its upstream's queue, which
comments say too, and after it nothing is sent twice. An answer that is no stream has its first byte at its end,
which says nothing of a queue, so such a request is never tied.

The second is an attempt like a retry: within `max_attempts`, counted by the budget of retries, at an upstream that has
room at this moment. How long "a while" is, the config says, or the waits that were seen: then those of a model's
upstreams together, as one that is always slow would set its own measure. Of a first that lost, the wait is known to
have been longer than it was given, and that is what is noted.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from math import ceil
from typing import TYPE_CHECKING

from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig, TiedConfig
from splittime.ledger.attempts import CANCELLED, TIED_LOST

if TYPE_CHECKING:
    from splittime.gateway.running_attempt import RunningAttempt

now_ns = time.monotonic_ns
WINDOW = 256  # waits of a line that are remembered
LEAST_SEEN = 20  # before that a quantile is none
FIRST, SECOND, NEITHER = "first", "second", "neither"
RESULTS = (FIRST, SECOND, NEITHER, CANCELLED)


class TiedRequests:
    """What all ties of a gateway share. config: None for no ties. results: of ties, by who had a byte first; those of
    the config before go on being counted."""

    def __init__(self, config: TiedConfig | None, results: Counter[str] | None = None) -> None:
        self._config = config
        self._waits_ns: dict[str, deque[int]] = {}  # by line, which only the config names
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0)) if results is None else results

    @property
    def is_on(self) -> bool:
        return self._config is not None

    def after_s(self, line: str) -> float | None:
        """Returns how long a stream waits for a byte before it is sent to a second; None while that is not known."""
        if self._config is None or self._config.quantile is None:
            return None if self._config is None else self._config.after_s
        seen = sorted(self._waits_ns.get(line, ()))
        if len(seen) < LEAST_SEEN:
            return None
        return seen[ceil(self._config.quantile * len(seen)) - 1] / 1e9

    def note_wait(self, line: str, wait_ns: int) -> None:
        self._waits_ns.setdefault(line, deque(maxlen=WINDOW)).append(wait_ns)


class TiedRace:
    """first: the attempt that has been sent. send_second: sends another, or returns None where that may not be.

    decisive: who had a byte first, or who failed last; who is still at work where the client leaves."""

    def __init__(
        self,
        tied: TiedRequests,
        line: str,
        first: "RunningAttempt",
        send_second: "Callable[[RunningAttempt], Awaitable[RunningAttempt | None]]",
    ) -> None:
        self._tied, self._line, self._first, self._send_second = tied, line, first, send_second
        self._opening: dict[asyncio.Task[None], RunningAttempt] = {}
        self._second: RunningAttempt | None = None
        self.decisive = first

    async def run(self) -> None:
        """Returns when `decisive` has the first byte of an answer. Raises what the last of them failed with, if none
        has one."""
        result = CANCELLED
        try:
            self._open(self._first)
            done, _ = await asyncio.wait(self._opening, timeout=self._tied.after_s(self._line))
            if not done and (second := await self._send_second(self._first)) is not None:
                self._second = second
                self._open(second)
            failure = await self._until_decided()
            result = self._result(failure)
        finally:
            self._end(result)
        if failure is not None:
            raise failure

    def _open(self, attempt: "RunningAttempt") -> None:
        self._opening[asyncio.get_running_loop().create_task(attempt.open())] = attempt

    async def _until_decided(self) -> BaseException | None:
        """Returns None when one has a byte, or the last one's failure."""
        failure: BaseException | None = None
        while self._opening:
            done, _ = await asyncio.wait(self._opening, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._opening if task in done]:
                self.decisive = self._opening.pop(task)
                failure = task.exception()
                if failure is None:
                    return None
        return failure

    def _result(self, failure: BaseException | None) -> str:
        if failure is not None:
            return NEITHER
        return SECOND if self.decisive is self._second else FIRST

    def _end(self, result: str) -> None:
        """Nobody but `decisive` goes on: what is still under way is given up at once, and written down."""
        is_won = result in (FIRST, SECOND)
        if result == CANCELLED:
            self.decisive = next(iter(self._opening.values()), self.decisive)
        if is_won:
            self._note_waits()
        for task, attempt in self._opening.items():
            task.add_done_callback(lambda over: over.cancelled() or over.exception())  # else asyncio would complain
            task.cancel()
            attempt.give_up(TIED_LOST if is_won else CANCELLED)
        if self._second is not None:
            self._tied.results[result] += 1

    def _note_waits(self) -> None:
        first_byte_ns = self.decisive.relay.first_byte_ns
        if first_byte_ns is not None:
            self._tied.note_wait(self._line, first_byte_ns - self.decisive.begin_ns)
        if self._first in self._opening.values():
            self._tied.note_wait(self._line, now_ns() - self._first.begin_ns)


def check_tied(config: GatewayConfig) -> None:
    """Raises `ConfigError` for `[tied]` that says no wait or two, or that could never send anything."""
    tied = config.tied
    if tied is None:
        return
    if (tied.after_s is None) == (tied.quantile is None):
        hint = "after_s = 0.5 is a number of seconds, quantile = 0.95 goes by the waits that were seen"
        raise ConfigError("tied.after_s: [tied] needs it or quantile, and not both", param="tied.after_s", hint=hint)
    if config.retries.max_attempts < 2:
        hint = "a tied request is a second attempt: raise max_attempts, or take [tied] out"
        raise ConfigError("tied: retries.max_attempts is 1", param="retries.max_attempts", value=1, limit=2, hint=hint)
    served = Counter(model for upstream in config.upstream for model in set(upstream.models))
    if max(served.values(), default=0) < 2:
        hint = "give a model a second [[upstream]], or take [tied] out"
        raise ConfigError("tied: no model has two upstreams", param="tied", hint=hint)
