"""What the rest of the world may ask of an engine, and what any client that talks to one over messages keeps.

`EngineClient` is the contract; `drive.process.ProcessClient` is the one the server uses. A stream yields
`(step_id, ready_ns, RequestOutput)` until the output with a `finish_reason`, which always comes: if the engine process
dies it is made here, with finish reason `error`. `Streams` has a queue for each request in flight, `Calls` holds the
questions that the engine answers by their number.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from splittime.core.engine import BlocksAsk, BlocksTold, EngineStats, Rest, SleepAsk, SleepReport
from splittime.core.errors import Conflict, EngineError, ErrorInfo, SplittimeError, error_from_info
from splittime.core.request import FinishReason, Request
from splittime.drive.messages import StepOutput
from splittime.ledger.account import Mark
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput


class StreamItem(NamedTuple):
    step_id: int
    ready_ns: int
    output: RequestOutput


class EngineClient(Protocol):
    @property
    def is_ready(self) -> bool:
        """The engine process is up and warmed; false from its death until its successor is ready."""
        ...

    @property
    def rest(self) -> Rest:
        """Returns whether it is awake: `submit` refuses unless it is. One that died in its sleep is asleep, and not
        up."""
        ...

    def submit(self, request: Request) -> None:
        """Hand a request over. Raises `Overloaded` (503) if no engine is up or it is not awake, `Conflict` for an id in
        flight."""
        ...

    def stream(self, request_id: str) -> AsyncIterator[StreamItem]:
        """The outputs of a submitted request, to be read by one reader, ending with the terminal one."""
        ...

    def abort(self, request_id: str) -> None:
        """Ask for its end. Its stream still ends with a terminal output (`abort`, or whatever came first)."""
        ...

    def stats(self) -> EngineStats:
        """The latest gauges, without asking the engine."""
        ...

    def facts(self) -> ServerFacts | None:
        """Returns what the engine is, with its knobs as of now; None before it has said so."""
        ...

    async def configure(self, knobs: dict[str, Any], *, lasts: bool = True) -> dict[str, Any]:
        """Change knobs of the live engine; returns all knobs as they are now. Raises `RequestError` on a bad one.
        A process that succeeds a dead engine is told of what `lasts`."""
        ...

    async def load_adapter(self, adapter_id: str, folder: str) -> int:
        """Returns the number of its parameters, once requests may name this id, which no adapter had before. Raises
        what keeps it from being loaded."""
        ...

    def unload_adapter(self, adapter_id: str) -> None:
        """Forget an adapter that no request names any more."""
        ...

    async def sleep(self, ask: SleepAsk) -> SleepReport:
        """Returns when it is asleep. Raises what kept it awake, `RequestError` for what cannot be asked."""
        ...

    async def wake(self) -> SleepReport:
        """Returns when it serves again. Raises what keeps it asleep."""
        ...

    async def export(self, ask: BlocksAsk) -> BlocksTold | None:
        """Returns what it has of these blocks; None if it gives none, or has another layout."""
        ...


class OpenStream:
    """A request whose terminal output has not been read yet."""

    __slots__ = ("heard_ns", "items")

    def __init__(self, submitted_ns: int) -> None:
        self.items: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.heard_ns = submitted_ns

    def put(self, item: StreamItem) -> None:
        self.heard_ns = item.ready_ns
        self.items.put_nowait(item)


class Streams:
    def __init__(self) -> None:
        self._in_flight: dict[str, OpenStream] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._in_flight

    def open(self, request: Request) -> None:
        """Raises `Conflict` for an id that is in flight."""
        if request.request_id in self._in_flight:
            raise Conflict(f"request id {request.request_id!r} is in flight", param="request_id")
        self._in_flight[request.request_id] = OpenStream(request.submitted_ns)

    def put(self, output: StepOutput) -> None:
        """Hand each request its output of a step."""
        for each in output.outputs:
            stream = self._in_flight.get(each.request_id)
            if stream is not None:
                stream.put(StreamItem(output.step_id, output.ready_ns, each))

    async def read(self, request_id: str) -> AsyncIterator[StreamItem]:
        """To the terminal output. Its id is free once it is left."""
        stream = self._in_flight[request_id]
        try:
            while True:
                item = await stream.items.get()
                yield item
                if item.output.finish_reason is not None:
                    return
        finally:
            self._in_flight.pop(request_id, None)

    def end_all(self, why: str) -> None:
        """A terminal output for every request in flight, made here because nobody else can. What the engine did with
        it after its last output is not known: from there on it is unattributed."""
        now_ns = time.monotonic_ns()
        error = ErrorInfo(kind=EngineError.kind, message=why, code="engine_died", status=500, retry_after_s=2.0)
        for request_id, stream in self._in_flight.items():
            unknown = Mark(Stage.UNATTRIBUTED, Cause.ENGINE_DIED, stream.heard_ns)
            marks = (unknown, Mark(Stage.DELIVER, None, now_ns))
            output = RequestOutput(request_id, marks=marks, finish_reason=FinishReason.ERROR, error=error)
            stream.put(StreamItem(0, now_ns, output))


class Calls:
    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def new_number(self) -> int:
        return next(self._numbers)

    async def answer(self, number: int) -> Any:
        """Returns the answer that `settle` gets for this call, or raises its error."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            del self._waiting[number]

    def settle(self, number: int, answer: Any, error: ErrorInfo | None) -> None:
        """Ignores the answer to a call that nobody awaits any more."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error_from_info(error))

    def fail_all(self, error: SplittimeError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
