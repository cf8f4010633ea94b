"""A `splittime serve` of our own on a free loopback port, for benchmarks over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(*arguments: str, timeout_s: float = 120) -> Iterator[str]:
    """Serve with these arguments; yields the base URL once it is ready, ends it with SIGTERM."""
    port = free_port()
    command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=words)
        try:
            _wait_or_tell(url, process, timeout_s, words)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


def _wait_or_tell(url: str, process: subprocess.Popen, timeout_s: float, words: IO[bytes]) -> None:
    """Raises RuntimeError with the server's own words if it does not come up."""
    try:
        wait_until_ready(url, process, timeout_s)
    except RuntimeError as error:
        words.seek(0)
        raise RuntimeError(f"{error}: {words.read().decode(errors='replace')[-2000:]}") from None


def wait_until_ready(url: str, process: subprocess.Popen, timeout_s: float) -> float:
    """Seconds until /ready answered 200. Raises RuntimeError if the process ends or the time is up."""
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=1):
                return time.monotonic() - begin
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the server was not ready after {timeout_s} s")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)
