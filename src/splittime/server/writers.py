"""The two ways in which an answer is written: `WholeWriter` and, as server-sent events, `StreamWriter`.

For a streamed token the group calls `touch`, which asks the event loop for one flush at the end of this turn. The
flush renders what is new of every touched choice and starts the send. If the socket takes it, there is no task and no
queue. If it does not, the send goes on in a task, and new tokens gather in the choices until the socket is free.

A client that does not read is dropped once `slow_reader_buffer_bytes` have gathered or `slow_reader_s` have passed
without progress. A blocked send after the last token is the client's time (`client_wait`), not the server's.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import coroutine
from typing import Any, Protocol

from splittime.api.answer import DONE, Renderer, WholeRenderer, last_ended, timing, usage
from splittime.api.choice import Choice
from splittime.server.config import ServerConfig
from splittime.server.group import Group
from splittime.web import http
from splittime.web.reading import in_short_turns

now_ns = time.monotonic_ns
MANY_PARTS = 128  # choices, and tokens with what else was likely: more of them are rendered beside the event loop
LAST_PARTS = 16  # a choice's account is closed behind its last chunk, which may take a millisecond
EVENTS = b"text/event-stream; charset=utf-8"
STREAM_HEADERS: http.Headers = [
    (b"content-type", EVENTS),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnsweredVisit(Protocol):
    """The visit whose answer is written."""

    notices: list[str]
    translated: Callable[[bytes], bytes]

    def timed_headers(self, choice: Choice) -> http.Headers: ...
    def drop_client(self, limit: str) -> None: ...
    def close_choice(self, choice: Choice, at_ns: int) -> None: ...


class WholeWriter:
    """Writes one response when all choices are done."""

    def __init__(
        self,
        visit: AnsweredVisit,
        renderer: Renderer | WholeRenderer,
        choices: Sequence[Choice],
        config: ServerConfig,
        send: http.Send,
    ) -> None:
        self._visit, self._renderer, self._choices = visit, renderer, choices
        self._config, self._send = config, send

    def touch(self, choice: Choice, num_bytes: int) -> None:
        """Does nothing: all is written at the end."""

    def abandon(self) -> None:
        """Does nothing: `write` looks whether the group was cancelled."""

    async def write(self, group: Group) -> None:
        if group.is_cancelled:
            return
        choices = list(self._choices)
        last, at_ns = last_ended(choices), now_ns()
        headers = self._visit.timed_headers(last)
        if group.error is not None:
            await http.respond_error(self._send, group.error, headers=headers)
            return
        counts = [choice.num_untaken for choice in choices]
        make, translated = self._renderer.body, self._visit.translated
        body = await rendered(choices, lambda *of: translated(make(*of)), choices, at_ns, self._visit.notices)
        sending = http.respond(self._send, body, headers=headers, until_taken=True)
        blocked = start(sending, asyncio.get_running_loop())
        if blocked is not None and not await self._await_reader(group, blocked):
            return
        written_ns = now_ns()
        for choice, count in zip(choices, counts, strict=True):
            choice.note_written(count, written_ns)

    async def _await_reader(self, group: Group, blocked: asyncio.Task[None]) -> bool:
        """The socket did not take the answer at once: wait for it, and no longer than for a stream."""
        since_ns = now_ns()
        done, _ = await asyncio.wait([blocked], timeout=self._config.slow_reader_s)
        for choice in self._choices:
            choice.note_client_wait(since_ns, now_ns())
        if not done:
            blocked.cancel()
            self._visit.drop_client("slow_reader_s")
        return bool(done) and not group.is_cancelled


async def rendered(choices: Sequence[Choice], render: Callable[..., bytes], *args: object) -> bytes:
    """Returns what is rendered of choices that are done: 2,048 vectors, or tokens with 20 others each, take long."""
    if sum(1 + len(choice.scored) for choice in choices) <= MANY_PARTS:
        return render(*args)
    return await asyncio.get_running_loop().run_in_executor(None, in_short_turns, render, *args)


class StreamWriter:
    """Writes one stream."""

    def __init__(
        self, visit: AnsweredVisit, renderer: Renderer, choices: Sequence[Choice], config: ServerConfig, send: http.Send
    ) -> None:
        self._visit, self._renderer, self._choices = visit, renderer, choices
        self._config, self._send = config, send
        self._loop = asyncio.get_running_loop()
        self._touched: dict[int, Choice] = {}
        self._finished: set[int] = set()  # choices whose last chunk has been rendered
        self._in_write: list[tuple[Choice, int, bool]] = []  # choice, tokens, is it its last chunk
        self._flush_handle: asyncio.Handle | None = None
        self._blocked: asyncio.Task[None] | None = None
        self._blocked_since_ns = 0
        self._pending_bytes = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_begun = self._is_abandoned = False

    async def write(self, group: Group) -> None:
        """Returns when the socket has the end of the stream, or nobody reads it any more."""
        if group.error is not None and not (self._has_begun or self._is_abandoned):
            headers = self._visit.timed_headers(group.choices[0])
            await http.respond_error(self._send, group.error, headers=headers)
            return
        await self._finish(group)

    # ---- while tokens come

    def touch(self, choice: Choice, num_bytes: int) -> None:
        """A choice has new tokens, or has ended."""
        self._touched[choice.index] = choice
        if self._blocked is not None:
            self._pending_bytes += num_bytes
            if self._pending_bytes > self._config.slow_reader_buffer_bytes:
                self._drop("slow_reader_buffer_bytes")
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is new. When all choices are done `_finish` writes the rest, so the last chunk can say all."""
        self._flush_handle = None
        if self._blocked is not None or self._is_abandoned or all(choice.is_done for choice in self._choices):
            return
        parts, count = list[bytes](), 0
        while self._touched and count <= MANY_PARTS:
            choice = self._touched.pop(next(iter(self._touched)))
            count += min(len(choice.scored), MANY_PARTS) + (LAST_PARTS if choice.is_done else 1)
            parts.append(self._render(choice))
        if body := b"".join(parts):
            self._write(body)
        if self._touched and self._blocked is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _render(self, choice: Choice) -> bytes:
        """Returns what is new of a choice; nothing while its new tokens make no character, and nothing after an
        error. Of many logprobs it returns some, and leaves the rest to the next flush."""
        if len(choice.scored) > MANY_PARTS and choice.error is None:
            self._touched[choice.index] = choice
            return self._renderer.event(choice, MANY_PARTS)
        num_tokens = choice.num_untaken
        if choice.error is not None or not (choice.is_done or choice.has_new_text or not self._renderer.is_plain):
            return b""
        self._in_write.append((choice, num_tokens, choice.is_done))
        if not choice.is_done:
            return self._renderer.event(choice)
        self._finished.add(choice.index)
        return self._renderer.last_event(choice, self._own_timing(choice))

    def _own_timing(self, choice: Choice) -> dict[str, Any] | None:
        """With several choices each one's last chunk has its own timing."""
        is_told = self._renderer.ask.include_timing and len(self._choices) > 1
        return timing(choice, now_ns()) if is_told else None

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
        if not self._has_begun:
            self._has_begun = True
            headers = [*STREAM_HEADERS, *self._visit.timed_headers(self._choices[0])]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})

    def _unblocked(self, task: asyncio.Task[None]) -> None:
        """The socket has taken the last write (or will never)."""
        self._blocked = None
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        at_ns = now_ns()
        for choice in self._choices:
            choice.note_client_wait(self._blocked_since_ns, at_ns)
        if task.cancelled() or task.exception() is not None:
            self.abandon()
            return
        self._note_written(at_ns)
        self._flush()

    def _note_written(self, at_ns: int) -> None:
        in_write, self._in_write = self._in_write, []
        for choice, num_tokens, is_last in in_write:
            choice.note_written(num_tokens, at_ns)
            if is_last:
                self._visit.close_choice(choice, at_ns)

    def _drop(self, limit: str) -> None:
        if not self._is_abandoned:
            self._visit.drop_client(limit)
            self.abandon()

    def abandon(self) -> None:
        """Nobody reads any more: write nothing from now on. What the socket has just taken was written: the end of an
        answer that was blocked is told as a disconnect before it is told as sent."""
        self._is_abandoned = True
        if self._blocked is None or not self._blocked.done():
            self._in_write.clear()
        if self._blocked is not None:
            self._blocked.cancel()

    # ---- the end

    async def _finish(self, group: Group) -> None:
        """Write the response's end and wait until the socket has it."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        await self._until_free()
        if self._is_abandoned:
            return
        rest = [choice for choice in self._choices if choice.index not in self._finished]
        self._in_write += [(choice, choice.num_untaken, False) for choice in rest]  # the visit closes them
        failed = group.error
        end = await rendered(rest, self._last_events, rest) if failed is None else http.error_event(failed)
        self._write(end + DONE, more_body=False)
        await self._until_free()

    def _last_events(self, rest: Sequence[Choice]) -> bytes:
        """The last chunks of the choices that have not had theirs, and the usage."""
        ask, renderer, choices = self._renderer.ask, self._renderer, list(self._choices)
        more: dict[str, Any] = {"timing": timing(last_ended(choices), now_ns())} if ask.include_timing else {}
        beside_last = more
        if more and not ask.continuous_usage:  # a gateway that asks for the one counts by the other
            beside_last = more | {"usage": usage(choices, ask.n)}
        parts = []
        for choice in rest:
            beside = beside_last if choice is rest[-1] and not ask.include_usage else {}
            parts.append(renderer.last_event(choice, self._own_timing(choice), **beside))
        if ask.include_usage:
            parts.append(renderer.usage_event(choices, **more))
        return b"".join(parts)

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
        finally:
            thrown = None  # its traceback has this frame
