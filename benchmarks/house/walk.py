"""The walk of one streamed completion on a CPU, from the socket to the kernels and back, as a reader would follow it.

A real server with its packaged model and its engine process run with a profile hook (`hook/sitecustomize.py`), which is
switched on round one request at a time, after requests that warm it. A call counts if it is made in each of the watched
requests: what a timer does now and then is left out. Only Python files are seen, and no C++.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.server_process import free_port, wait_until_ready

WARM_UPS = 3
ROUNDS = 5
QUIET_S = 0.5  # until the request's last calls are over and nothing of it runs
BODY = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0.7, "stream": True}


@dataclass(frozen=True)
class Call:
    round: int
    at_ns: int
    thread: tuple[int, int]
    file: str
    function: str
    caller: str

    @property
    def what(self) -> tuple[str, str, str]:
        return self.file, self.function, self.caller


def walk(source: Path) -> dict[str, Any]:
    """Watches a server of this tree; `source` is the folder of the package `splittime`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "round").write_bytes(b"\0")
        with _served(source, Path(folder)) as url:
            for number in range(-WARM_UPS, ROUNDS):
                _one_request(url, Path(folder), max(number + 1, 0))
        return _figures(_always(_read(Path(folder), source)))


def _one_request(url: str, folder: Path, number: int) -> None:
    _watch(folder, number)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(BODY).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"[DONE]" in answer.read()
    time.sleep(QUIET_S)
    _watch(folder, 0)


def _watch(folder: Path, number: int) -> None:
    with open(folder / "round", "r+b") as file:
        file.write(bytes([number]))


@contextmanager
def _served(source: Path, folder: Path) -> Iterator[str]:
    hook = Path(__file__).parent / "hook"
    path = os.pathsep.join([str(hook), str(source.parent)])
    environment = os.environ | {
        "PYTHONPATH": path,
        "HOUSE_WALK_TREE": str(source) + os.sep,
        "HOUSE_WALK_FOLDER": str(folder),
    }
    port = free_port()
    command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port)]
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, timeout_s=120)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)


def _read(folder: Path, source: Path) -> list[Call]:
    lines = [line for path in sorted(folder.glob("calls-*")) for line in path.read_text().splitlines()]
    return sorted((_parse(line, source) for line in lines), key=lambda call: call.at_ns)


def _parse(line: str, source: Path) -> Call:
    number, at_ns, process, thread, file, function, caller = line.split("\t")
    start = len(str(source)) + 1
    return Call(int(number), int(at_ns), (int(process), int(thread)), file[start:], function, caller[start:])


def _always(calls: list[Call]) -> list[Call]:
    """The calls of the last round that were made in each round."""
    rounds = [{call.what for call in calls if call.round == number} for number in range(1, ROUNDS + 1)]
    in_each = set.intersection(*rounds)
    return [call for call in calls if call.round == ROUNDS and call.what in in_each]


def _figures(calls: list[Call]) -> dict[str, Any]:
    edges = {(call.caller, call.file) for call in calls if call.caller not in ("", call.file)}
    order = _reading_order(calls)
    changes = sum(before != after for before, after in pairwise(order))
    return {
        "functions": len({(call.file, call.function) for call in calls}),
        "files": len({call.file for call in calls}),
        "edges": len(edges),
        "file_changes": changes,
        "order": [file for at, file in enumerate(order) if not at or order[at - 1] != file],
    }


def _reading_order(calls: list[Call]) -> list[str]:
    """The file of each function as it is first called: thread by thread, in the order in which these came in."""
    threads = dict.fromkeys(call.thread for call in calls)
    read = dict.fromkeys((call.file, call.function) for one in threads for call in calls if call.thread == one)
    return [file for file, _ in read]
