"""The server's hand on the process that text workers are forked from (`text_process`): starts it, asks it for workers.

It is started when the first worker is wanted, or before; when it has died, it is started anew for the next worker.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from splittime.engine.text_process import ENVIRONMENT, TextLimits


class TextParent:
    """describe: gives what the process makes its tokenizer of."""

    def __init__(self, describe: Callable[[], bytes]) -> None:
        self._describe = describe
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        description = _in_memory(self._describe())
        command = [sys.executable, "-m", "splittime.engine.text_process", str(theirs.fileno()), str(description)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=(theirs.fileno(), description),
                start_new_session=True,  # Ctrl-C is the server's, and all of its children can be ended at once
            )
        finally:
            theirs.close()
            os.close(description)
        self._control = ours

    def new_worker(self, limits: TextLimits) -> socket.socket:
        """Ask for one; its first message comes over this socket when it is there. If the process is gone, nothing but
        the socket's end does."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            self._control.setblocking(False)
            socket.send_fds(self._control, [msgspec.msgpack.encode(limits)], [theirs.fileno()])
        ours.setblocking(False)
        return ours

    def stop(self) -> None:
        """End it, and all that were forked from it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _in_memory(content: bytes) -> int:
    """A file descriptor to read it from."""
    number = os.memfd_create("tokenizer")
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number
