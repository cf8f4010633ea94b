"""A server of our own: started with these flags, ended by its process id, and with this process however it ends."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from splittime.core.errors import EngineError
from splittime.wire.target import Target

START_S = 300.0
STOP_S = 30.0
STARTED = """import signal, sys
from splittime.cli.main import main
from splittime.core.parent import end_with
end_with(int(sys.argv.pop(1)), signal.SIGTERM)
main()"""


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[Target]:
    """Gives a server of `splittime serve` with these flags, on a free port, which ends on leaving. Raises EngineError,
    with its last words, for one that does not start."""
    served = ["serve", *flags, "--port", "0", "--json"]
    command = [sys.executable, "-c", STARTED, str(os.getpid()), *served]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, start_new_session=True)
        try:
            yield Target(url=_url(process, words))
        finally:
            _end(process)


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
    return EngineError(f"the server did not start: {why}", hint=" ".join(said[-3:])[-500:] or None)


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
