"""The engine's side of the process boundary: sockets, the receiving thread, the last words. No model here: the caller
builds the engine (`assemble.worker` does) and hands it in.

The parent writes one line of JSON settings to our standard input, perhaps some time after our start, and keeps it open:
end of file there means that the parent is gone, whatever killed it, and so do we go. SIGINT and SIGTERM are left to the
parent: a terminal or a service manager sends them to both of us, and the parent wants to drain first.
"""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import zmq

from splittime.core import background
from splittime.core.clock import SystemClock
from splittime.core.errors import EngineError, SplittimeError
from splittime.core.this_process import process_start_ns
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.gates import AdapterGate, GrammarGate
from splittime.drive.host_time import GcPauses, freeze_heap, processor_time
from splittime.drive.kv_gate import KvGate
from splittime.drive.loop import Inbox, run_loop
from splittime.drive.messages import Fatal, FromEngine, Loading, MaskFound, Ping, Pong, Ready, ToEngine

Timeline = list[tuple[str, int, int]]
Tell = Callable[[str, float], None]
Build = Callable[[bytes, Timeline, Tell], EngineParts]
TELL_EVERY_NS = 100_000_000


def work(
    inbound: str, outbound: str, build: Build, prepare: Callable[[Timeline], None] = lambda timeline: None
) -> None:
    """Build the engine from the settings on standard input, say `Ready`, run the loop; does not return.

    inbound, outbound: ZeroMQ endpoints to pull messages from and push messages to.
    build: makes the engine and what its driver needs; appends its phases (name, begin_ns, end_ns) to the timeline and
        tells its progress, in words and as a share of all, as often as it likes: what comes within a tenth of a second
        of the last is dropped.
    prepare: what can be done before the settings are there; appends its phases too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 0)
    push.setsockopt(zmq.LINGER, 1000)
    push.connect(outbound)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        push.send(encoder.encode(message))

    status = _work(inbound, outbound, build, prepare, send)
    push.close()
    context.term()  # waits until the last words are delivered
    os._exit(status)  # the receiving thread sits in a system call, and nothing is left to clean up


def _work(
    inbound: str, outbound: str, build: Build, prepare: Callable[[Timeline], None], send: Callable[[FromEngine], None]
) -> int:
    try:
        settings = _from_parent(inbound)
        timeline: Timeline = [("import engine", process_start_ns(), time.monotonic_ns())]
        prepare(timeline)
        background.leave()
        os.nice(background.RATHER_NICE)  # a loop that has something to say need not wait for a step (ADR 30)
        begin_ns = time.monotonic_ns()
        line = settings.get()
        timeline.append(("wait for settings", begin_ns, time.monotonic_ns()))
        parts = build(line, timeline, _teller(send))
        freeze_heap()
        clock = SystemClock()
        crank = Crank(parts, clock, GcPauses(clock), processor_time())
        inbox = _receive(inbound, outbound, parts)
        if parts.watch is not None:
            parts.watch(inbox.fail)
        send(Ready(parts.resolved, tuple(timeline), crank.stats(), parts.facts))
        run_loop(crank, inbox, send)
    except SplittimeError as error:  # of whoever wrote the settings: the message says it all
        send(Fatal(str(error), error=error.info))
        return 1
    except Exception as error:  # ours; the one edge where an engine's failure becomes a message
        send(Fatal(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


def _teller(send: Callable[[FromEngine], None]) -> Tell:
    """Sends progress, but not too often: another first word says that something else is being done."""
    last_ns, last_doing = 0, ""

    def tell(progress: str, share: float) -> None:
        nonlocal last_ns, last_doing
        now_ns, doing = time.monotonic_ns(), progress.split()[0]
        if doing != last_doing or now_ns - last_ns >= TELL_EVERY_NS:
            last_ns, last_doing = now_ns, doing
            send(Loading(progress, share))

    return tell


def _from_parent(inbound: str) -> "SimpleQueue[bytes]":
    """Returns a queue that gets the line of settings. At the end of standard input, removes the sockets' folder (a
    parent that was killed could not) and ends the process, whether or not there was a line."""
    settings: SimpleQueue[bytes] = SimpleQueue()

    def watch() -> None:
        line = sys.stdin.buffer.readline()
        if line:
            settings.put(line)
        while sys.stdin.buffer.read(4096):
            pass
        shutil.rmtree(os.path.dirname(inbound.removeprefix("ipc://")), ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return settings


def _receive(inbound: str, outbound: str, parts: EngineParts) -> Inbox:
    """Start the receiving thread; it alone uses its sockets."""
    inbox = Inbox()

    def put(message: ToEngine) -> None:
        inbox.put(message, time.monotonic_ns())

    goes_back = not parts.engine.plans_ahead and parts.engine.scheduler.cache.states is None
    if parts.grammars is not None and goes_back:  # else steps in flight have rows of who is late, or its state went on
        parts.grammars.tell_found(lambda request_id: put(MaskFound(request_id)))
    blocks = KvGate(parts.sharing, parts.engine.scheduler.cache, put)
    gate = AdapterGate(parts.adapters, put, GrammarGate(parts.grammars, blocks.let_in).let_in)
    decoder = msgspec.msgpack.Decoder(ToEngine)
    pong = msgspec.msgpack.encode(Pong())

    def receive() -> None:
        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.setsockopt(zmq.RCVHWM, 0)
        pull.connect(inbound)
        push.connect(outbound)
        while True:
            try:
                message = decoder.decode(pull.recv())
            except msgspec.MsgspecError as error:  # whoever sent it would wait for ever: end, with words
                inbox.fail(EngineError(f"a message to the engine cannot be taken in: {error}"))
                continue
            if isinstance(message, Ping):
                push.send(pong)
            else:
                gate.let_in(message)

    threading.Thread(target=receive, name="receive", daemon=True).start()
    return inbox
