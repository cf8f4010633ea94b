"""Commands in processes of their own, forked from one that has imported what they are made of: a tenth of the cost.

`Command` and `run` do what `subprocess.Popen` and `subprocess.run` do of `python -m splittime.cli.main`: a process with
its environment, folder and signals, that ends as it would. `constants` may be others there, as a test of this process
sets them with `monkeypatch`. Between it and the tests are two more: the seed, which
imports, and for each command one that waits for it and says how it ended. That a command finds its imports by itself is
for the tests of the real script.
"""

import atexit
import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_BYTES = 1 << 17  # of words and environment
READ_AT_START = ("LD_", "MALLOC_", "OMP_", "PYTHON")  # variables that a process has to begin with
NUMBER = struct.Struct("i")

_lock = threading.Lock()
_channel: socket.socket | None = None


def _send(message: bytes, files: Sequence[int]) -> None:
    """Give the seed, which is started for the first, a command."""
    global _channel
    with _lock:
        if _channel is None:
            from forks import ENVIRONMENT  # here: the seed has no use for pytest

            _channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            words = [sys.executable, __file__, str(far.fileno())]
            nothing = subprocess.DEVNULL
            subprocess.Popen(words, stdin=nothing, stdout=nothing, pass_fds=[far.fileno()], env=ENVIRONMENT)
            far.close()
        socket.send_fds(_channel, [message], files)


class Command:
    """`splittime WORDS` in a process of its own. stdout: what it says there, in bytes."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ".",
        stdin: int | None = None,
        stderr: int | None = None,
        constants: Mapping[str, object] | None = None,
    ) -> None:
        """stdin: a file to read, else there is nothing; stderr: a file to write to, else it is that of the tests.
        constants: values by "module:NAME"."""
        self.words, self.returncode, self._lock = words, None, threading.Lock()
        told = {"words": list(words), "env": dict(os.environ if env is None else env), "cwd": str(Path(cwd).absolute())}
        told["constants"] = dict(constants or {})
        (out, its_out), (self._ending, its_ending), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
        given = [nothing if stdin is None else stdin, its_out, 2 if stderr is None else stderr, its_ending]
        _send(json.dumps(told).encode(), given)
        for one in (its_out, its_ending, nothing):
            os.close(one)
        self.stdout = os.fdopen(out, "rb")
        (self.pid,) = NUMBER.unpack(os.read(self._ending, NUMBER.size))

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, or minus the signal that ended it."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._ending], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(list(self.words), timeout or 0.0)
                (status,) = NUMBER.unpack(os.read(self._ending, NUMBER.size))
                os.close(self._ending)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    words: Sequence[str],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 100.0,
    check: bool = False,
) -> subprocess.CompletedProcess:
    """Returns what it said, as text, and its exit code. check: which must be 0."""
    with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as errors:
        read.write(input.encode())
        read.seek(0)
        command = Command(words, env, cwd, read.fileno(), errors.fileno())
        late = threading.Timer(timeout, command.kill)
        late.start()
        said = command.stdout.read()
        code = command.wait()
        late.cancel()
        command.stdout.close()
        errors.seek(0)
        done = subprocess.CompletedProcess(list(words), code, said.decode(), errors.read().decode())
    if check:
        done.check_returncode()
    return done


# ---- in the seed


def _next_command(channel: socket.socket) -> dict:
    """Wait for commands for ever; returns what was told of each, in a process of its own."""
    while True:
        message, files, *_ = socket.recv_fds(channel, MOST_BYTES, 4)
        if not message:  # the tests have ended
            os._exit(0)
        if os.fork() == 0:
            break
        for one in files:
            os.close(one)
        while _reaped():
            pass
    ending = files.pop()
    pid = os.fork()
    if pid:
        for one in files:
            os.close(one)
        channel.close()
        os.write(ending, NUMBER.pack(pid))
        os.write(ending, NUMBER.pack(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(ending)
    channel.close()
    for number, one in enumerate(files):
        os.dup2(one, number)
        os.close(one)
    told = json.loads(message)
    os.chdir(told["cwd"])
    return told


def _reaped() -> bool:
    """Say whether one that waited for a command was there to be seen off."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _seed(channel: socket.socket) -> None:
    import random

    import uvloop  # noqa: F401

    import splittime.bench.mock_server
    import splittime.gateway.app  # noqa: F401
    from splittime.cli import explain, gateway  # noqa: F401
    from splittime.cli.main import main

    sys.argv = ["splittime", "gateway", "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main()  # typer imports as much again for the first command that it reads
    gc.collect()
    gc.freeze()  # a child that looks through it would copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = _next_command(channel)
    words, environment, constants = told["words"], told["env"], told["constants"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    if any(name.startswith(READ_AT_START) for name in changed):
        assert not constants, "a process that begins anew has those of its modules"
        os.execve(sys.executable, [sys.executable, "-m", "splittime.cli.main", *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    for name, value in constants.items():
        module, _, constant = name.partition(":")
        setattr(sys.modules[module], constant, value)
    sys.argv = ["splittime", *words]
    try:
        main()
    except SystemExit as ending:
        _end(ending.code)


def _end(code: object) -> None:
    """End as the interpreter does, but do not free what the seed has imported: that takes half of a short command."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # which waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    del sys.path[0]  # the tests' folder
    _seed(socket.socket(fileno=int(sys.argv[1])))
