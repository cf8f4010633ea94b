"""Processes with limits, for other people's programs: each is forked from a parent that holds what it works with.

    who asks ──fork, please: a socket, limits─▶ parent: holds what takes long to load, works for nobody
                                                  │ fork
             ───────────── a message ────────▶ worker: memory bounded by RLIMIT_AS,
             ◀──────────── its answer ────────          each message's processor time by a timer of the kernel

The parent stays single-threaded, so that it can be forked at any time: a worker begins in a few milliseconds, shares
the parent's memory, and is replaced as quickly when it had to be ended. Nothing in a worker has to notice that it takes
too long: SIGPROF ends it, in whatever library it is. When who asks is gone, its sockets are closed, and all end.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

HEAD = struct.Struct("<Q")  # before each message: its length
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
MOST_WORDS_BYTES = 4096  # with which a worker is asked for


class ForkLimits(msgspec.Struct, frozen=True):
    """cpu_s: processor time of one message. memory_bytes: what a worker may take besides what it begins with. nicer: by
    how much it gives way to who asks (`os.nice`)."""

    cpu_s: float
    memory_bytes: int
    nicer: int = 0

    @property
    def wall_s(self) -> float:
        """How long `cpu_s` takes beside a thread that serves: Linux gives it 1.25 as much for each step of niceness."""
        return self.cpu_s * 1.25**self.nicer


def frame(message: bytes) -> bytes:
    return HEAD.pack(len(message)) + message


def read_message(channel: BinaryIO) -> bytes | None:
    """Returns one message, or None when there are no more."""
    if len(head := channel.read(HEAD.size)) < HEAD.size:
        return None
    message = channel.read(count := HEAD.unpack(head)[0])
    return message if len(message) == count else None


# ---- in the parent, and in those that are forked from it


def description() -> bytes:
    """Returns what `ForkParent.describe` gave."""
    with open(int(sys.argv[2]), "rb") as file:
        return file.read()


def serve(work: Callable[[socket.socket, ForkLimits], None]) -> None:
    """Forks a worker for each that is asked for, until nobody asks any more. work: what it does, with its socket and
    its limits."""
    control, limits = socket.socket(fileno=int(sys.argv[1])), msgspec.msgpack.Decoder(ForkLimits)
    signal.signal(signal.SIGCHLD, _bury)
    gc.freeze()
    while True:
        words, numbers, _, _ = socket.recv_fds(control, MOST_WORDS_BYTES, 1)
        if not words:
            return
        if os.fork() == 0:
            control.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a panic prints is in its answer too
            work(socket.socket(fileno=numbers[0]), limits.decode(words))
            os._exit(0)
        os.close(numbers[0])


def _bury(*_: object) -> None:
    """Wait for the workers that have ended. If they were left to the kernel, nobody would have run their processor time
    (proc(5), cutime), and `machine_time` would take it for other processes'."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def begin(channel: socket.socket, limits: ForkLimits) -> None:
    """Gives this process its limits: of memory those besides what it has. Tells who asks its number."""
    os.nice(limits.nicer)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory_bytes, held + limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # who has no more of it would leave a file of all that it had
    channel.sendall(frame(msgspec.msgpack.encode(os.getpid())))


def answer_each(channel: socket.socket, cpu_s: float, answer: Callable[[bytes], bytes]) -> None:
    """Answers one message after the other until who asks closes the socket; each within so much processor time."""
    messages = channel.makefile("rb")
    while (message := read_message(messages)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        written = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(frame(written))


# ---- who asks


class ForkParent:
    """The hand on the process that workers are forked from: starts it, asks it for workers. It is started when the
    first worker is wanted, or before; when it has died, it is started anew for the next worker.

    module: its program, whose arguments are the numbers of its socket and of a file with what `describe` gave.
    """

    def __init__(self, module: str, describe: Callable[[], bytes]) -> None:
        self._module, self._describe = module, describe
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
        description = os.memfd_create("description")
        with open(description, "wb", closefd=False) as file:
            file.write(self._describe())
        os.lseek(description, 0, os.SEEK_SET)
        command = [sys.executable, "-m", self._module, str(theirs.fileno()), str(description)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=(theirs.fileno(), description),
                process_group=0,  # Ctrl-C is the server's, whose session this is; all can be ended at once
            )
        finally:
            theirs.close()
            os.close(description)
        self._control = ours

    def new_worker(self, limits: ForkLimits) -> socket.socket:
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
