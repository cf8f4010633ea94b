"""One engine process with its sockets, from its start to its end, and what is said of how it ended.

Messages of a dead process cannot be read by its successor: each has sockets of its own.
"""

import asyncio
import contextlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from splittime.core.errors import EngineError, SplittimeError, error_from_info
from splittime.drive import head_start
from splittime.drive.messages import Fatal, FromEngine, Ping, ToEngine

log = logging.getLogger("splittime.engine")
PATIENCE_S = 5.0  # with a process that was asked to leave
PING_EVERY_S = 1.0
SILENT_AFTER_S = 5.0  # not heard of for so long: not ready
HUNG_AFTER_S = 30.0  # for so long: ended


class Incarnation:
    """is_up: it has said that it can serve."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        taken = head_start.take(command)
        self.folder, self.process, self.started_ns = taken.folder, taken.process, taken.started_ns
        assert self.process.stdin is not None
        self.process.stdin.write(settings + b"\n")
        self.process.stdin.flush()
        self.is_up = False
        self._heard_ns = 0  # when it last said anything
        self._endpoints = taken.inbound, taken.outbound
        self._sockets: tuple[zmq.asyncio.Socket, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)

    @property
    def is_ready(self) -> bool:
        """The process is up, and has been heard of lately: a hung one would serve nobody."""
        return self.is_up and time.monotonic_ns() - self._heard_ns < SILENT_AFTER_S * 1e9

    def connect(self, context: zmq.asyncio.Context) -> None:
        inbound, outbound = self._endpoints
        self.push = context.socket(zmq.PUSH)
        self.pull = context.socket(zmq.PULL)
        self._sockets = self.push, self.pull
        for socket in self._sockets:
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self.push.bind(inbound)
        self.pull.bind(outbound)

    def attend(
        self,
        context: zmq.asyncio.Context,
        take: Callable[[FromEngine], None],
        on_death: Callable[["Incarnation", int], None],
    ) -> None:
        """Read what it says, ask whether it is there, and watch for its death. on_death: also called with its exit
        status, in the event loop."""
        self.connect(context)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._read(take), self._ping())]

        def watch() -> None:
            status = self.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_death, self, status)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        self.push.send(self._encoder.encode(message))  # queued in here until it can go

    async def _read(self, take: Callable[[FromEngine], None]) -> None:
        try:
            while True:
                message = self._decoder.decode(await self.pull.recv())
                self._heard_ns = time.monotonic_ns()
                take(message)
        except Exception:  # nobody would hear the engine any more, and all would wait for ever: start over
            log.exception("what the engine process %d says cannot be taken in; ending it", self.process.pid)
            self.process.kill()

    async def _ping(self) -> None:
        """Once it is up, it must be heard of; one that is silent for too long is ended."""
        while not self.is_up or time.monotonic_ns() - self._heard_ns < HUNG_AFTER_S * 1e9:
            await asyncio.sleep(PING_EVERY_S)
            if self.is_up:
                self.send(Ping())
        log.error("the engine process %d has been silent for %.0f s; ending it", self.process.pid, HUNG_AFTER_S)
        self.process.kill()

    def close(self) -> None:
        """Close what leads to the process. One that still runs leaves, since its standard input ends."""
        for task in self._tasks:
            task.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for socket in self._sockets:
            socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def end(self) -> None:
        """Close it, and wait until it has left; it is killed if it does not."""
        self.close()
        await asyncio.to_thread(self._wait_or_kill)

    def _wait_or_kill(self) -> None:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cause_of_death(status: int, words: Fatal | None) -> str:
    """words: the last that it said, if any."""
    if words is None:
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}, no last words"
    if words.trace:
        log.error("%s", words.trace.rstrip())
    return words.message


def failure(cause: str, words: Fatal | None) -> SplittimeError:
    """The settings' own error, if that is what it died of."""
    return EngineError(cause) if words is None or words.error is None else error_from_info(words.error)
