"""Forms that walk in processes of their own, as they are large or slow: what such a walk is asked, and which processes
are alive.

A process may be ended at any time, and its form goes on in another: what a look needs comes with it. So their number
and their memory have bounds whatever forms there are. Where one must make room, it is one that nobody asks now, of the
owner who has most, the one that was asked longest ago; or, of an owner who has more than who needs it, any.

The engine's end of the processes that forms are tried and walked in.

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
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

import msgspec
import numpy as np

from splittime.core.background import NICER
from splittime.core.errors import EngineError, RequestError, SplittimeError
from splittime.core.forked import HEAD, ForkLimits, ForkParent, frame
from splittime.runner.form_process import Ask, Compile, FormLook, Looked, Tried, described
from splittime.runner.form_walk import FormPlace, FoundMask, FoundMasks

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
            elif self._processor_ns() > slow_ns:  # it leaves the processor to forms that are quick
                with contextlib.suppress(OSError):  # it has ended
                    for thread in os.listdir(f"/proc/{self._pid}/task"):
                        os.setpriority(os.PRIO_PROCESS, int(thread), os.nice(0) + NICER)
        return bytes(received[HEAD.size :])

    def _processor_ns(self) -> int:
        """Returns what it had of a processor, by its clock (clock_getcpuclockid(3)). Who waited for one is not slow."""
        pid = self._pid
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime_ns(~pid << 3 | 2) if pid is not None else 0
        return 0

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


MOST_ALIVE = 16  # processes
MOST_BYTES = 512 << 20  # of all of them, by their last answers
MOST_ASKED = 64  # at once, of different forms
IDLE_S = 60.0  # a process that nobody asked for as long is ended
ROOM_S = 0.05  # how often who waits for room looks again
TRIES = 3  # of a look, each with another process


class FarForms:
    """The processes that walk."""

    def __init__(self, processes: FormProcesses) -> None:
        self.processes = processes
        self.threads = ThreadPoolExecutor(MOST_ASKED, "far-forms")
        self._alive: OrderedDict[FarForm, float] = OrderedDict()  # when each was asked last
        self._lock = threading.Lock()
        self._watch: threading.Timer | None = None  # of those that nobody asks

    def begin(self, form: "FarForm", is_wanted: Callable[[], bool] = lambda: True) -> None:
        """This form is to have a process. Waits until there is room for one. Raises FormGone if nobody wants it any
        more."""
        while not self._makes_room(form):
            if not is_wanted():
                raise FormGone
            time.sleep(ROOM_S)

    def note(self, form: "FarForm") -> None:
        """This form's process has answered."""
        with self._lock:
            if form in self._alive:
                self._alive[form] = time.monotonic()
                self._alive.move_to_end(form)
            while self._takes_too_much and (other := self._dispensable(form)) is not None:
                self._put_away(other)

    def put_away_idle(self) -> None:
        """Ends those that nobody has asked for long, and looks again later if there are others."""
        with self._lock:
            self._watch, since_s = None, time.monotonic() - IDLE_S
            for form, asked_s in list(self._alive.items()):
                if asked_s <= since_s and not form.is_asked:
                    self._put_away(form)
            if self._alive:
                self._begin_watch()

    def _begin_watch(self) -> None:
        if self._watch is None:
            self._watch = threading.Timer(IDLE_S, self.put_away_idle)
            self._watch.daemon = True
            self._watch.start()

    def _put_away(self, form: "FarForm") -> None:
        del self._alive[form]
        form.put_away()

    def _makes_room(self, form: "FarForm") -> bool:
        with self._lock:
            while len(self._alive) >= MOST_ALIVE or self._takes_too_much:
                other = self._dispensable(form)
                if other is None:
                    return False
                self._put_away(other)
            self._alive[form] = time.monotonic()
            self._begin_watch()
            return True

    @property
    def _takes_too_much(self) -> bool:
        return sum(one.num_bytes for one in self._alive) > MOST_BYTES

    def _dispensable(self, form: "FarForm") -> "FarForm | None":
        """Returns whose process is to make room for this form's; None for nobody's, now."""
        count = Counter(one.owner for one in self._alive)
        for one in sorted(self._alive, key=lambda one: -count[one.owner]):
            if not one.is_asked or count[one.owner] > count[form.owner] + 1:
                return one
        return None

    def forget(self, form: "FarForm") -> None:
        with self._lock:
            self._alive.pop(form, None)

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    @property
    def num_bytes(self) -> int:
        """Returns what all processes take, by their last answers."""
        return sum(one.num_bytes for one in list(self._alive))


