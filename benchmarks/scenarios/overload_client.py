"""The measuring side of `overload`: one process that sends load over raw sockets, one that only knocks at the probes.

    python -m benchmarks.scenarios.overload_client load PORT --per-s 600 --seconds 20 [--in-flight 96] [--tokens 64]
    python -m benchmarks.scenarios.overload_client probe PORT --per-s 20 --seconds 20

Neither shares code or a process with the server or with `loadgen`. `load` is an open loop: requests leave at Poisson
instants whatever became of the others (with `--in-flight` a closed one: so many at once, to measure the capacity).
Every other request has a connection of its own, the rest take kept ones. `probe` has a blocking thread for each, so
that no late event loop stands in what it measures. Times count from the instant at which a request was due.
"""

import argparse
import asyncio
import json
import random
import resource
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

PROMPT = "def read_json(path):\n"
WARM_UP_S = 2.0
TIMEOUT_S = 30.0
PROBES = ("/health", "/metrics")


def request_bytes(tokens: int) -> bytes:
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def content_length(head: bytes) -> int:
    begin = head.lower().index(b"content-length:") + len(b"content-length:")
    return int(head[begin : head.index(b"\r\n", begin)])


class Exchange(asyncio.Protocol):
    """One connection. `ask` sends a request; the load is told the status, and if the connection is still good."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._answer = b""
        self.due_s = 0.0
        self.is_kept = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._send()

    def ask(self, due_s: float, is_kept: bool) -> None:
        self.due_s, self.is_kept, self._answer = due_s, is_kept, b""
        if self._transport is not None:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        if self._answer.startswith(b"HTTP/1.1 200"):
            if data.endswith(b"0\r\n\r\n"):
                self._end(200)
            return
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        status = int(head[9:12]) if found else 0
        if status > 200 and len(body) >= content_length(head):
            self._end(status, b"connection: close" in head.lower())

    def _end(self, status: int, closes: bool = False) -> None:
        assert self._transport is not None
        self._answer = b""
        is_usable = self.is_kept and not closes
        if not is_usable:
            transport, self._transport = self._transport, None
            transport.close()
        self._load.ended(self, status, is_usable)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:  # not by us
            self._transport = None
            self._load.lost(self)


class Load:
    """Sends, and writes down (due, ended, status) of each. Status 0: the connection was cut without an answer."""

    def __init__(self, port: int, tokens: int) -> None:
        self.request = request_bytes(tokens)
        self.ends: list[tuple[float, float, int]] = []
        self.lags: list[float] = []  # how late each was sent
        self.num_open = 0
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Exchange] = deque()
        self._open: set[Exchange] = set()
        self._num_sent = 0
        self._connecting: set[asyncio.Task[Any]] = set()
        self.on_end = lambda: None

    def send(self, due_s: float) -> None:
        is_kept = self._num_sent % 2 == 1
        self._num_sent += 1
        self.num_open += 1
        self.lags.append(time.monotonic() - due_s)
        if is_kept and self._idle:
            exchange = self._idle.pop()
            self._open.add(exchange)
            exchange.ask(due_s, True)
            return
        exchange = Exchange(self)
        exchange.ask(due_s, is_kept)
        self._open.add(exchange)
        task = self._loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            await self._loop.create_connection(lambda: exchange, "127.0.0.1", self._port)
        except OSError:
            self.ended(exchange, 0, False)

    def ended(self, exchange: Exchange, status: int, is_usable: bool) -> None:
        self.ends.append((exchange.due_s, time.monotonic(), status))
        self.num_open -= 1
        self._open.discard(exchange)
        if is_usable:
            self._idle.append(exchange)
        self.on_end()

    def lost(self, exchange: Exchange) -> None:
        if exchange in self._open:
            self.ended(exchange, 0, False)
        elif exchange in self._idle:
            self._idle.remove(exchange)

    async def open_loop(self, per_s: float, seconds: float) -> None:
        rng = random.Random(7)
        begin_s = due_s = time.monotonic()
        while (due_s := due_s + rng.expovariate(per_s)) < begin_s + seconds:
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            self.send(due_s)

    async def closed_loop(self, in_flight: int, seconds: float) -> None:
        over = asyncio.Event()
        self._loop.call_later(seconds, over.set)
        self.on_end = lambda: None if over.is_set() else self.send(time.monotonic())
        for _ in range(in_flight):
            self.send(time.monotonic())
        await over.wait()


async def run_load(arguments: argparse.Namespace) -> dict[str, Any]:
    load, begin_s = Load(arguments.port, arguments.tokens), time.monotonic()
    if arguments.in_flight:
        await load.closed_loop(arguments.in_flight, arguments.seconds)
    else:
        await load.open_loop(arguments.per_s, arguments.seconds)
    end_s = time.monotonic()
    window = [end for end in load.ends if begin_s + WARM_UP_S <= end[1] <= end_s]
    while load.num_open and time.monotonic() < end_s + TIMEOUT_S:  # what was sent counts, however late it is answered
        await asyncio.sleep(0.05)
    refused = [(end - due) * 1e3 for due, end, status in load.ends if status == 429 and due >= begin_s + WARM_UP_S]
    return {
        "sent": len(load.lags),
        "sent_per_s": len(load.lags) / (end_s - begin_s),
        "served_per_s": sum(status == 200 for _, _, status in window) / (end_s - begin_s - WARM_UP_S),
        "by_status": {str(s): sum(end[2] == s for end in load.ends) for s in sorted({end[2] for end in load.ends})},
        "unanswered": load.num_open,
        "refusal_ms": spread(refused),
        "sent_late_ms": spread([lag * 1e3 for lag in load.lags]),
        "cpu_s": cpu_s(),
        "wall_s": end_s - begin_s,
    }


def probe(port: int, path: str) -> int:
    """The status, over a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
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
        if due_s >= begin_s + WARM_UP_S:
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


def spread(values: list[float]) -> dict[str, float]:
    """Nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    at = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 90, 99)}
    return {"count": len(ordered), **at, "max": ordered[-1]}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "probe"))
    parser.add_argument("port", type=int)
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--in-flight", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(json.dumps(uvloop.run(run_load(arguments)) if arguments.what == "load" else run_probe(arguments)))


if __name__ == "__main__":
    main()
