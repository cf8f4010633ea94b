"""A server on loopback that speaks as vLLM does, with slots to be counted: what it says of itself is true of it."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web

TOKEN_S = 0.006
CONFIG = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="4096"} 1.0'


class SmallVllm:
    """posts: how many generations it was asked for."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.posts = self.waiting = self.running = self.ended = 0
        self._room = asyncio.Condition()

    def metrics(self) -> str:
        labels = '{engine="0",model_name="m"}'
        told = {
            "num_requests_waiting": self.waiting,
            "num_requests_running": self.running,
            "kv_cache_usage_perc": 0.01 * self.running,
            "num_preemptions_total": 0,
            "admission_rejections_total": 0,
            "request_success_total": self.ended,
            "prompt_tokens_total": 8 * self.ended,
            "generation_tokens_total": 4 * self.ended,
        }
        return "\n".join([f"vllm:{name}{labels} {value}" for name, value in told.items()] + [CONFIG]) + "\n"

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.posts += 1
        self.waiting += 1
        async with self._room:
            await self._room.wait_for(lambda: self.running < self.slots)
            self.waiting, self.running = self.waiting - 1, self.running + 1
        try:
            return await self._stream(request, asked["max_tokens"])
        finally:
            async with self._room:
                self.running, self.ended = self.running - 1, self.ended + 1
                self._room.notify_all()

    async def _stream(self, request: web.Request, num_tokens: int) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        usage = {"prompt_tokens": 8, "completion_tokens": num_tokens}
        for place in range(num_tokens):
            await asyncio.sleep(TOKEN_S)
            is_last = place == num_tokens - 1
            choice = {"index": 0, "text": "a", "finish_reason": "length" if is_last else None}
            await answer.write(b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


@contextmanager
def small_vllm(slots: int):
    """Yields its address and itself; it runs in a thread of its own."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def begin() -> None:
        server = found["server"] = SmallVllm(slots)
        card = {"id": "m", "owned_by": "vllm", "max_model_len": 4096}
        app = web.Application()
        app.router.add_get("/v1/models", lambda _: _json({"object": "list", "data": [card]}))
        app.router.add_get("/version", lambda _: _json({"version": "0.32.0"}))
        app.router.add_get("/health", lambda _: _json({}))
        app.router.add_get("/metrics", lambda _: _text(server.metrics()))
        app.router.add_post("/v1/completions", server.generate)
        runner = found["runner"] = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found["url"] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()

    def serve() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield found["url"], found["server"]
    finally:
        asyncio.run_coroutine_threadsafe(found["runner"].cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


async def _json(value) -> web.Response:
    return web.json_response(value)


async def _text(text: str) -> web.Response:
    return web.Response(text=text)