class FarForm:
    """One form. begin: a process that has compiled it; None: the first look has it compiled, late."""

    def __init__(self, grammar: str, owner: str, all_: FarForms, begin: FormProcess | None = None) -> None:
        self._grammar, self.owner, self._all = grammar, owner, all_
        self._process: FormProcess | None = begin
        self._asked: deque[tuple[FormLook, Future[Looked]]] = deque()
        self._is_asking = False
        self._lock = threading.Lock()
        self._num_walks, self._ended = 0, list[int]()

    @property
    def is_asked(self) -> bool:
        return self._is_asking

    @property
    def num_bytes(self) -> int:
        process = self._process
        return 0 if process is None else process.num_bytes

    def put_away(self) -> None:
        """Ends its process; the next look has another one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def walk(self) -> "FarWalk":
        self._num_walks += 1
        walk = FarWalk(self, self._num_walks)
        weakref.finalize(walk, self._ended.append, walk.number)
        return walk

    def ask(self, look: FormLook) -> "Future[Looked]":
        """Has a thread ask; of one form one after the other."""
        told: Future[Looked] = Future()
        with self._lock:
            self._asked.append((look, told))
            begins, self._is_asking = not self._is_asking, True
        if begins:
            self._all.threads.submit(self._ask_all)
        return told

    def _ask_all(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._is_asking = False
                    return
                look, told = self._asked.popleft()
            try:
                told.set_result(self._answered(look))
            except SplittimeError as error:
                told.set_result(Looked(None, error.info, 0))
            except BaseException as failure:
                told.set_result(Looked(None, f"the form that the answer is held to: {type(failure).__name__}", 0))

    def _answered(self, look: FormLook) -> Looked:
        """Asks its process, and another one if that was put away meanwhile."""
        ended, self._ended[:] = tuple(self._ended), []
        for tried in range(TRIES):
            process = self._process
            try:
                if process is None:
                    self._all.begin(self)
                    process = self._process = self._all.processes.start()
                    if words := process.compile(self._grammar).said:
                        raise refused(words)
                answer = process.ask(
                    FormLook(look.walk, look.outputs, look.num_sure, look.end_token_ids, ended), Looked
                )
                self._all.note(self)
                if answer.error is not None:  # what the copies of a form share may be at its end with one of them
                    self.put_away()
                    self._all.forget(self)
                return answer
            except (SplittimeError, FormGone):
                was_put_away = self._process is not process
                if not was_put_away:
                    self._process = None
                    self._all.forget(self)
                if not was_put_away or tried == TRIES - 1:
                    raise
        raise AssertionError("the last try raises")


class FarWalk:
    """Where one answer stands in such a form: as `form_walk.GrammarWalk`, but that it is asked and answers later."""

    def __init__(self, form: FarForm, number: int) -> None:
        self._form, self.number = form, number

    def must_come(self, outputs: np.ndarray) -> Sequence[int]:
        """Nothing is known of what must come."""
        return ()

    def look(self, place: FormPlace) -> "Future[FoundMasks]":
        """Begins to look at a place."""
        look = FormLook(self.number, place.outputs.tobytes(), place.num_sure, place.end_token_ids)
        told: Future[FoundMasks] = Future()
        self._form.ask(look).add_done_callback(lambda asked: told.set_result({place.key: _found(asked.result())}))
        return told


def _found(looked: Looked) -> FoundMask:
    allowed = None if looked.allowed is None else np.frombuffer(looked.allowed, np.uint32)
    return FoundMask(allowed, looked.error)
