"""Where texts are worked on: processes with limits, since a tokenizer and a chat template are somebody else's programs.

    server ──fork, please: a socket, limits──▶ parent: holds the tokenizer, serves nobody
                                                 │ fork
           ──────────── TextWork ───────────▶ worker: memory bounded by RLIMIT_AS,
           ◀─────────── TextAnswer ──────────         each work's processor time by a timer of the kernel

The parent loads the tokenizer once, and stays single-threaded, so that it can be forked at any time: a worker begins in
a few milliseconds, shares the vocabulary's memory, and is replaced as quickly when it had to be ended. Nothing in a
worker has to notice that it takes too long: SIGPROF ends it, in whatever library it is. When the server is gone, its
sockets are closed, and all end.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys

import msgspec

from splittime.core.errors import EngineError, SplittimeError
from splittime.text.foreign_code import is_panic
from splittime.text.tokenizer import Tokenizer
from splittime.text.work import TextAnswer, TextDone, TextFailed, TextWork, carry_out

HEAD = struct.Struct("<Q")  # before each message: its length
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class TextLimits(msgspec.Struct, frozen=True):
    """cpu_s: processor time of one work. memory_bytes: what it may take besides what the worker begins with."""

    cpu_s: float
    memory_bytes: int


def frame(message: bytes) -> bytes:
    return HEAD.pack(len(message)) + message


def main() -> None:
    """The parent: arguments are the numbers of its socket and of the file that describes the tokenizer."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with open(int(sys.argv[2]), "rb") as file:
        tokenizer = ready_tokenizer(file.read())
    signal.signal(signal.SIGCHLD, _bury)
    gc.freeze()
    while True:
        message, numbers, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _be_worker(socket.socket(fileno=numbers[0]), tokenizer, msgspec.msgpack.decode(message, type=TextLimits))
            os._exit(0)
        os.close(numbers[0])


def _bury(*_: object) -> None:
    """Wait for the workers that have ended. If they were left to the kernel, nobody would have run their processor time
    (proc(5), cutime), and `machine_time` would take it for other processes'."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def ready_tokenizer(description: bytes) -> Tokenizer:
    """Returns the tokenizer, with what is proved of it looked up before anybody forks: 0.1 s for 150,000 tokens."""
    tokenizer = Tokenizer.described(description)
    _ = tokenizer.way_of_working
    return tokenizer


def _be_worker(channel: socket.socket, tokenizer: Tokenizer, limits: TextLimits) -> None:
    """Answer one work after the other until the server closes the socket. The first message says who this is."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a panic prints is in its answer too
    _bound_memory(limits.memory_bytes)
    decoder, encoder = msgspec.msgpack.Decoder(TextWork), msgspec.msgpack.Encoder()
    channel.sendall(frame(encoder.encode(os.getpid())))
    while (message := _read(channel)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        answer = encoder.encode(_answer(decoder, message, tokenizer))
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(frame(answer))


def _bound_memory(num_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, held + num_bytes))


def _answer(decoder: "msgspec.msgpack.Decoder[TextWork]", message: bytes, tokenizer: Tokenizer) -> TextAnswer:
    try:
        done: TextDone = carry_out(decoder.decode(message), tokenizer)
        return done
    except SplittimeError as error:
        return TextFailed(error.info)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return TextFailed(EngineError(f"a text worker failed: {type(error).__name__}: {str(error)[:200]}").info)


def _read(channel: socket.socket) -> bytes | None:
    """One message, or None when there are no more."""
    head = _read_exactly(channel, HEAD.size)
    return None if head is None else _read_exactly(channel, HEAD.unpack(head)[0])


def _read_exactly(channel: socket.socket, count: int) -> bytes | None:
    received = bytearray(count)
    view, at = memoryview(received), 0
    while at < count:
        got = channel.recv_into(view[at:])
        if not got:
            return None
        at += got
    return bytes(received)


if __name__ == "__main__":
    main()
