"""A Ray Serve application that passes requests on to servers: what stands in front of them is Serve's own proxy.

A piece of an answer is given on as it comes.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from splittime.cluster.ray_places import RayHead

PASSED_ON = ("content-type", "accept")


class PassingOn:
    """One replica of the application. urls: of the servers, which it asks in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = itertools.cycle(urls)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = next(self._urls) + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await self._session.request(request.method, url, data=await request.body(), headers=headers)
        kind = answer.headers.get("content-type")
        return StreamingResponse(pieces(answer), status_code=answer.status, media_type=kind)


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in answer.content.iter_any():
        yield piece
    answer.release()


@contextmanager
def serving(port: int, say: Callable[[str], None]) -> Iterator[Callable[[Sequence[str]], str]]:
    """Gives what puts the application in front of these servers, and returns its address; called again, in front of
    others. A Ray of its own is started for it, and ended."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        head = RayHead(Path(folder))
        stack.callback(head.end, lambda: False)
        address = head.start(say, lambda: False)
        import ray  # reads what `start` left in the environment
        from ray import serve

        stack.callback(ray.shutdown)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield lambda urls: _run(urls, port)


def _run(urls: Sequence[str], port: int) -> str:
    from ray import serve

    options = {"num_replicas": len(urls), "max_ongoing_requests": 1024, "ray_actor_options": {"num_cpus": 0.1}}
    serve.run(serve.deployment(**options)(PassingOn).bind(list(urls)), logging_config={"enable_access_log": False})
    return f"http://127.0.0.1:{port}"
