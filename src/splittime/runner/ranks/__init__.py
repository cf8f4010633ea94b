"""Tensor parallelism: one model over several processes (ranks), each with its part of every layer and its KV heads.

The first rank is the runner that the engine calls. It starts the others (`members`), hands every plan on to them
(`members`), and all run the same step in lockstep (`group`: the sums between). What ends one of
them ends all (`members.Members`), with an error that names it.

What the first rank and another say to each other: messages in msgpack, each after its length, over a socket pair.

    first rank   Begin, then a StepPlan for every step; the end of the stream: leave
    other rank   Arrived, when its weights are loaded; or Failed, its last words

A plan is written without waiting for an answer: the step's collectives are the answer.
"""

import socket
import struct
from typing import Any

import msgspec

from splittime.core.errors import ErrorInfo
from splittime.runner.config import RunnerConfig

LENGTH = struct.Struct("<Q")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """index: which rank this is. folder: where ranks meet. config: the first rank's own."""

    index: int
    folder: str
    config: RunnerConfig


class Arrived(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    """error: where it was one of ours."""

    message: str
    trace: str = ""
    error: ErrorInfo | None = None


class Channel:
    """One end; messages are encoded by the caller who sends the same to several."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, content: bytes) -> None:
        """Raises OSError: nobody reads (BrokenPipeError, TimeoutError)."""
        self.end.sendall(LENGTH.pack(len(content)) + content)

    def receive(self) -> bytes | None:
        """The next message, or None at the end of the stream."""
        head = self._read(LENGTH.size)
        return None if head is None else self._read(LENGTH.unpack(head)[0])

    def _read(self, count: int) -> bytes | None:
        content = bytearray()
        while len(content) < count:
            try:
                piece = self.end.recv(count - len(content))
            except ConnectionResetError:  # it died with something unread
                piece = b""
            if not piece:
                return None
            content += piece
        return bytes(content)

    def close(self) -> None:
        self.end.close()


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)
