"""All choices of one HTTP request, from the hand-off to the engine until the engine has let go of each.

Each choice has a follower, a task that reads its stream and is never cancelled: the engine client promises a terminal
output for whatever was submitted, so a follower always ends, and only then is the id free again. Nobody who waits for
an answer waits for that: `all_done` is set as soon as no choice will get more tokens.

`cancel` (the client went away) and `end_early` (a slow reader, a drain) abort in the engine and leave the rest to the
followers, so that every ending takes the same way.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from splittime.api.choice import Choice
from splittime.core.errors import DeadlineExceeded, EngineError, ErrorInfo
from splittime.core.request import FinishReason
from splittime.drive.client import EngineClient, StreamItem
from splittime.scheduler.admission import Place

log = logging.getLogger("splittime.server")

now_ns = time.monotonic_ns
Call = Callable[[], None]


class Writer(Protocol):
    """Who writes the answer."""

    async def write(self, group: "Group") -> None:
        """Called when all is done; returns when the answer is with the socket, or nobody reads it any more."""
        ...

    def touch(self, choice: Choice, num_bytes: int) -> None:
        """A choice has something new, of roughly so many bytes."""
        ...

    def abandon(self) -> None:
        """Nobody reads any more: write nothing from now on."""
        ...


class Group:
    """cut: cuts the connection, without waiting for the client to read anything."""

    def __init__(
        self, group_id: str, client: EngineClient, choices: Sequence[Choice], place: Place, writer: Writer, cut: Call
    ) -> None:
        self.group_id, self.choices = group_id, choices
        self.all_done = asyncio.Event()
        self.is_cancelled = False
        self.is_written = False  # or nobody writes any more: what became of it stays
        self._client, self._place, self._writer, self._cut = client, place, writer, cut
        self._num_open, self._num_submitted, self._is_submitted = len(choices), 0, False
        self._followers: set[asyncio.Task[None]] = set()
        self._on_released: list[Call] = []
        self._early_end: ErrorInfo | None = None

    @property
    def error(self) -> ErrorInfo | None:
        """Why the response as a whole failed, if it did."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    async def start(self, room: Callable[[], Awaitable[None]]) -> None:
        """Submit all choices, or none. room: returns in a turn of the loop that has some; 2,048 at once took 72 ms."""
        try:
            for choice in self.choices:
                await room()
                self._client.submit(choice.request)
                self._num_submitted += 1
                task = asyncio.create_task(self._follow(choice))
                self._followers.add(task)
                task.add_done_callback(self._follower_ended)
        except BaseException:  # whoever waited may have left
            self._take_back()
            raise
        self._is_submitted = True
        for choice in self.choices:
            if choice.token_ids or choice.is_done:
                self._writer.touch(choice, 0)
        if self.error is not None:
            self._abort_all()

    def _take_back(self) -> None:
        """End the choices that were submitted before one was refused. The others' ids are left alone: one may be
        another request's."""
        self.choices = self.choices[: self._num_submitted]
        self._abort_all()
        self._place.give_up()

    async def _follow(self, choice: Choice) -> None:
        """Read a choice's stream to its end. The one place where any exception is caught and becomes an error of the
        request: a broken promise of the engine client must not leave a client waiting."""
        request_id, broke = choice.request.request_id, "ended without a last word"
        try:
            async for item in self._client.stream(request_id):
                self._take(choice, item)
        except Exception as error:
            log.exception("request %s: its stream broke", request_id)
            self._client.abort(request_id)
            broke = f"broke: {error}"
        if not choice.is_done:
            self._lose(choice, EngineError(f"the engine's stream {broke}").info)

    def _take(self, choice: Choice, item: StreamItem) -> None:
        if choice.is_done:
            choice.absorb(*item)
            return
        had_started = choice.has_started
        num_bytes = choice.absorb(*item)
        if choice.has_started and not had_started:
            self._place.leave(item.ready_ns)
        if choice.is_done:
            if item.output.finish_reason is None:
                self._client.abort(choice.request.request_id)  # a stop string: the engine does not know yet
            self._note_end(choice)
        if self._is_submitted and (num_bytes or choice.is_done or item.output.token_ids):
            self._writer.touch(choice, num_bytes)

    def _lose(self, choice: Choice, error: ErrorInfo) -> None:
        """End a choice that the engine will say no more about."""
        choice.lose_track()
        choice.finish_reason, choice.error = FinishReason.ERROR, error
        self._note_end(choice)
        if self._is_submitted:
            self._writer.touch(choice, 0)

    def _note_end(self, choice: Choice) -> None:
        """A choice is done. One that failed takes the others with it, since the response has failed."""
        self._explain_end(choice)
        if not choice.has_started:
            self._place.drop_one()
        self._num_open -= 1
        if choice.error is not None:
            self._abort_all()
        if self._num_open == 0:
            self.all_done.set()

    def _explain_end(self, choice: Choice) -> None:
        """Every ending that is not a success has an error that says why, unless the client itself went away."""
        reason = choice.finish_reason
        if self._early_end is not None and reason in (FinishReason.ABORT, FinishReason.ERROR):
            choice.finish_reason, choice.error = FinishReason.ERROR, self._early_end
        elif choice.error is None and reason is FinishReason.DEADLINE:
            choice.error = DeadlineExceeded.before("it was done").info
        elif choice.error is None and reason is FinishReason.ERROR:
            choice.error = EngineError("the engine could not carry the request out").info
        elif reason is FinishReason.ABORT and not self.is_cancelled and self.error is None:
            choice.error = EngineError("the engine gave the request up").info

    def cancel(self) -> None:
        """The client is gone."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._abort_all(cancelled_ns=now_ns())
            self._writer.abandon()

    def end_early(self, error: ErrorInfo) -> None:
        """End what is still open with this error."""
        if self._early_end is not None or self.is_written:
            return
        self._early_end = error
        for choice in self.choices:
            if choice.is_done and not choice.is_closed:  # its last chunk will not be delivered
                choice.finish_reason, choice.error = FinishReason.ERROR, error
        self._abort_all()

    def give_up(self, error: ErrorInfo) -> None:
        """End what is still open without waiting for the engine, which does not answer."""
        for choice in self.choices:
            if not choice.is_done:
                self._lose(choice, error)

    def cut(self) -> None:
        """Wait no longer for a client that does not read how its answer ended."""
        self._cut()
        self._writer.abandon()

    def _abort_all(self, cancelled_ns: int | None = None) -> None:
        for choice in self.choices[: self._num_submitted]:
            if not choice.is_done:
                choice.cancelled_ns = choice.cancelled_ns or cancelled_ns
                self._client.abort(choice.request.request_id)

    def _follower_ended(self, task: asyncio.Task[None]) -> None:
        self._followers.discard(task)
        if not self._followers:
            for callback in self._on_released:
                callback()

    def when_released(self, callback: Call) -> None:
        """Call back once the engine has let go of every choice."""
        if self._followers:
            self._on_released.append(callback)
        else:
            callback()
