"""The engine's side of the process boundary: sockets, the receiving thread, the last words. No model here: the caller
builds the engine (`cli.worker` does) and hands it in.

The parent writes one line of JSON settings to our standard input and keeps it open: end of file there means that the
parent is gone, whatever killed it, and so do we go. SIGINT is the parent's business (a terminal sends it to both).
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec
import zmq

from splittime.core.clock import SystemClock
from splittime.core.errors import SplittimeError
from splittime.engine.engine import Engine
from splittime.engine.gc_pauses import GcPauses, freeze_heap
from splittime.engine.loop import Inbox, run_loop
from splittime.engine.messages import Fatal, FromEngine, Ready, ToEngine

Timeline = list[tuple[str, int, int]]
Build = Callable[[bytes, Timeline], tuple[Engine, dict]]


def work(inbound: str, outbound: str, build: Build) -> None:
    """Build the engine from the settings on standard input, say `Ready`, run the loop; does not return.

    inbound, outbound: ZeroMQ endpoints to pull messages from and push messages to.
    build: makes the engine and says what was resolved; appends its phases (name, begin_ns, end_ns) to the timeline.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 0)
    push.setsockopt(zmq.LINGER, 1000)
    push.connect(outbound)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        push.send(encoder.encode(message))

    status = _work(inbound, build, send)
    push.close()
    context.term()  # waits until the last words are delivered
    os._exit(status)  # the receiving thread sits in a system call, and nothing is left to clean up


def _work(inbound: str, build: Build, send: Callable[[FromEngine], None]) -> int:
    try:
        settings = sys.stdin.buffer.readline()
        _leave_with_parent()
        timeline: Timeline = []
        engine, resolved = build(settings, timeline)
        freeze_heap()
        engine.gc_pauses = GcPauses(SystemClock())
        inbox = _receive(inbound)
        send(Ready(resolved, tuple(timeline), engine.stats()))
        run_loop(engine, inbox, send, SystemClock())
    except SplittimeError as error:  # of whoever wrote the settings: the message says it all
        send(Fatal(str(error)))
        return 1
    except Exception as error:  # ours; the one edge where an engine's failure becomes a message
        send(Fatal(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


def _leave_with_parent() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _receive(inbound: str) -> Inbox:
    """Start the receiving thread; it alone uses its socket."""
    inbox = Inbox()
    decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive() -> None:
        pull = zmq.Context().socket(zmq.PULL)
        pull.setsockopt(zmq.RCVHWM, 0)
        pull.connect(inbound)
        while True:
            message = pull.recv()
            received_ns = time.monotonic_ns()
            inbox.put(decoder.decode(message), received_ns)

    threading.Thread(target=receive, name="receive", daemon=True).start()
    return inbox
