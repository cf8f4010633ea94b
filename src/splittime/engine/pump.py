"""An engine in a thread of its own, in the caller's process (`splittime.LLM`).

So a slow consumer's time is not charged to the engine, and an engine that plans ahead is not interrupted between a
result and its commit.
"""

import queue
import threading
from collections.abc import Iterator

from splittime.core.errors import EngineError, SplittimeError
from splittime.engine.engine import Engine
from splittime.engine.messages import StepOutput


class Pump:
    """Runs an engine in a thread until it has no more work; what its steps say comes out of `outputs`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def outputs(self) -> Iterator[StepOutput]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item if isinstance(item, SplittimeError) else EngineError(str(item)) from item
            yield item

    def abort(self, request_id: str) -> None:
        """Before the next step, and in the engine's thread: an engine is not thread-safe."""
        self._aborts.put(request_id)

    def stop(self) -> list[StepOutput]:
        """Returns when the step in flight is done, with what nobody has taken out."""
        self._is_stopping = True
        self._thread.join()
        left = [self._queue.get() for _ in range(self._queue.qsize())]
        return [item for item in left if isinstance(item, StepOutput)]

    def _run(self) -> None:
        try:
            while self._engine.has_work and not self._is_stopping:
                while not self._aborts.empty():
                    self._engine.abort(self._aborts.get())
                output = self._engine.step()
                if output is not None:
                    self._queue.put(output)
        except Exception as error:  # handed to the consumer, who is the caller
            self._queue.put(error)
        self._queue.put(None)
