"""What is counted here and kept in a store: brought there now and then, by a thread of its own, and once at the end."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

log = logging.getLogger("splittime.gateway")

END_S = 3.0  # for the last exchange

Told = TypeVar("Told")
Kept = TypeVar("Kept")


class Exchanges(Generic[Told, Kept]):
    """`take` returns what the store is to be told, `send` tells it and returns what it then holds, `keep` takes that.
    `send` is called by the thread and may wait; the others by the event loop.

    trouble: what is logged, once, where an exchange fails. Whatever fails, the next is tried: `send` sees to it that
    nothing is lost for that.
    """

    def __init__(
        self, every_s: float, take: Callable[[], Told], send: Callable[[Told], Kept], keep: Callable[[Kept], None]
    ) -> None:
        self._every_s, self._take, self._send, self._keep = every_s, take, send, keep
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.succeeded = False  # the last one

    def begin(self, trouble: str) -> None:
        """Begins, inside the event loop."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._task = asyncio.create_task(self._go_on(trouble))

    async def end(self) -> None:
        """Returns when the last exchange is over, or has taken too long."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_S)
            self._task.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _go_on(self, trouble: str) -> None:
        is_known = False
        while True:
            is_last = self._ending.is_set()
            error = await self._exchange()
            self.succeeded = error is None
            if error is not None and not is_known:
                log.error("%s: %s", trouble, error)
            is_known = error is not None
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._every_s)

    async def _exchange(self) -> Exception | None:
        try:
            kept = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, self._take())
            self._keep(kept)
        except Exception as error:  # whatever a store answers, requests are served
            return error
        return None
