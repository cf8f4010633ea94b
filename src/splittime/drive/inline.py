"""Drives an engine in the caller's process (`splittime.LLM`): in the caller's thread, or in one of its own.

In a thread of its own a slow consumer's time is not charged to the engine, and an engine that plans ahead is not
interrupted between a result and its commit.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator

from splittime.core.errors import EngineError, SplittimeError
from splittime.core.request import Request
from splittime.core.sleep import AWAKE, SleepAsk, SleepReport
from splittime.drive.crank import Crank
from splittime.drive.messages import StepOutput


class InlineDriver:
    """Not thread-safe, whichever thread computes. note: called in the caller's thread with every output, also with what
    nobody reads."""

    def __init__(self, crank: Crank, note: Callable[[StepOutput], None] = lambda output: None) -> None:
        self.crank, self._note = crank, note
        self._thread: EngineThread | None = None

    def submit(self, request: Request) -> None:
        """Only while no thread runs."""
        assert self._thread is None, "the engine runs in its thread"
        self.crank.submit(request, time.monotonic_ns())

    def abort(self, request_id: str) -> None:
        """Before the next step, and in the thread that owns the engine."""
        (self._thread or self.crank).abort(request_id)

    def outputs(self, in_thread: bool = False) -> Generator[StepOutput, None, None]:
        """Until there is no more work. Closing it ends the thread when the step in flight is done."""
        if in_thread:
            yield from self._outputs_of_thread()
            return
        while self.crank.has_work:
            output = self.crank.turn()
            if output is not None:
                self._note(output)
                yield output

    def run_dry(self) -> None:
        """Turn until there is no more work, for the books alone."""
        for _ in self.outputs():
            pass

    def sleep(self, level: int) -> SleepReport:
        """Do what there is to do, then give memory back. Raises why it stays awake: a request that is held or stands
        still would be waited for without end, since nobody can release it meanwhile."""
        if self.crank.residency.rest.state == AWAKE:
            self.run_dry()
        answers: list[SleepReport | SplittimeError] = []
        self.crank.sleep(SleepAsk(level, timeout_s=0.0), time.monotonic_ns(), answers.append)
        while not answers:
            self.crank.turn()
        if isinstance(answers[0], SplittimeError):
            raise answers[0]
        return answers[0]

    def _outputs_of_thread(self) -> Generator[StepOutput, None, None]:
        self._thread = thread = EngineThread(self.crank)
        try:
            for output in thread.outputs():
                self._note(output)
                yield output
        finally:
            self._thread = None
            for output in thread.stop():
                self._note(output)


class EngineThread:
    """Turns a crank in a thread until it has no more work."""

    def __init__(self, crank: Crank) -> None:
        self._crank = crank
        self._queue: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def outputs(self) -> Iterator[StepOutput]:
        """Until there is no more work. Raises what ended the thread."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item if isinstance(item, SplittimeError) else EngineError(str(item)) from item
            yield item

    def abort(self, request_id: str) -> None:
        """Before the next step, in the engine's thread: an engine is not thread-safe."""
        self._aborts.put(request_id)

    def stop(self) -> list[StepOutput]:
        """Returns when the step in flight is done, with what nobody has taken out."""
        self._is_stopping = True
        self._thread.join()
        left = [self._queue.get() for _ in range(self._queue.qsize())]
        return [item for item in left if isinstance(item, StepOutput)]

    def _run(self) -> None:
        try:
            while self._crank.has_work and not self._is_stopping:
                while not self._aborts.empty():
                    self._crank.abort(self._aborts.get())
                output = self._crank.turn()
                if output is not None:
                    self._queue.put(output)
        except Exception as error:  # handed to the consumer, who is the caller
            self._queue.put(error)
        self._queue.put(None)
