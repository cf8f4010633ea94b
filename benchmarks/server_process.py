"""A server on a free loopback port, for benchmarks over HTTP: our own, or vLLM's with our books or without."""

import contextlib
import errno
import json
import os
import random
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

from splittime.attach.versions import VLLM_COMMAND

PORTS = (20_000, 32_000)  # Linux gives those from 32,768 on to outgoing connections, other systems from 49,152
_KEPT: list[socket.socket] = []  # one for each port that this process has given out, until it ends
_DRAW = random.SystemRandom()  # a seeded run draws the same whatever ports it gets


def free_port(in_a_row: int = 1) -> int:
    """Returns a loopback port, the first of several in a row, for a server that is about to start. It lies below those
    of outgoing connections, one of which could take it before the server does. The UDP port of the same number is
    kept: that tells other tests and benchmarks that it is given away."""
    for _ in range(1000):
        first = _DRAW.randrange(PORTS[0], PORTS[1] - in_a_row)
        with contextlib.ExitStack() as stack, contextlib.suppress(PortTaken):
            kept = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(in_a_row)]
            for port, one in enumerate(kept, first):
                _take(one, port)
            _KEPT.extend(kept)
            stack.pop_all()
            return first
    raise OSError(f"no {in_a_row} free ports in a row between {PORTS[0]} and {PORTS[1]}")


class PortTaken(Exception):
    pass


def _take(kept: socket.socket, port: int) -> None:
    try:
        kept.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortTaken from None
        raise


@contextmanager
def served(*arguments: str, timeout_s: float = 120) -> Iterator[str]:
    """Serve with these arguments; yields the base URL once it is ready, ends it with SIGTERM."""
    command = [sys.executable, "-m", "splittime.cli.entry", "serve", "--port"]
    with _serving(command, arguments, "/ready", timeout_s) as url:
        yield url


@contextmanager
def served_vllm(
    environment: str, *arguments: str, with_books: bool = True, ledger_file: str | None = None, timeout_s: float = 300
) -> Iterator[str]:
    """Serve with vLLM, with our books or without. environment: the folder of the one that vLLM and splittime are
    installed in. arguments: vLLM's, the model first. Its KV cache has 1 GiB, if the caller's environment says nothing:
    vLLM on a CPU takes a large share of the machine's memory, and a second one does not come up."""
    python = f"{environment}/bin/python"
    kept = [] if ledger_file is None else ["--ledger-file", ledger_file]
    attached = [python, "-m", "splittime.cli.main", "attach", "vllm", *kept, "--"]
    command = attached if with_books else [python, "-m", VLLM_COMMAND]
    model, *flags = arguments
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with _serving([*command, "serve", model, "--host", "127.0.0.1", "--port"], flags, "/health", timeout_s) as url:
        yield url


@contextmanager
def _serving(command: Sequence[str], arguments: Sequence[str], path: str, timeout_s: float) -> Iterator[str]:
    """Runs a command that ends with the flag for its port. path: what answers once it is ready. It keeps its bytecode,
    without which a start takes far longer."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen([*command, str(port), *arguments], stdout=words, stderr=words, env=environment)
        try:
            _wait_or_tell(url, process, timeout_s, words, path)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


def _wait_or_tell(url: str, process: subprocess.Popen, timeout_s: float, words: IO[bytes], path: str) -> None:
    """Raises RuntimeError with the server's own words if it does not come up."""
    try:
        wait_until_ready(url, process, timeout_s, path)
    except RuntimeError as error:
        words.seek(0)
        raise RuntimeError(f"{error}: {words.read().decode(errors='replace')[-2000:]}") from None


def wait_until_ready(url: str, process: subprocess.Popen, timeout_s: float, path: str = "/ready") -> float:
    """Seconds until the path answered 200. Raises RuntimeError if the process ends or the time is up."""
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=1):
                return time.monotonic() - begin
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the server was not ready after {timeout_s} s")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)
