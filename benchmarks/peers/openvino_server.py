"""openvino-genai behind the least HTTP that a fair comparison allows: python -m benchmarks.peers.openvino_server FOLDER
THREADS PORT

POST /v1/completions with prompt (token ids) and max_tokens streams one server-sent event for each token with its text,
then one with the usage. One thread steps the continuous batching pipeline (as `contender_openvino.py` sets it up); the
event loop only writes. Every answer runs to max_tokens, greedy. Runs in the peer's own environment, with aiohttp.
"""

import asyncio
import json
import queue
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from aiohttp import web

from benchmarks.peers.contender_openvino import greedy, pipeline


@dataclass
class Answer:
    """A request on its way through the stepping thread; `texts` ends with None."""

    prompt: list[int]
    new_tokens: int
    texts: asyncio.Queue[str | None]
    handle: Any = None
    left: int = 0


class Stepper(threading.Thread):
    """Owns the pipeline: nobody else calls it."""

    def __init__(self, folder: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline(folder, threads)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._loop = loop
        self.arrivals: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._open: list[Answer] = []
        self._next_id = 0

    def run(self) -> None:
        while True:
            while not self._open or not self.arrivals.empty():
                self._take(self.arrivals.get())
            self._pipeline.step()
            for answer in self._open:
                self._pass_on(answer)
            self._open = [answer for answer in self._open if answer.left]

    def _take(self, answer: Answer) -> None:
        ids = ov.Tensor(np.array([answer.prompt], dtype=np.int64))
        answer.handle = self._pipeline.add_request(self._next_id, ids, greedy(answer.new_tokens))
        answer.left = answer.new_tokens
        self._next_id += 1
        self._open.append(answer)

    def _pass_on(self, answer: Answer) -> None:
        if not answer.handle.can_read():
            return
        for output in answer.handle.read().values():
            answer.left -= len(output.generated_ids)
            text = self._tokenizer.decode(list(output.generated_ids))
            self._loop.call_soon_threadsafe(answer.texts.put_nowait, text)
        if not answer.left:
            self._loop.call_soon_threadsafe(answer.texts.put_nowait, None)


async def application(folder: str, threads: int) -> web.Application:
    stepper = Stepper(folder, threads, asyncio.get_running_loop())
    stepper.start()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = Answer(body["prompt"], body["max_tokens"], asyncio.Queue())
        stepper.arrivals.put(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while (text := await answer.texts.get()) is not None:
            await response.write(_event({"choices": [{"index": 0, "text": text}]}))
        await response.write(_event({"choices": [], "usage": {"completion_tokens": answer.new_tokens}}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    made = web.Application()
    made.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
    return made


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


if __name__ == "__main__":
    web.run_app(application(sys.argv[1], int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[3]), print=None)
