"""What the engine's process tells the API processes, and the threads that carry it, beside the hot path.

The engine appends to a deque; a thread of its own packs what has gathered every `GATHER_S`, and sends it to the API
process whose request it is. Nobody wakes it: a thread that wakes when a request has its first token wants the
interpreter at the moment when that token is to go out. Steps go to the first process, and to all that have had a
request. Sockets lie in a folder that only this user may enter, named by `FOLDER` in the environment, which the engine's
process inherits.

Nothing here may hold up or end the engine: a process that does not read loses mail, and what is lost is counted and
told with the next that arrives.
"""

import logging
import math
import os
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from splittime.attach.request_book import EndedBook, FirstTokenBook
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

FOLDER = "SPLITTIME_ATTACH_FOLDER"
GATHER_S = 0.025
FIRST = 0  # the API process that is told of the engine before it has sent a request
LAST_S, LAST_MAIL_S = 0.3, 2.0  # for what the engine still sends as the server ends, and for the thread to end
MAX_MAIL = 2_000  # messages that a process may be behind

log = logging.getLogger("splittime.attach")


class Mail(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """engine: which of several. lost: messages that did not arrive, so far. stopped: why the engine's books end here.
    facts: with the first. waiting_for: how many requests of the engine wait now, by cause."""

    engine: int
    facts: ServerFacts | None = None
    waiting_for: dict[str, int] = {}
    first_tokens: list[FirstTokenBook] = []
    ended: list[EndedBook] = []
    steps: list[StepRecord] = []
    lost: int = 0
    stopped: str = ""


def new_folder() -> str:
    """Returns a name that nobody else has."""
    return f"{tempfile.gettempdir()}/splittime-{os.getuid()}-{secrets.token_hex(8)}"


def name_folder() -> None:
    """Names the folder for this process and those that it starts, unless one is named."""
    os.environ.setdefault(FOLDER, new_folder())


def address(client: int) -> str:
    return f"ipc://{os.environ[FOLDER]}/{client}"


class TakesMail(Protocol):
    """Who is told of books and steps: `Sender` where a server runs."""

    def step(self, record: StepRecord) -> None: ...

    def book(self, client: int, book: FirstTokenBook | EndedBook) -> None: ...

    def stop(self, why: str) -> None: ...

    def close(self) -> None: ...


class Sender:
    """The engine's end. Every call only appends."""

    def __init__(self, engine: int, facts: ServerFacts, waiting_for: Callable[[], dict[str, int]] = dict) -> None:
        self._engine, self._facts, self._waiting_for = engine, facts, waiting_for
        self._queue: deque[tuple[int | None, FirstTokenBook | EndedBook | StepRecord]] = deque()
        self._is_closed = threading.Event()
        self._is_dead = False  # the thread has ended of a fault: nobody takes what is put
        self._stopped = self._told_stopped = ""
        self._lost: dict[int, int] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="splittime-mail", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        self._put(None, record)

    def book(self, client: int, book: FirstTokenBook | EndedBook) -> None:
        self._put(client, book)

    def _put(self, client: int | None, what: FirstTokenBook | EndedBook | StepRecord) -> None:
        if not self._is_dead:
            self._queue.append((client, what))

    def stop(self, why: str) -> None:
        """The books end here."""
        self._stopped = why
        self._is_closed.set()  # the thread tells it, and ends

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(LAST_MAIL_S)

    def _run(self) -> None:
        try:
            self._carry()
        except Exception:  # the engine goes on without its books
            self._is_dead = True
            self._queue.clear()
            log.exception("the mail of the books ends here")

    def _carry(self) -> None:
        context = zmq.Context()
        self._connect(context, FIRST)
        while not self._is_closed.wait(GATHER_S):
            self._try_to_send(context)
        self._try_to_send(context)  # what came while the last was sent
        for socket in self._sockets.values():
            socket.close(linger=500)
        context.term()

    def _try_to_send(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        try:
            self._send_all(context)
        except Exception:  # the engine goes on without its books
            log.exception("mail of the books could not be sent")

    def _send_all(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        clients = {client for client, _ in taken if client is not None}
        for client in clients - self._sockets.keys():
            self._connect(context, client)
        stopped = self._stopped
        if not taken and stopped == self._told_stopped:
            return
        steps, waiting_for = [each for _, each in taken if isinstance(each, StepRecord)], self._waiting_for()
        for client in self._sockets:
            books = [each for to, each in taken if to == client]
            first_tokens = [each for each in books if isinstance(each, FirstTokenBook)]
            ended = [each for each in books if isinstance(each, EndedBook)]
            self._send(client, first_tokens=first_tokens, ended=ended, steps=steps, waiting_for=waiting_for)
        self._told_stopped = stopped

    def _connect(self, context: "zmq.Context[zmq.Socket[bytes]]", client: int) -> None:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_MAIL)
        socket.connect(address(client))
        self._sockets[client], self._lost[client] = socket, 0
        self._send(client, facts=self._facts)

    def _send(self, client: int, **contents: Any) -> None:
        mail = Mail(engine=self._engine, lost=self._lost[client], stopped=self._stopped, **contents)
        try:
            self._sockets[client].send(msgspec.msgpack.encode(mail), zmq.NOBLOCK)
        except zmq.Again:
            self._lost[client] += 1


class Receiver:
    """An API process's end: calls `take` with each message, and `idle` at least every `GATHER_S`, on its own thread."""

    def __init__(self, client: int, take: Callable[[Mail], None], idle: Callable[[], None]) -> None:
        self._folder = folder = Path(os.environ[FOLDER])
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            raise PermissionError(f"{folder} is open to others: name another folder in {FOLDER}")
        self._take, self._idle, self._client = take, idle, client
        self._is_closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, MAX_MAIL)
        self._socket.bind(address(client))
        self._thread = threading.Thread(target=self._run, name="splittime-books", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read what has come, and remove the socket; the folder too, if it was the last."""
        self._is_closed = True
        self._thread.join(LAST_MAIL_S)
        self._socket.close(linger=0)
        self._context.term()
        with suppress(OSError):
            (self._folder / str(self._client)).unlink()
        with suppress(OSError):  # others are in it
            self._folder.rmdir()

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(Mail)
        until = math.inf
        while time.monotonic() < until:
            if self._is_closed and until == math.inf:
                until = time.monotonic() + LAST_S
            try:
                if self._socket.poll(int(GATHER_S * 1e3)):
                    self._take(decoder.decode(self._socket.recv()))
                self._idle()
            except Exception:  # a message that cannot be used is one lost; the server goes on
                log.exception("a message of the engine's books could not be used")
