"""The requests in flight on the client's side: one queue each, and a terminal output for each, whatever happens."""

import asyncio
import time
from collections.abc import AsyncIterator

from splittime.core.errors import Conflict, EngineError, ErrorInfo
from splittime.core.request import FinishReason, Request
from splittime.drive.client import StreamItem
from splittime.drive.messages import StepOutput
from splittime.ledger.account import Mark
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.events import RequestOutput


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
