"""A key that asks for little and measures what it gets, in a process of its own.

    python -m benchmarks.scenarios.innocent_client PORT --seconds 10

At once, each again and again: two streams of 100 tokens, a short chat every 50 ms, and a chat held to a form that
nobody asked for before every 200 ms. Told are, in ms: ttft and gap (between chunks) of the streams, short and form
(from asking to the last byte), each with p50, p99 and max. failed: requests without a whole answer, by what they got.
late: how late this process's own loop was, which no server can be blamed for.
"""

import argparse
import asyncio
import json
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import aiohttp
import uvloop

from benchmarks.overload_client import spread
from benchmarks.scenarios.guarded import INNOCENT, MODEL

STREAMS, STREAM_TOKENS = 2, 100
SHORT_EVERY_S, FORM_EVERY_S, KNOCK_S = 0.05, 0.2, 0.005
WARM_UP_S = 1.0
PATIENCE_S = 60.0  # an answer that takes longer is a failed one
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Innocent:
    """took_ms: by what was measured; what came in the warm-up is left out."""

    def __init__(self, session: aiohttp.ClientSession, port: int, from_s: float) -> None:
        self._session, self._url, self._from_s = session, f"http://127.0.0.1:{port}", from_s
        self.took_ms: dict[str, list[float]] = defaultdict(list)
        self.failed, self.answered = Counter[str](), 0

    def _note(self, name: str, begin_s: float, end_s: float) -> None:
        if begin_s >= self._from_s:
            self.took_ms[name].append((end_s - begin_s) * 1e3)

    def _note_open(self, name: str, begin_s: float) -> None:
        """Count what is still awaited at the end, if it took longer than all that came."""
        now_s = time.monotonic()
        if (now_s - begin_s) * 1e3 > max(self.took_ms[name], default=0.0):
            self._note(name, max(begin_s, self._from_s), now_s)

    async def _ask(self, path: str, body: dict[str, Any], name: str) -> None:
        """Ask, and read the answer to its end. name: of its time; a stream's is that to its first chunk."""
        begin_s, is_stream = time.monotonic(), body.get("stream", False)
        headers, is_reading = {"Authorization": f"Bearer {INNOCENT}"}, False
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                self._session.post(self._url + path, json={"model": MODEL, **body}, headers=headers) as answer,
            ):
                is_reading = is_stream
                is_whole = await (self._read(answer, begin_s) if is_stream else _is_whole(answer))
                end = str(answer.status) if answer.status != 200 else "" if is_whole else "not whole"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            end = type(error).__name__
        except asyncio.CancelledError:
            if not is_reading:
                self._note_open(name, begin_s)
            raise
        if not is_stream:
            self._note(name, begin_s, time.monotonic())
        if end:
            self.failed[f"{name}: {end}"] += 1
            await asyncio.sleep(0.05)
        else:
            self.answered += 1

    async def _read(self, answer: aiohttp.ClientResponse, begin_s: float) -> bool:
        last_s, name, tail = begin_s, "ttft", b""
        try:
            async for data in answer.content.iter_any():
                if b"data: " in data:
                    now_s = time.monotonic()
                    self._note(name, last_s, now_s)
                    last_s, name = now_s, "gap"
                tail = (tail + data)[-64:]
        except asyncio.CancelledError:
            self._note_open(name, last_s)
            raise
        return b"[DONE]" in tail

    async def streams(self) -> None:
        body = {"prompt": "def read(path):\n", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        while True:
            await self._ask(COMPLETIONS, body, "ttft")

    async def shorts(self) -> None:
        while True:
            await self._ask(CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}, "short")
            await asyncio.sleep(SHORT_EVERY_S)

    async def forms(self) -> None:
        while True:
            form = {"guided_choice": [f"yes {time.monotonic_ns()}", "no"], "max_tokens": 3}
            await self._ask(COMPLETIONS, {"prompt": "x", **form}, "form")
            await asyncio.sleep(FORM_EVERY_S)

    async def knock(self) -> None:
        while True:
            due_s = time.monotonic() + KNOCK_S
            await asyncio.sleep(KNOCK_S)
            self._note("late", due_s, max(due_s, time.monotonic()))


async def _is_whole(answer: aiohttp.ClientResponse) -> bool:
    try:
        return answer.status != 200 or bool(json.loads(await answer.read())["choices"])
    except (ValueError, KeyError, TypeError):
        return False


async def innocent(port: int, seconds: float) -> dict[str, Any]:
    """Return what it got in so many seconds, after a warm-up."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = Innocent(session, port, time.monotonic() + WARM_UP_S)
        loops = [*(asking.streams() for _ in range(STREAMS)), asking.shorts(), asking.forms(), asking.knock()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        await asyncio.sleep(WARM_UP_S + seconds)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    took = {name: spread(values) for name, values in asking.took_ms.items()}
    return {**took, "failed": dict(asking.failed), "answered": asking.answered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(innocent(args.port, args.seconds))))


if __name__ == "__main__":
    main()
