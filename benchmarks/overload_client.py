"""The measuring side of both `overload` benchmarks: a process that sends load over raw sockets.

    python -m benchmarks.overload_client PORT --kinds JSON --per-s 640 --seconds 60 --warm-up 5
    python -m benchmarks.overload_client PORT --kinds JSON --in-flight 300 --seconds 5

No code and no process is shared with the server, the gateway or `loadgen`. It is an open loop: requests leave at
Poisson instants whatever became of the others. With `--in-flight` it is a closed one, so many at once, that tells a
capacity, or how many refusals a second there can be. Connections are kept while they are good; with `--new-ones` every
other request has one of its own. JSON is a list of kinds of requests, of which each request is one by chance:
{"name", "body", "least", "most"} and, where there are any, "key" and "prompt_tokens": it asks for `least` to `most`
tokens. While it runs, a line a second tells how many were sent, to stderr.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import uvloop

ANSWERS_S = 30.0  # for what is open at the end
ADMIT = re.compile(rb"admit;dur=([0-9.]+)")
CODE = re.compile(rb'"code": ?"([a-z_]+)"')


class Asked(NamedTuple):
    """One request: its kind, how many tokens it asks for, when it was due and when it left."""

    kind: str
    tokens: int
    due_s: float
    sent_s: float


class End(NamedTuple):
    """What became of it. status: 0 where the connection was cut. waited_ms: as the gateway tells (`admit`)."""

    asked: Asked
    end_s: float
    status: int
    code: str
    waited_ms: float


def request_bytes(kind: dict[str, Any], tokens: int) -> bytes:
    body = json.dumps({**kind["body"], "max_tokens": tokens, "stream": True}).encode()
    key = f"Authorization: Bearer {kind['key']}\r\n" if "key" in kind else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{key}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def content_length(head: bytes) -> int:
    begin = head.lower().index(b"content-length:") + len(b"content-length:")
    return int(head[begin : head.index(b"\r\n", begin)])


class Stream(asyncio.Protocol):
    """One connection, with one request at a time. is_kept: it is used again while it is good."""

    def __init__(self, load: "RawLoad", asked: Asked, request: bytes, is_kept: bool) -> None:
        self._load, self.asked, self._request, self._is_kept = load, asked, request, is_kept
        self._transport: asyncio.Transport | None = None
        self._answer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def ask(self, asked: Asked, request: bytes) -> None:
        self.asked, self._answer = asked, b""
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._answer.startswith(b"HTTP/1.1 200"):
            self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        status = int(head[9:12]) if found else 0
        if status == 200:
            if data.endswith(b"0\r\n\r\n"):
                self._end(200, head)
        elif status > 200 and len(body) >= content_length(head):
            self._end(status, head, body)

    def _end(self, status: int, head: bytes, body: bytes = b"") -> None:
        code, asked = CODE.search(body), self.asked
        waited_ms = sum(float(found) for found in ADMIT.findall(head))
        assert self._transport is not None
        if not self._is_kept or b"connection: close" in head.lower():
            transport, self._transport = self._transport, None
            transport.close()
        end = End(asked, time.monotonic(), status, code[1].decode() if code else "", waited_ms)
        self._load.ended(end, self, is_usable=self._transport is not None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:  # not by us
            self._transport = None
            self._load.lost(self)


class RawLoad:
    """Sends and writes down. has_new_ones: every other request has a connection of its own. on_end: called with each
    end."""

    def __init__(self, port: int, kinds: list[dict[str, Any]], has_new_ones: bool) -> None:
        self._port, self._kinds, self._has_new_ones = port, kinds, has_new_ones
        self._rng, self._loop = random.Random(7), asyncio.get_running_loop()
        self._idle: deque[Stream] = deque()
        self._open: set[Stream] = set()
        self._connecting: set[asyncio.Task[Any]] = set()
        self._requests: dict[tuple[str, int], bytes] = {}
        self.ends: list[End] = []
        self.lags_ms: list[float] = []  # how late each was sent
        self.num_open = 0
        self.on_end: Callable[[], None] = lambda: None

    def send(self, due_s: float) -> None:
        kind = self._rng.choice(self._kinds)
        tokens = self._rng.randint(kind["least"], kind["most"])
        cached = self._requests.get((kind["name"], tokens))
        request = cached or self._requests.setdefault((kind["name"], tokens), request_bytes(kind, tokens))
        is_kept = not self._has_new_ones or len(self.lags_ms) % 2 == 1
        asked = Asked(kind["name"], tokens, due_s, time.monotonic())
        self.lags_ms.append((asked.sent_s - due_s) * 1e3)
        self.num_open += 1
        if is_kept and self._idle:
            stream = self._idle.pop()
            self._open.add(stream)
            stream.ask(asked, request)
        else:
            self._begin(Stream(self, asked, request, is_kept))

    def _begin(self, stream: Stream) -> None:
        self._open.add(stream)
        task = self._loop.create_task(self._connect(stream))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, stream: Stream) -> None:
        try:
            await self._loop.create_connection(lambda: stream, "127.0.0.1", self._port)
        except OSError:
            self.ended(End(stream.asked, time.monotonic(), 0, "no_connection", 0.0), stream, is_usable=False)

    def ended(self, end: End, stream: Stream, *, is_usable: bool) -> None:
        self.ends.append(end)
        self.num_open -= 1
        self._open.discard(stream)
        if is_usable:
            self._idle.append(stream)
        self.on_end()

    def lost(self, stream: Stream) -> None:
        if stream in self._open:
            self.ended(End(stream.asked, time.monotonic(), 0, "cut", 0.0), stream, is_usable=False)
        elif stream in self._idle:
            self._idle.remove(stream)

    async def open_loop(self, per_s: float, seconds: float) -> None:
        begin_s = due_s = time.monotonic()
        while (due_s := due_s + self._rng.expovariate(per_s)) < begin_s + seconds:
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
        self.on_end = lambda: None


async def told_each_second(load: RawLoad) -> None:
    begin_s = time.monotonic()
    while True:
        await asyncio.sleep(1)
        served = sum(end.status == 200 for end in load.ends)
        words = f"{time.monotonic() - begin_s:5.0f} s: {len(load.lags_ms)} sent, {served} served, {load.num_open} open"
        print(words, file=sys.stderr, flush=True)


async def run_load(arguments: argparse.Namespace) -> dict[str, Any]:
    kinds = json.loads(arguments.kinds)
    load, begin_s = RawLoad(arguments.port, kinds, arguments.new_ones), time.monotonic()
    telling = asyncio.create_task(told_each_second(load))
    if arguments.in_flight:
        await load.closed_loop(arguments.in_flight, arguments.seconds)
    else:
        await load.open_loop(arguments.per_s, arguments.seconds)
    end_s = time.monotonic()
    telling.cancel()
    while load.num_open and time.monotonic() < end_s + ANSWERS_S:  # what was sent counts, however late it is answered
        await asyncio.sleep(0.02)
    return figures_of(load, kinds, begin_s + arguments.warm_up, end_s) | {"wall_s": end_s - begin_s}


def figures_of(load: RawLoad, kinds: list[dict[str, Any]], from_s: float, end_s: float) -> dict[str, Any]:
    """Counts ends within the window for rates and shares, and requests due in it for latencies."""
    seconds, prompts = end_s - from_s, {kind["name"]: kind.get("prompt_tokens", 0) for kind in kinds}
    window = [end for end in load.ends if from_s <= end.end_s <= end_s]
    served = [end for end in window if end.status == 200]
    due = [end for end in load.ends if from_s <= end.asked.due_s]
    tokens: Counter[str] = Counter()
    for end in served:
        tokens[end.asked.kind] += end.asked.tokens + prompts[end.asked.kind]
    refused = [end for end in due if end.status == 429]
    return {
        "sent": len(load.lags_ms),
        "sent_per_s": sum(from_s <= end.asked.sent_s <= end_s for end in load.ends) / seconds,
        "served_per_s": len(served) / seconds,
        "unanswered": load.num_open,
        "statuses": dict(Counter(f"{end.status} {end.code}".strip() for end in load.ends)),
        "tokens": dict(tokens),
        "tokens_per_s": tokens.total() / seconds,
        "output_tokens_per_s": sum(end.asked.tokens for end in served) / seconds,
        "refusals_per_s": sum(end.status == 429 for end in window) / seconds,
        "refusal_ms": spread([(end.end_s - end.asked.sent_s) * 1e3 for end in refused]),
        "refusal_since_due_ms": spread([(end.end_s - end.asked.due_s) * 1e3 for end in refused]),
        "refusal_after_a_wait": sum(end.waited_ms > 0 for end in refused) / max(1, len(refused)),
        "sent_late_ms": spread(load.lags_ms),
        "kinds": {name: kind_figures(ends) for name, ends in by_kind(due).items()},
        "cpu_s": cpu_s(),
    }


def by_kind(ends: list[End]) -> dict[str, list[End]]:
    found: dict[str, list[End]] = defaultdict(list)
    for end in ends:
        found[end.asked.kind].append(end)
    return dict(sorted(found.items()))


def kind_figures(ends: list[End]) -> dict[str, Any]:
    served = [end for end in ends if end.status == 200]
    return {
        "served": len(served),
        "refused": sum(end.status == 429 for end in ends),
        "waited_ms": spread([end.waited_ms for end in served]),
        "e2e_ms": spread([(end.end_s - end.asked.sent_s) * 1e3 for end in served]),
    }


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
    parser.add_argument("port", type=int)
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--new-ones", action="store_true")
    parser.add_argument("--per-s", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=0.0)
    parser.add_argument("--in-flight", type=int, default=0)
    print(json.dumps(uvloop.run(run_load(parser.parse_args()))))


if __name__ == "__main__":
    main()
