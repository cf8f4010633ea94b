"""No body holds up the gateway's event loop, whatever stands in it."""

import asyncio
import tomllib

import msgspec
import pytest

from hostile_bodies import hostile_bodies
from loop_meter import TRIES, LoopMeter, is_too_long
from splittime.gateway.app import GatewayApp
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.versions import GatewayVersions
from splittime.ledger.store import Ledger

from .conftest import upstream

CONFIG = """
[retries]
pause_s = 0.001
[[cache_route]]
model = "fine"
[affinity]
"""
ROUTES = {
    "/v1/completions": lambda text: {"model": "fine", "prompt": text, "max_tokens": 1, "stream": True},
    "/v1/chat/completions": lambda text: {"model": "fine", "messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"model": "fine", "input": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {"model": "fine", "max_tokens": 1, "messages": [{"role": "user", "content": text}]},
    "/v1/embeddings": lambda text: {"model": "fine", "input": text},
    "/v1/rerank": lambda text: {"model": "fine", "query": "a", "documents": [text]},
}


async def asked(app: GatewayApp, path: str, body: bytes, method: str = "POST") -> int:
    """Ask the application itself. Returns the status."""
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))]
    head = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    waiting, told = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive():
        return waiting.pop() if waiting else await asyncio.Event().wait()

    async def send(message):
        told.append(message)

    await app({**head, "http_version": "1.1", "scheme": "http", "extensions": {}}, receive, send)
    return told[0]["status"]


async def too_long(text: str, path: str) -> dict[str, tuple[float, float]]:
    """Returns the longest turn of each body that costs too much, and how long the loop was kept from one, in ms."""
    config = config_of(tomllib.loads(text))
    versions = GatewayVersions(config, secrets_of(config), Ledger())
    await versions.open()
    app, meter, taken_ms = GatewayApp(versions), LoopMeter(asyncio.get_running_loop()), {}
    try:
        for name, body in hostile_bodies(ROUTES[path], only_worst=path != "/v1/responses").items():
            for _ in range(TRIES):
                await asked(app, path, b'{"model": "none"}')
                meter.begin()
                await asked(app, path, body)
                await asyncio.sleep(0.01)  # what goes on behind the answer
                taken_ms[name] = (meter.longest_ms(), meter.longest_kept_ms())
                if not is_too_long(*taken_ms[name]):
                    break
    finally:
        await versions.close()
    return {name: taken for name, taken in taken_ms.items() if is_too_long(*taken)}


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_holds_up_the_loop(hostile, path: str) -> None:
    assert asyncio.run(too_long(CONFIG + upstream("fine", hostile.url("fine"), resume=True), path)) == {}


async def turn_of_accounts(text: str) -> tuple[float, float]:
    """Returns the longest turn while one asks for accounts of many tokens, in ms, and how long the loop was kept."""
    config, ledger = config_of(tomllib.loads(text)), Ledger()
    versions = GatewayVersions(config, secrets_of(config), ledger)
    await versions.open()
    app, meter, taken_ms = GatewayApp(versions), LoopMeter(asyncio.get_running_loop()), (0.0, 0.0)
    told = tuple(range(10**15, 10**15 + 64_000))
    try:
        await asked(app, "/v1/completions", b'{"model": "fine", "prompt": "a"}')
        (one,) = ledger.accounts()
        ledger.add_account(msgspec.structs.replace(one, request_id="long", token_steps=told, token_ready_ns=told))
        for _ in range(TRIES):
            meter.begin()
            assert await asked(app, "/ledger/requests/long", b"", "GET") == 200
            taken_ms = (meter.longest_ms(), meter.longest_kept_ms())
            if not is_too_long(*taken_ms):
                break
    finally:
        await versions.close()
    return taken_ms


def test_the_account_of_a_long_answer_is_written_beside_the_loop(hostile) -> None:
    assert not is_too_long(*asyncio.run(turn_of_accounts(CONFIG + upstream("fine", hostile.url("fine")))))
