"""A request that is over is freed at once, by its reference counts: under ten times overload what waits for the garbage
collector piles up by the thousand, and whoever is refused while it runs waits for all of it."""

import asyncio
import gc
import json
import time
import tomllib
from collections import Counter

import pytest
import uvloop

from splittime.gateway.app import GatewayApp
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.fair_queue import QueuedRequest
from splittime.gateway.versions import GatewayVersions
from splittime.ledger.store import Ledger
from splittime.web.reading import SHORT_BYTES

from .conftest import DEAD, upstream

TIMES = 10
PATH = "/v1/completions"


def scope_of(body: bytes) -> dict:
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))]
    head = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
    return {**head, "http_version": "1.1", "scheme": "http", "extensions": {}}


async def asked(app: GatewayApp, leaves: bool = False, **fields) -> int:
    """Ask the application itself. Returns the status. leaves: when the answer has begun."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, **fields}).encode()
    waiting, told = [{"type": "http.request", "body": body, "more_body": False}], []
    is_left = asyncio.Event()

    async def receive():
        if waiting:
            return waiting.pop()
        await is_left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        told.append(message)
        if leaves:
            is_left.set()

    await app(scope_of(body), receive, send)
    return told[0]["status"]


def refused(app: GatewayApp) -> int:
    answer = app.at_once(scope_of(b"{}"))
    answer.on_written()
    return answer.status


async def fill(versions: GatewayVersions) -> None:
    """One waits, and no more may."""
    waiting = QueuedRequest("", "held", 9, (), None, asyncio.get_running_loop().create_future(), time.monotonic_ns())
    versions.current.queue.line_up(waiting, until_ns=time.monotonic_ns() + 10**12)


async def left_by(text: str, ask, status: int, before=None) -> Counter[str]:
    """Returns what `TIMES` requests leave for the collector, by type."""
    config = config_of(tomllib.loads(text))
    versions = GatewayVersions(config, secrets_of(config), Ledger())
    await versions.open()
    app = GatewayApp(versions)
    if before is not None:
        await before(versions)
    await ask(app)  # what is made once is made
    gc.collect()
    gc.disable()
    try:
        assert [await ask(app) for _ in range(TIMES)] == [status] * TIMES
        await asyncio.sleep(0.05)  # tasks that were cancelled have ended
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        own = [type(each) for each in gc.garbage if type(each).__module__.startswith("splittime")]
        return Counter(kind.__name__ for kind in own)  # `hostile` leaves what is asyncio's
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        await versions.close()
        await asyncio.sleep(0)  # its connections to upstreams are gone


def test_a_refusal_by_the_head_leaves_nothing_to_collect():
    async def ask(app):
        return refused(app)

    text = "[queue]\nmax_requests = 1\n" + upstream("held", "http://127.0.0.1:9", max_in_flight=0)
    left = uvloop.run(left_by(text, ask, 429, fill))
    assert max(left.values(), default=0) < TIMES, left


MORE = """
[queue]
max_wait_s = 0.02
[breaker]
failures = 1000
[retries]
pause_s = 0.001
[[cache_route]]
model = "kept"
"""


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("fine", {}, 200),
        ("fine", {"stream": True}, 200),
        ("strict", {}, 400),
        ("nobody", {}, 404),
        ("full", {}, 429),
        ("busy", {}, 429),
        ("kept", {"temperature": 0}, 200),
        ("fine", {"prompt": "x" * SHORT_BYTES, "max_tokens": "many"}, 400),  # read beside the event loop
        ("endless", {"stream": True, "leaves": True}, 200),
        ("mute", {}, 504),
        ("mute", {"stream": True}, 504),
        ("dying", {"stream": True, "pause_s": 0}, 200),
        ("hangup", {}, 502),
    ],
)
def test_a_request_that_is_over_leaves_nothing_to_collect(hostile, name, fields, status):
    async def ask(app):
        return await asked(app, model=name, **fields)

    text = MORE + upstream("fine", hostile.url("fine")) + upstream("strict", hostile.url("strict"))
    text += upstream("kept", hostile.url("fine")) + upstream("full", DEAD, max_in_flight=0)
    text += "".join(upstream(one, hostile.url(one)) for one in ("busy", "endless", "dying", "hangup"))
    text += upstream("mute", hostile.url("slow"), first_byte_s=0.02, whole_answer_s=0.02)
    left = uvloop.run(left_by(text, ask, status))
    assert max(left.values(), default=0) < TIMES, left
