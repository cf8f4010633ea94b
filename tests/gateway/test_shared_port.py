"""Gateways at one port, in processes of which one is drained while they are asked all the time.

`tests/cluster/test_up.py` kills one.
"""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from benchmarks.server_process import free_port
from patience import until

from .conftest import gateway_of, upstream
from .test_command import run

NUM_CLIENTS = 3
TRIES = 3  # as many as OpenAI's client makes


def ask(url: str, model: str = "fine") -> int:
    """Returns the status of one request, on a connection of its own. Raises OSError where there is no answer."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}).encode()
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=20) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def tried_again(url: str) -> list[int]:
    """Returns what each try came to, 0 where there was no answer; the last is an answer, or the third."""
    told: list[int] = []
    while len(told) < TRIES and not (told and told[-1]):
        try:
            told.append(ask(url))
        except OSError:
            told.append(0)
    return told


@contextmanager
def asking(url: str):
    """Clients ask again and again until the block ends; yields what each request came to."""
    told, ending = [], threading.Event()

    def again() -> None:
        while not ending.is_set():
            told.append(tried_again(url))
            time.sleep(0.01)

    threads = [threading.Thread(target=again) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        ending.set()
        for thread in threads:
            thread.join()


def num_accounts(gateway) -> int:
    return len(gateway.get("/ledger/requests?limit=1000")["accounts"])


def test_a_gateway_that_drains_leaves_the_port_to_another(hostile, tmp_path):
    port = free_port()
    url, text = f"http://127.0.0.1:{port}", f"shared_port = {port}\n" + upstream("fine", hostile.url("fine"))
    for name in ("drained", "left"):
        (tmp_path / name).mkdir()
    with gateway_of(tmp_path / "drained", text) as drained, gateway_of(tmp_path / "left", text) as left:
        assert drained.shared == left.shared == url
        with asking(url) as told:
            until(lambda: num_accounts(drained) > 10 and num_accounts(left) > 10)
            drained.stop()
            assert drained.process.wait(timeout=20) == 0
            num_before = len(told)
            until(lambda: len(told) > num_before + 20)
        assert {tries[-1] for tries in told} == {200}
        assert not [tries for tries in told if 503 in tries], "it answers what it let in"
        assert sum(len(tries) > 1 for tries in told) <= NUM_CLIENTS, "at the most those who came as it left"
        tells_of_no_certain_gateway(url, left.url)


def tells_of_no_certain_gateway(shared: str, own: str) -> None:
    for path in ("/health", "/ready", "/v1/models"):
        assert get(shared + path)[0] == get(own + path)[0] == 200
    for path in ("/", "/metrics", "/stats", "/ledger/requests", "/ledger/facts", "/admin/config"):
        status, told = get(shared + path)
        assert status == 404
        assert "own port" in json.loads(told)["error"]["hint"]
        assert get(own + path)[0] == 200


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_shared_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, f"port = 0\nshared_port = {port}\n" + upstream("a", "http://127.0.0.1:8000", "m"))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "only gateways of one user share it" in done.stderr
