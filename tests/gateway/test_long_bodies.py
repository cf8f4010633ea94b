"""What the gateway makes of a long body is made beside its event loop: where the body is changed too."""

import asyncio
import json
import threading
import tomllib

import pytest

from splittime.gateway import resume, visit
from splittime.gateway.app import GatewayApp
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.degrade import Ladder
from splittime.gateway.versions import GatewayVersions
from splittime.ledger.store import Ledger
from splittime.web.reading import SHORT_BYTES

from .conftest import upstream
from .test_loop_time import asked

DEGRADING = """
[[degradation]]
name = "short"
enter_wait_s = 2
leave_wait_s = 1
max_tokens = 8
"""


def noted(monkeypatch, owner, name: str) -> list[str]:
    """Returns the names of the threads that do this from now on."""
    work, threads = getattr(owner, name), []

    def noting(*args):
        threads.append(threading.current_thread().name)
        return work(*args)

    monkeypatch.setattr(owner, name, noting)
    return threads


def status_of(text: str, body: dict) -> int:
    async def main() -> int:
        config = config_of(tomllib.loads(text))
        versions = GatewayVersions(config, secrets_of(config), Ledger())
        await versions.open()
        try:
            return await asked(GatewayApp(versions), "/v1/chat/completions", json.dumps(body).encode())
        finally:
            await versions.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("num_chars", "reader"), [(10, "MainThread"), (SHORT_BYTES, "reading-bodies_0")])
def test_a_long_body_is_read_and_changed_beside_the_loop(monkeypatch, hostile, num_chars: int, reader: str) -> None:
    read, lessened = noted(monkeypatch, resume, "body_of"), noted(monkeypatch, visit, "lesser")
    monkeypatch.setattr(Ladder, "observe", lambda ladder, at_ns: 1)
    body = {"model": "fine", "messages": [{"role": "user", "content": "x" * num_chars}], "stream": True}
    assert status_of(DEGRADING + upstream("fine", hostile.url("fine"), resume=True), body) == 200
    assert (read, lessened) == ([reader], [reader])


def test_a_long_body_that_is_only_passed_on_is_read_once(monkeypatch, hostile) -> None:
    """Nobody waits in the line of readers for nothing."""
    forwards, read = noted(monkeypatch, visit, "forwarded"), noted(monkeypatch, resume, "body_of")
    body = {"model": "fine", "messages": [{"role": "user", "content": "x" * SHORT_BYTES}], "stream": True}
    assert status_of(upstream("fine", hostile.url("fine")), body) == 200
    assert (forwards, read) == (["reading-bodies_0"], [])
