"""Texts worked on beside the event loop, so that no text can be another's queue: lanes by size, each with workers of
its own (`text.process`).

    lane      texts of at most    workers    niceness    a worker serves
    brief     2 Ki characters     2          0           one after the other
    short     16 Ki characters    2          10          one after the other
    long      256 Ki characters   1          15          one text, and gives its memory back
    giant     any                 1          15          one text, and gives its memory back

So brief texts have as much as the loop, which has more than the engine, and others give way to both (ADR 30): the
texts of one key take both processors of a small machine from nobody's tokens.

A text waits in its lane only. A key's texts are served as they come, and of several keys that one's is next that has
had least by weight (`core.shares`). All workers above may work for one key; each lane has one more for other keys
(`SPARE`), so that no key waits only for another's texts. What waits in a lane is bounded in characters; a text beyond
that is refused with 429, unless its key has less than its share of what waits. A worker that takes more processor time
or memory than it may is ended by the kernel, one that does not answer is ended from here; the request is told, and the
next worker takes its place. A text whose worker ended before its time was up is given to another once: somebody may
have killed it. A worker whose text was left is ended, of brief and short ones after `LEFT_S`: to make another takes
longer than such a text, and who asks and leaves must not have all workers of a lane made anew all the time.

How long a text waits, and what for, is in its account: `TextTask.cause` says at once, `on_begin` when it is over.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import msgspec
from msgspec.structs import replace

from splittime.core.background import NICER, RATHER_NICE
from splittime.core.errors import EngineError, Overloaded, RequestError, SplittimeError, error_from_info
from splittime.core.forked import HEAD, ForkLimits, ForkParent, frame
from splittime.core.shares import KeyShares
from splittime.ledger.stages import Cause
from splittime.text.foreign_code import too_costly
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


BRIEF_CHARS, SHORT_CHARS, LONG_CHARS = 2 * 2**10, 16 * 2**10, 256 * 2**10
KEPT_WORKERS = 2
LEFT_S = 0.5
MAX_WAITING_CHARS = 64 * 2**20  # in one lane
SPARE = 1  # workers of a lane that are there for other keys than those who have all others
TRIES = 2


class TextWorkers:
    """Make one for a server, in any thread; `submit` in its event loop."""

    def __init__(self, describe: Callable[[], bytes], limits: ForkLimits) -> None:
        self.parent = parent = ForkParent("splittime.text.process", describe)
        nice, nicer = replace(limits, nicer=NICER), replace(limits, nicer=NICER + RATHER_NICE)
        self.lanes = (
            Lane(parent, limits, BRIEF_CHARS, KEPT_WORKERS, is_kept=True),
            Lane(parent, nice, SHORT_CHARS, KEPT_WORKERS, is_kept=True),
            Lane(parent, nicer, LONG_CHARS, 1, is_kept=False),
            Lane(parent, nicer, None, 1, is_kept=False),
        )

    def start(self) -> None:
        """Have the workers that are kept ready before the first text."""
        self.parent.start()
        for lane in self.lanes:
            lane.start()

    def submit(
        self,
        work: TextWork | FramedWork,
        on_begin: Callable[[], None] = lambda: None,
        *,
        tenant: str = "",
        weight: float = 1.0,
    ) -> TextTask:
        """Raises `Overloaded` if too much waits. on_begin: called when a worker begins with it."""
        task = TextTask(work if isinstance(work, FramedWork) else framed(work), on_begin, tenant, weight)
        next(lane for lane in self.lanes if lane.most_chars is None or task.size <= lane.most_chars).add(task)
        return task

    def drop(self, task: TextTask, error: Exception) -> None:
        """Nobody wants it any more: it fails with `error`, and no worker is at it for long."""
        task.fail(error)
        for lane in self.lanes:
            lane.forget(task)

    def close(self) -> None:
        """End all processes; what is under way fails."""
        for lane in self.lanes:
            lane.close()
        self.parent.stop()


class TextQueue:
    """What waits in a lane, by key."""

    def __init__(self) -> None:
        self._shares = KeyShares()
        self._lines: dict[str, deque[TextTask]] = {}

    def __iter__(self) -> Iterator[TextTask]:
        return chain.from_iterable(self._lines.values())

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def require_room(self, task: TextTask) -> None:
        """Raises `Overloaded` if too much waits, and of this key as much as it may have by its weight."""
        waiting_chars = sum(other.size for other in self)
        if not self._lines or waiting_chars + task.size <= MAX_WAITING_CHARS:
            return
        weights = {name: share.weight for name, share in self._shares.waiting.items()} | {task.tenant: task.weight}
        own_chars = sum(other.size for other in self._lines.get(task.tenant, ())) + task.size
        if own_chars > MAX_WAITING_CHARS * task.weight / sum(weights.values()):
            message = f"texts of {waiting_chars} characters wait to be tokenised"
            raise Overloaded(
                message, code="queued_texts", value=waiting_chars, limit=MAX_WAITING_CHARS, retry_after_s=1
            )

    def push(self, task: TextTask, *, is_first: bool = False) -> None:
        self._shares.wait(self._shares.of(task.tenant, task.weight))
        line = self._lines.setdefault(task.tenant, deque())
        line.appendleft(task) if is_first else line.append(task)

    def pop(self, may_begin: Callable[[str], bool] = lambda tenant: True) -> TextTask | None:
        """Returns the next of those keys that may have one begun; None if there is none."""
        share = next((share for share in self._shares.in_turn() if may_begin(share.name)), None)
        if share is None:
            return None
        task = self._lines[share.name][0]
        share.charge(task.size)
        self.remove(task, is_served=True)
        return task

    def remove(self, task: TextTask, *, is_served: bool = False) -> None:
        line = self._lines[task.tenant]
        line.remove(task)
        if not line:
            del self._lines[task.tenant]
        self._shares.leave(self._shares.of(task.tenant, task.weight), is_served=is_served)

    def num_that_may_begin(self, most_of: Callable[[str], int]) -> int:
        """most_of: how many more of a key may be begun."""
        return sum(min(len(line), most_of(tenant)) for tenant, line in self._lines.items())


class Lane:
    """most_chars: of its texts; None for any. most_workers: at work for one key. is_kept: its workers serve more than
    one text."""

    def __init__(
        self, parent: ForkParent, limits: ForkLimits, most_chars: int | None, most_workers: int, *, is_kept: bool
    ) -> None:
        self._parent, self._limits = parent, limits
        self.most_chars, self._most_workers, self._is_kept = most_chars, most_workers, is_kept
        self.waiting = TextQueue()
        self.workers: list[TextWorker] = []
        self._is_closed = False
        self._starting: set[asyncio.Task[Any]] = set()  # the loop itself keeps no tasks alive

    def start(self) -> None:
        for _ in range(self._most_workers + SPARE if self._is_kept else 0):
            self.add_worker()

    def add(self, task: TextTask) -> None:
        self.waiting.require_room(task)
        self.waiting.push(task)
        self._go_on()
        if task in self.waiting:
            is_starting = all(worker.pid is None for worker in self.workers)
            task.cause = Cause.WORKER_START if is_starting else Cause.TEXTS_BEFORE

    def _go_on(self) -> None:
        """Give the waiting texts to idle workers, and have workers made for the rest."""
        for worker in [worker for worker in self.workers if worker.is_idle]:
            task = self.waiting.pop(lambda tenant: self._left_of(tenant) > 0)
            if task is None:
                break
            worker.begin(task)
        num_starting = sum(worker.pid is None for worker in self.workers)
        num_wanted = self.waiting.num_that_may_begin(self._left_of)
        while len(self.workers) < self._most_workers + SPARE and num_starting < num_wanted:
            self.add_worker()
            num_starting += 1

    def _left_of(self, tenant: str) -> int:
        """Returns how many more texts of a key may be at work."""
        at_work = sum(worker.task is not None and worker.task.tenant == tenant for worker in self.workers)
        return max(0, self._most_workers - at_work)

    def add_worker(self) -> None:
        worker = TextWorker(self, self._limits)
        self.workers.append(worker)
        making = asyncio.get_running_loop().create_task(self._connect(worker))
        self._starting.add(making)
        making.add_done_callback(self._starting.discard)

    async def _connect(self, worker: "TextWorker") -> None:
        try:
            channel = self._parent.new_worker(self._limits)
            await asyncio.get_running_loop().create_connection(lambda: worker, sock=channel)
        except OSError as error:
            self.worker_ended(worker, EngineError(f"no process to tokenise in: {error}", code="no_text_worker"))

    def is_idle_now(self, worker: "TextWorker", has_served: bool) -> None:
        if has_served and not self._is_kept:
            self.workers.remove(worker)  # before its connection ends, a turn of the loop later
            worker.end()
        self._go_on()

    def worker_ended(self, worker: "TextWorker", error: SplittimeError | None = None) -> None:
        """A worker ended: with its text, before its first, or because it was told to."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        if worker.task is not None:
            self._return(worker.task)
        elif worker.pid is None and self.waiting:  # each start that fails costs one request, so it is tried for ever
            failure = error or EngineError("the process that tokenises did not start", code="no_text_worker")
            first = self.waiting.pop()
            assert first is not None
            first.fail(failure)
        if not self._is_closed:
            self._go_on()

    def _return(self, task: TextTask) -> None:
        """The task's worker ended: try once more, or fail the task."""
        cpu_s, memory_bytes = self._limits.cpu_s, self._limits.memory_bytes
        is_early = time.monotonic() - task.began_s < cpu_s
        if is_early and task.num_tries < TRIES and not task.done.done() and not self._is_closed:
            self.waiting.push(task, is_first=True)
        else:
            task.fail(too_costly(f"{cpu_s:g} s of processor time or {memory_bytes / 2**20:.0f} MiB of memory"))

    def forget(self, task: TextTask) -> None:
        if task in self.waiting:
            self.waiting.remove(task)
        for worker in self.workers:
            if worker.task is task:
                worker.end_within(LEFT_S if self._is_kept else 0)

    def close(self) -> None:
        self._is_closed = True
        for task in (*self.waiting, *(worker.task for worker in self.workers if worker.task is not None)):
            task.fail(Overloaded("the server is shutting down", code="draining", status=503, retry_after_s=1.0))
        self.waiting = TextQueue()
        for worker in list(self.workers):
            worker.end()
