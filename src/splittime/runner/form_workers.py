"""The engine's end of the processes that forms are tried and walked in (`form_process`).

Each form has a process of its own, forked before it is wanted. What asks one waits for it in a thread, and gives up
when nobody wants the answer any more: the process is ended then, as it is when it takes too long. What a process takes
more than its limits, the kernel ends.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from splittime.core.background import NICER
from splittime.core.errors import EngineError, RequestError
from splittime.core.forked import HEAD, ForkLimits, ForkParent, frame
from splittime.runner.form_process import Ask, Compile, Looked, Tried, described

SILENT_S = 30.0  # more than its processor time; then a process that says nothing is ended (the machine may be busy)
START_S = 120.0  # for the parent to read a tokenizer
LOOK_MS = 50  # how often who waits asks whether that is still wanted
SLOW_NS = 50_000_000  # of a processor, for one answer: a form that takes more gives way to others
Got = TypeVar("Got", Tried, Looked)


class FormGone(Exception):
    """Who asked is gone."""


class FormProcesses:
    """Starts them. tokenizer: returns the tokenizer's JSON."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, limits: ForkLimits) -> None:
        self.limits = limits
        self._parent = ForkParent("splittime.runner.form_process", lambda: described(tokenizer(), vocab_size))
        self._spare: FormProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> "FormProcess":
        """Returns one that has no form yet; another one begins for who comes next."""
        with self._lock:
            made, self._spare = self._spare or self._new(), self._new()
        return made

    def _new(self) -> "FormProcess":
        return FormProcess(self._parent.new_worker(self.limits), self.limits)

    def close(self) -> None:
        with self._lock:
            self._parent.stop()
            self._spare = None


class FormProcess:
    """One process. Asked by one thread at a time. num_bytes: what it took by its last answer."""

    def __init__(self, channel: socket.socket, limits: ForkLimits) -> None:
        self._channel, self._limits = channel, limits
        self._pid: int | None = None
        self.num_bytes = 0
        self.is_ended = False

    def compile(self, grammar: str, is_wanted: Callable[[], bool] = lambda: True) -> Tried:
        """Raises RequestError for a form that takes more than it may, FormGone if nobody wants it any more."""
        return self.ask(Compile(grammar), Tried, is_wanted)

    def ask(self, ask: "Ask", kind: type[Got], is_wanted: Callable[[], bool] = lambda: True) -> Got:
        """Returns its answer. Whatever is raised, the process is at its end."""
        try:
            if self._pid is None:
                self._pid = msgspec.msgpack.decode(self._receive(START_S, is_wanted), type=int)
            self._channel.setblocking(True)
            self._channel.sendall(frame(msgspec.msgpack.encode(ask)))
            answer = cast(Got, msgspec.msgpack.decode(self._receive(SILENT_S, is_wanted), type=kind))
        except (OSError, EOFError) as error:
            failure = self._failure()
            if isinstance(error, EOFError):
                self._pid = None  # it has ended: its number may be another's
            self.end()
            raise failure from None
        except BaseException:
            self.end()
            raise
        self.num_bytes = answer.num_bytes
        return answer

    def _failure(self) -> Exception:
        if self.is_ended:
            return FormGone()
        if self._pid is None:
            return EngineError("no process to compile a form in", code="no_form_process")
        cpu_s, memory_bytes = self._limits.cpu_s, self._limits.memory_bytes
        return too_costly(f"{cpu_s:g} s of processor time or {memory_bytes >> 20} MiB of memory")

    def _receive(self, patience_s: float, is_wanted: Callable[[], bool]) -> bytes:
        """Raises EOFError at the process's end, TimeoutError where it says nothing."""
        received, end_s, slow_ns = bytearray(), time.monotonic() + patience_s, self._processor_ns() + SLOW_NS
        ready = select.poll()
        ready.register(self._channel, select.POLLIN)
        while len(received) < HEAD.size or len(received) < HEAD.size + HEAD.unpack_from(received)[0]:
            if ready.poll(LOOK_MS):
                part = self._channel.recv(1 << 20)
                if not part:
                    raise EOFError
                received += part
            elif self.is_ended or not is_wanted():
                raise FormGone
            elif time.monotonic() > end_s:
                raise TimeoutError
            elif self._processor_ns() > slow_ns:
                self._give_way()
        return bytes(received[HEAD.size :])

    def _processor_ns(self) -> int:
        """Returns what it had of a processor, by its clock (clock_getcpuclockid(3)). Who waited for one is not slow."""
        pid = self._pid
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime_ns(~pid << 3 | 2) if pid is not None else 0
        return 0

    def _give_way(self) -> None:
        """Have it leave the processor to forms that are quick."""
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{self._pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), os.nice(0) + NICER)

    def end(self) -> None:
        """Now, whatever it does; from any thread."""
        self.is_ended = True
        pid, self._pid = self._pid, None  # once: behind that the number may be another's
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # who waits at it notices; one that was not yet there, too

    def __del__(self) -> None:
        self.end()
        self._channel.close()


def too_costly(limits: str) -> RequestError:
    hint = "make the form simpler: shorter repetitions, fewer patterns that must hold together, fewer alternatives"
    words = f"the answer cannot be held to this form: it takes more than {limits}"
    return RequestError(words, code="grammar", param="grammar", hint=hint)


def refused(words: str) -> RequestError:
    return RequestError(f"the answer cannot be held to this form: {words}", code="grammar", param="grammar")
