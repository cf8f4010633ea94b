"""A process that only knocks at a server's probes, beside a load.

    python -m benchmarks.probe_client PORT --per-s 20 --seconds 20 --warm-up 2

It has a blocking thread for each request, so that no late event loop stands in what it measures. Times count from the
instant at which a request was due.
"""

import argparse
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.overload_client import cpu_s, spread

PROBES = ("/health", "/metrics")
PROBE_TIMEOUT_S = 30.0


def probe(port: int, path: str) -> int:
    """The status, over a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=PROBE_TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer[9:12])


def run_probe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each in a thread of its own, so that none waits for the one before it."""
    took: dict[str, list[float]] = {path: [] for path in PROBES}
    begin_s = time.monotonic()

    def one(path: str, due_s: float) -> bool:
        try:
            is_well = probe(arguments.port, path) == 200
        except OSError:
            is_well = False
        if due_s >= begin_s + arguments.warm_up:
            took[path].append((time.monotonic() - due_s) * 1e3)
        return is_well

    with ThreadPoolExecutor(256) as threads:
        answers = []
        for i in range(int(arguments.seconds * arguments.per_s)):
            due_s = begin_s + i / arguments.per_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            answers.append(threads.submit(one, PROBES[i % len(PROBES)], due_s))
    failed = sum(not answer.result() for answer in answers)
    return {"failed": failed, **{path: spread(values) for path, values in took.items()}, "cpu_s": cpu_s()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=0.0)
    print(json.dumps(run_probe(parser.parse_args())))
