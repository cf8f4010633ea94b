"""One engine process with its sockets, and how it ended.

Messages of a dead process cannot be read by its successor: each has sockets of its own.
"""

import asyncio
import logging
import os
import shutil
import subprocess
import tempfile
import time

import zmq
import zmq.asyncio

from splittime.core.errors import EngineError, SplittimeError, error_from_info
from splittime.engine.messages import Fatal

log = logging.getLogger("splittime.engine")
PATIENCE_S = 5.0  # with a process that was asked to leave


class Generation:
    """One engine process and its sockets."""

    def __init__(self, command: list[str], settings: bytes) -> None:
        self.folder = tempfile.mkdtemp(prefix="splittime-")
        inbound, outbound = f"ipc://{self.folder}/to-engine", f"ipc://{self.folder}/from-engine"
        self.started_ns = time.monotonic_ns()
        self.process = subprocess.Popen([*command, inbound, outbound], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(settings + b"\n")
        self.process.stdin.flush()
        self._endpoints = inbound, outbound
        self._sockets: tuple[zmq.asyncio.Socket, ...] = ()

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

    def close(self) -> None:
        """Also of a process that still runs: its standard input ends, so it leaves."""
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
            os.kill(self.process.pid, 9)
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
