"""A server of our own, or a vLLM with our books: started with these flags, ended by its process id, and with this
process however it ends."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from splittime.core.errors import EngineError
from splittime.wire.target import Target

START_S = 300.0
STOP_S = 30.0
NAMED_ERROR = re.compile(r"(?:^|\] )\s*(\w+(?:Error|Exception): .*)")  # at a line's begin, or behind a log's
PROBE_S, POLL_S = 2.0, 0.2
STARTED = """import signal, sys
from splittime.cli.entry import main
from splittime.core.this_process import end_with
end_with(int(sys.argv.pop(1)), signal.SIGTERM)
main()"""


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[Target]:
    """Gives a server of `splittime serve` with these flags, on a free port, which ends on leaving. Raises EngineError,
    with its last words, for one that does not start."""
    with _started(["serve", *flags, "--port", "0", "--json"], subprocess.PIPE) as (process, words):
        yield Target(url=_url(process, words))


@contextmanager
def vllm_server(flags: Sequence[str]) -> Iterator[Target]:
    """Gives a vLLM server with our books, on a free port, which ends on leaving. flags: of `vllm serve`, the model
    first. Raises EngineError, with its last words, for one that does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asked = ["attach", "vllm", "--", "serve", *flags, "--host", "127.0.0.1", "--port", str(port)]
    with _started(asked) as (process, words):
        target = Target(url=f"http://127.0.0.1:{port}")
        _wait_until_healthy(target, process, words)
        yield target


@contextmanager
def _started(
    arguments: Sequence[str], stdout: int | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", IO[bytes]]]:
    """Gives a process of our command, and the file that its words go to. stdout: where its data goes, if not there."""
    command = [sys.executable, "-c", STARTED, str(os.getpid()), *arguments]
    with tempfile.TemporaryFile() as words:
        out = words if stdout is None else stdout
        process = subprocess.Popen(command, stdout=out, stderr=words, start_new_session=True)
        try:
            yield process, words
        finally:
            _end(process)


def _wait_until_healthy(target: Target, process: "subprocess.Popen[bytes]", words: IO[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise _not_started(process, words, in_time=True)
        try:
            with urllib.request.urlopen(f"{target.base_url}/health", timeout=PROBE_S):
                return
        except OSError:
            time.sleep(POLL_S)
    raise _not_started(process, words, in_time=False)


def as_typed(name: str, value: Any) -> list[str]:
    """Returns a setting as it is typed on a command line: [] where it is None, several words for a list."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (f"--{flag}", str(one))]
    return [f"--{flag}", str(value)]


def _url(process: "subprocess.Popen[bytes]", words: Any) -> str:
    """Waits until the server says where it is."""
    assert process.stdout is not None
    until = time.monotonic() + START_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not part:
            raise _not_started(process, words, in_time=bool(ready))
        line += part
    return str(json.loads(line)["url"])


def _not_started(process: "subprocess.Popen[bytes]", words: Any, in_time: bool) -> EngineError:
    words.seek(0)
    said = words.read().decode(errors="replace").strip().splitlines()
    why = f"it ended with status {process.wait(STOP_S)}" if in_time else f"it was not ready after {START_S:g} s"
    return EngineError(f"the server did not start: {why}", hint=_cause_in(said))


def _cause_in(said: Sequence[str]) -> str | None:
    """Returns the first error that a server's last words name, or their end: what follows an error follows from it."""
    first = next((match[1] for line in said if (match := NAMED_ERROR.search(line))), None)
    return (first or " ".join(said[-3:])[-500:])[:500] or None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks it to end, and ends it if it does not."""
    for sign, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            break
        process.send_signal(sign)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()
