"""The engine's process, and starting one before it is known what it will serve.

An engine process imports torch first, which takes longer than all that a command has to do before it knows its
settings: so `splittime serve` starts one with its first lines (`begin`), and the first `take` of the same command gets
it. The settings follow on its standard input. What nobody took ends with the command. This module imports nothing
heavy.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

TERMINATED = 143  # what a shell says of a command that SIGTERM ended
WORKER = (sys.executable, "-m", "splittime.assemble.worker")


class EngineProcess(NamedTuple):
    """A process with a folder for its sockets. inbound, outbound: their endpoints, as the process names them."""

    folder: str
    inbound: str
    outbound: str
    started_ns: int
    process: "subprocess.Popen[bytes]"


_begun: EngineProcess | None = None
_waiting: EngineProcess | None = None  # what was begun, until it is taken


def begin() -> None:
    """Start a process that the next `take` gets."""
    global _begun, _waiting
    _begun = _waiting = spawn(WORKER)
    atexit.register(_end)


def take(command: Sequence[str]) -> EngineProcess:
    """Returns the process that waits, if it was started by this command and lives; else a new one. Raises OSError if
    the system gives none."""
    global _waiting
    waiting = _waiting
    if waiting is None or tuple(command) != WORKER or waiting.process.poll() is not None:
        return spawn(command)
    _waiting = None
    return waiting


def spawn(command: Sequence[str]) -> EngineProcess:
    """Starts a process; the two endpoints are appended to its command. Raises OSError."""
    folder = tempfile.mkdtemp(prefix="splittime-")
    inbound, outbound = f"ipc://{folder}/to-engine", f"ipc://{folder}/from-engine"
    started_ns = time.monotonic_ns()
    try:
        process = subprocess.Popen([*command, inbound, outbound], stdin=subprocess.PIPE)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return EngineProcess(folder, inbound, outbound, started_ns, process)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handles SIGTERM: ends the process that was begun, taken or not, and this one. A handler that raises SystemExit
    instead would be ignored now and then: Python drops what is raised within a finalizer."""
    if _begun is not None:
        _begun.process.kill()  # not waited for: a lock that `wait` needs may be held by what the signal came into
        shutil.rmtree(_begun.folder, ignore_errors=True)
    os._exit(TERMINATED)


def _end() -> None:
    """At exit: ends what nobody took. By itself it would end, too, but not before it has imported what it is made
    of."""
    if _waiting is not None:
        _waiting.process.kill()
        _waiting.process.wait()
        shutil.rmtree(_waiting.folder, ignore_errors=True)
