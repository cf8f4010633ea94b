"""The measuring side of `overload`: one process that sends several tenants' load over raw sockets.

    python -m benchmarks.gateway.overload_client PORT --tenants JSON --per-s 640 --seconds 60 --warm-up 5
    python -m benchmarks.gateway.overload_client PORT --tenants JSON --in-flight 300 --seconds 5

The first is an open loop: requests leave at Poisson instants whatever became of the others, each tenant's a third (of
three). The second is a closed one, so many at once, that tells how many refusals a second there can be. Connections are
kept while they are good. No code is shared with the gateway. JSON is a list of {"name", "key", "least", "most"}: a
request asks for `least` to `most` tokens. While it runs, a line a second tells how many were sent, to stderr.
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
from typing import Any, NamedTuple

import uvloop

from benchmarks.scenarios.overload_client import content_length, spread

MODEL = "mock"
PROMPT = "one two three four five six seven eight"
PROMPT_TOKENS = 8  # as the mock server counts them
ANSWERS_S = 30.0  # for what is open at the end
ADMIT = re.compile(rb"admit;dur=([0-9.]+)")
CODE = re.compile(rb'"code": ?"([a-z_]+)"')


class Asked(NamedTuple):
    """One request: whose, of how many tokens, when it was due and when it left."""

    tenant: str
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


def request_bytes(key: str, tokens: int) -> bytes:
    told = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True}
    body = json.dumps({**told, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Stream(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: "TenantLoad", asked: Asked, request: bytes) -> None:
        self._load, self.asked, self._request = load, asked, request
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
        if self._answer.startswith(b"HTTP/1.1 200"):
            if data.endswith(b"0\r\n\r\n"):
                self._end(200, self._answer)
            return
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        status = int(head[9:12]) if found else 0
        if status > 200 and len(body) >= content_length(head):
            self._end(status, head, body)

    def _end(self, status: int, head: bytes, body: bytes = b"") -> None:
        waited, code, asked = ADMIT.search(head), CODE.search(body), self.asked
        waited_ms = sum(float(found) for found in ADMIT.findall(head)) if waited else 0.0
        assert self._transport is not None
        if b"connection: close" in head.lower():
            transport, self._transport = self._transport, None
            transport.close()
        end = End(asked, time.monotonic(), status, code[1].decode() if code else "", waited_ms)
        self._load.ended(end, self if self._transport is not None else None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:  # not by us
            self._transport = None
            self._load.lost(self)


class TenantLoad:
    """Sends and writes down. on_end: called with each end."""

    def __init__(self, port: int, tenants: list[dict[str, Any]]) -> None:
        self._port, self._tenants, self._rng = port, tenants, random.Random(7)
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Stream] = deque()
        self._open: set[Stream] = set()
        self._connecting: set[asyncio.Task[Any]] = set()
        self._requests: dict[tuple[str, int], bytes] = {}
        self.ends: list[End] = []
        self.lags_ms: list[float] = []
        self.num_open = 0
        self.on_end = lambda: None

    def send(self, due_s: float) -> None:
        tenant = self._rng.choice(self._tenants)
        tokens = self._rng.randint(tenant["least"], tenant["most"])
        cached = self._requests.get((tenant["name"], tokens))
        request = cached or self._requests.setdefault((tenant["name"], tokens), request_bytes(tenant["key"], tokens))
        asked = Asked(tenant["name"], tokens, due_s, time.monotonic())
        self.lags_ms.append((asked.sent_s - due_s) * 1e3)
        self.num_open += 1
        if self._idle:
            stream = self._idle.pop()
            self._open.add(stream)
            stream.ask(asked, request)
            return
        stream = Stream(self, asked, request)
        self._open.add(stream)
        task = self._loop.create_task(self._connect(stream))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, stream: Stream) -> None:
        try:
            await self._loop.create_connection(lambda: stream, "127.0.0.1", self._port)
        except OSError:
            self.ended(End(stream.asked, time.monotonic(), 0, "no_connection", 0.0), None, stream)

    def ended(self, end: End, usable: Stream | None, gone: Stream | None = None) -> None:
        self.ends.append(end)
        self.num_open -= 1
        self._open.discard(usable or gone)  # type: ignore[arg-type]
        if usable is not None:
            self._idle.append(usable)
        self.on_end()

    def lost(self, stream: Stream) -> None:
        if stream in self._open:
            self.ended(End(stream.asked, time.monotonic(), 0, "cut", 0.0), None, stream)
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
        self.on_end = lambda: None if over.is_set() else self.send(time.monotonic())  # type: ignore[assignment]
        for _ in range(in_flight):
            self.send(time.monotonic())
        await over.wait()
        self.on_end = lambda: None


async def told_each_second(load: TenantLoad) -> None:
    begin_s = time.monotonic()
    while True:
        await asyncio.sleep(1)
        served = sum(end.status == 200 for end in load.ends)
        words = f"{time.monotonic() - begin_s:5.0f} s: {len(load.lags_ms)} sent, {served} served, {load.num_open} open"
        print(words, file=sys.stderr, flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    load, begin_s = TenantLoad(arguments.port, json.loads(arguments.tenants)), time.monotonic()
    telling = asyncio.create_task(told_each_second(load))
    if arguments.in_flight:
        await load.closed_loop(arguments.in_flight, arguments.seconds)
    else:
        await load.open_loop(arguments.per_s, arguments.seconds)
    end_s = time.monotonic()
    telling.cancel()
    while load.num_open and time.monotonic() < end_s + ANSWERS_S:  # what was sent counts, however late it is answered
        await asyncio.sleep(0.02)
    return figures_of(load, begin_s + arguments.warm_up, end_s)


def figures_of(load: TenantLoad, from_s: float, end_s: float) -> dict[str, Any]:
    """Counts ends within the window for rates and shares, and requests due in it for latencies."""
    window = [end for end in load.ends if from_s <= end.end_s <= end_s]
    due = [end for end in load.ends if from_s <= end.asked.due_s]
    tokens: Counter[str] = Counter()
    for end in window:
        if end.status == 200:
            tokens[end.asked.tenant] += end.asked.tokens + PROMPT_TOKENS
    refused = [end for end in due if end.status == 429]
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "sent": len(load.lags_ms),
        "sent_per_s": len([end for end in load.ends if from_s <= end.asked.sent_s <= end_s]) / (end_s - from_s),
        "unanswered": load.num_open,
        "statuses": dict(Counter(f"{end.status} {end.code}".strip() for end in load.ends)),
        "tokens": dict(tokens),
        "tokens_per_s": tokens.total() / (end_s - from_s),
        "output_tokens_per_s": sum(end.asked.tokens for end in window if end.status == 200) / (end_s - from_s),
        "refusals_per_s": sum(end.status == 429 for end in window) / (end_s - from_s),
        "refusal_ms": spread([(end.end_s - end.asked.sent_s) * 1e3 for end in refused]),
        "refusal_after_a_wait": sum(end.waited_ms > 0 for end in refused) / max(1, len(refused)),
        "sent_late_ms": spread(load.lags_ms),
        "tenants": {name: tenant_figures(ends) for name, ends in by_tenant(due).items()},
        "cpu_s": used.ru_utime + used.ru_stime,
    }


def by_tenant(ends: list[End]) -> dict[str, list[End]]:
    found: dict[str, list[End]] = defaultdict(list)
    for end in ends:
        found[end.asked.tenant].append(end)
    return dict(sorted(found.items()))


def tenant_figures(ends: list[End]) -> dict[str, Any]:
    served = [end for end in ends if end.status == 200]
    return {
        "served": len(served),
        "refused": sum(end.status == 429 for end in ends),
        "waited_ms": spread([end.waited_ms for end in served]),
        "e2e_ms": spread([(end.end_s - end.asked.sent_s) * 1e3 for end in served]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--tenants", required=True)
    parser.add_argument("--per-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=0.0)
    parser.add_argument("--in-flight", type=int, default=0)
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
