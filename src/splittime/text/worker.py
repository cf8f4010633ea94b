"""The server's end of text workers: one worker process, and the task that it is given."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import msgspec

from splittime.core.errors import RequestError, error_from_info
from splittime.core.forked import HEAD, ForkLimits, frame
from splittime.ledger.stages import Cause
from splittime.text.process import Render, TextAnswer, TextDone, TextFailed, TextWork

SILENT_S = 30.0  # more than its processor time; then a worker that says nothing is ended (the machine may be busy)


class FramedWork(NamedTuple):
    """A work as it is sent to a worker, and its size, since both take their time where there are many messages."""

    message: bytes
    size: int


def framed(work: TextWork, size: int | None = None) -> FramedWork:
    """size: where it is known. Raises `RequestError`, which names the field, for what no message can hold."""
    return FramedWork(frame(_encoded(work)), work.size if size is None else size)


class TextTask:
    """One text's way through here. cause: why it has to wait, or None if it was begun at once. tenant, weight: the key
    that asks, and its share of a lane."""

    def __init__(self, work: FramedWork, on_begin: Callable[[], None], tenant: str = "", weight: float = 1.0) -> None:
        self.tenant, self.weight = tenant, weight
        self.message, self.size, self.on_begin = work.message, work.size, on_begin
        self.cause: Cause | None = None
        self.done: asyncio.Future[TextDone] = asyncio.get_running_loop().create_future()
        self.num_tries = 0
        self.began_s = 0.0

    def begin(self) -> None:
        self.num_tries += 1
        self.began_s = time.monotonic()
        if self.num_tries == 1:
            self.on_begin()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # it is nobody's oversight if the request is gone


def _encoded(work: TextWork) -> bytes:
    """A client's own values may be such as no message can hold: raises `RequestError`, which names the field."""
    try:
        return msgspec.msgpack.encode(work)
    except (OverflowError, RecursionError) as error:
        param = _unheld(work)
        hint = "write such a number as a text" if isinstance(error, OverflowError) else "nest it less deeply"
        raise RequestError(f"{param} cannot be handed on: {error}", param=param, hint=hint) from None


def _unheld(work: TextWork) -> str:
    """Returns the field that has what no message can hold."""
    parts = {"messages": work.messages, "tools": work.options.get("tools")} if isinstance(work, Render) else {}
    for name, value in parts.items():
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, RecursionError):
            return name
    return "chat_template_kwargs"


class Owner(Protocol):
    """A lane, as a worker sees it: it is told what becomes of the worker."""

    def is_idle_now(self, worker: "TextWorker", has_served: bool) -> None: ...

    def worker_ended(self, worker: "TextWorker") -> None: ...


class TextWorker(asyncio.Protocol):
    """The connection to one process. pid: None until it has said that it is there. task: what it works on."""

    def __init__(self, owner: Owner, limits: ForkLimits) -> None:
        self._owner, self._limits = owner, limits
        self.pid: int | None = None
        self.task: TextTask | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._alarm: asyncio.TimerHandle | None = None
        self._answers = msgspec.msgpack.Decoder(TextAnswer)

    @property
    def is_idle(self) -> bool:
        return self.pid is not None and self.task is None and self._transport is not None

    def begin(self, task: TextTask) -> None:
        self.task = task
        task.begin()
        assert self._transport is not None
        self._transport.write(task.message)
        self.end_within(self._limits.wall_s + SILENT_S)

    def end(self) -> None:
        """Now, whatever it does."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    def end_within(self, most_s: float) -> None:
        """End it if it has not answered by then."""
        self._stop_alarm()
        self._alarm = asyncio.get_running_loop().call_later(most_s, self.end)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.end_within(self._limits.wall_s + SILENT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_alarm()
        self._transport = None
        self._owner.worker_ended(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < HEAD.size:
            return
        end = HEAD.size + HEAD.unpack_from(self._received)[0]
        if len(self._received) < end:
            return
        message, self._received = memoryview(self._received)[HEAD.size : end], bytearray()
        self._stop_alarm()
        if self.pid is None:
            self.pid = msgspec.msgpack.decode(message, type=int)
            self._owner.is_idle_now(self, has_served=False)
        else:
            self._take(self._answers.decode(message))

    def _take(self, answer: TextDone | TextFailed) -> None:
        task, self.task = self.task, None
        if task is not None and not task.done.done():
            if isinstance(answer, TextFailed):
                task.fail(error_from_info(answer.error))
            else:
                task.done.set_result(answer)
        self._owner.is_idle_now(self, has_served=True)
