"""Server-sent events: from choices with news to bytes given to the socket, as soon as the socket takes them.

The path of a token: the follower calls `touch`, which asks the event loop for one flush at the end of this turn. The
flush renders what is new of every touched choice and starts the send. If the socket takes it, which is the rule, that
is all: no task, no queue. If it does not, the send goes on in a task; news gather in the choices meanwhile, and go out
as one larger chunk when the socket is free again.

A client that does not read is dropped once `slow_reader_buffer_bytes` have gathered or `slow_reader_s` have passed
without progress. A blocked send after the last token is the client's time (`client_wait`), not the server's.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import coroutine
from typing import Any

from splittime.engine.choice import Choice
from splittime.server.answer import Answer
from splittime.server.config import ServerConfig
from splittime.server.http import Headers, Send

now_ns = time.monotonic_ns


class EventStream:
    """Writes one response.

    headers: asked for when the first chunk goes out.
    on_slow: called once, with the limit that was passed, when the client has to be dropped.
    on_ended: called for each choice once its last chunk has been given to the socket.
    finish_timing: what the last chunk of a choice says of its time, if anything.
    """

    def __init__(
        self,
        send: Send,
        answer: Answer,
        choices: Sequence[Choice],
        config: ServerConfig,
        *,
        headers: Callable[[], Headers],
        on_slow: Callable[[str], None],
        on_ended: Callable[[Choice, int], None],
        finish_timing: Callable[[Choice], dict[str, Any] | None],
    ) -> None:
        self._send, self._answer, self._choices, self._config = send, answer, choices, config
        self._headers, self._on_slow, self._on_ended = headers, on_slow, on_ended
        self._finish_timing = finish_timing
        self._loop = asyncio.get_running_loop()
        self._touched: dict[int, Choice] = {}
        self._finished: set[int] = set()  # choices whose last chunk has been rendered
        self._in_write: list[tuple[Choice, int, bool]] = []  # choice, tokens, is it its last chunk
        self._flush_handle: asyncio.Handle | None = None
        self._blocked: asyncio.Task[None] | None = None
        self._blocked_since_ns = 0
        self._pending_bytes = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self.has_begun = False
        self.is_abandoned = False

    # ---- while tokens come

    def touch(self, choice: Choice, num_bytes: int) -> None:
        """A choice has news."""
        self._touched[choice.index] = choice
        if self._blocked is not None:
            self._pending_bytes += num_bytes
            if self._pending_bytes > self._config.slow_reader_buffer_bytes:
                self._drop("slow_reader_buffer_bytes")
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is new. Once every choice is done `finish` writes the rest, so that the last chunk can say all."""
        self._flush_handle = None
        if self._blocked is not None or self.is_abandoned or all(choice.is_done for choice in self._choices):
            return
        body = b"".join([self._render(choice) for choice in self._touched.values()])
        self._touched.clear()
        if body:
            self._write(body)

    def _render(self, choice: Choice) -> bytes:
        """What is new of a choice; nothing while its new tokens make no character, and nothing after an error."""
        num_tokens = choice.num_untaken
        if choice.error is not None or not (choice.is_done or choice.has_new_text or not self._answer.is_plain):
            return b""
        self._in_write.append((choice, num_tokens, choice.is_done))
        if not choice.is_done:
            return self._answer.event(choice)
        self._finished.add(choice.index)
        return self._answer.last_event(choice, self._finish_timing(choice))

    # ---- the socket

    def _write(self, body: bytes, more_body: bool = True) -> None:
        """Give bytes to the socket; if it does not take them now, a task goes on."""
        self._blocked = start(self._send_all(body, more_body), self._loop)
        if self._blocked is None:
            self._note_written(now_ns())
            return
        self._blocked_since_ns = now_ns()
        self._pending_bytes = 0
        self._stall_timer = self._loop.call_later(self._config.slow_reader_s, self._drop, "slow_reader_s")
        self._blocked.add_done_callback(self._unblocked)

    async def _send_all(self, body: bytes, more_body: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})

    def _unblocked(self, task: asyncio.Task[None]) -> None:
        """The socket has taken the last write (or will never)."""
        self._blocked = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        at_ns = now_ns()
        for choice in self._choices:
            choice.note_client_wait(self._blocked_since_ns, at_ns)
        if task.cancelled() or task.exception() is not None or self.is_abandoned:
            self.abandon()
            return
        self._note_written(at_ns)
        self._flush()

    def _note_written(self, at_ns: int) -> None:
        in_write, self._in_write = self._in_write, []
        for choice, num_tokens, is_last in in_write:
            choice.note_written(num_tokens, at_ns)
            if is_last:
                self._on_ended(choice, at_ns)

    def _drop(self, limit: str) -> None:
        if not self.is_abandoned:
            self._on_slow(limit)
            self.abandon()

    def abandon(self) -> None:
        """Nobody reads any more: write nothing from now on."""
        self.is_abandoned = True
        self._in_write.clear()
        if self._blocked is not None:
            self._blocked.cancel()

    # ---- the end

    async def finish(self, last_words: Callable[[Sequence[Choice]], bytes]) -> None:
        """Write the response's end and wait until the socket has it. `last_words` renders the last chunks of the
        choices it is given (which have not had theirs) and whatever follows them."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        await self._until_free()
        if self.is_abandoned:
            return
        rest = [choice for choice in self._choices if choice.index not in self._finished]
        self._in_write = [(choice, choice.num_untaken, True) for choice in rest]
        self._write(last_words(rest), more_body=False)
        await self._until_free()

    async def _until_free(self) -> None:
        while self._blocked is not None:
            await asyncio.wait([self._blocked])


def start(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run a coroutine up to its first wait, here and now. None if it never waited; else a task that carries on.

    (What `eager_start` does from Python 3.12 on. A task for each chunk would cost more than the chunk.)
    """
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return loop.create_task(_carry_on(work, waits_for))  # type: ignore[arg-type]


@coroutine
def _carry_on(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Wait for what `work` waits for, then drive it to its end. A cancellation belongs to the work."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # whatever is thrown in is the work's to handle
            thrown: BaseException | None = error
        else:
            thrown = None
        try:
            waits_for = work.send(value) if thrown is None else work.throw(thrown)
        except StopIteration:
            return
