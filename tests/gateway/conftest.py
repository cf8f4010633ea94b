"""A gateway in a process of its own, started by its command, in front of hostile upstreams and of our own server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

import forked
from benchmarks.server_process import free_port
from patience import until
from splittime.ledger.store import open_readonly

from .hostile import Hostile

VALKEY = shutil.which("valkey-server") or shutil.which("redis-server")
DEAD = "http://127.0.0.1:9"  # nobody listens there


def upstream(name: str, url: str, *models: str, **more) -> str:
    told = {"name": name, "url": url, "models": list(models or [name]), **more}
    return "[[upstream]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


def until_written(path: Path, request_id: str) -> None:
    """Wait for an account in a ledger file, which is written a while after it has closed."""

    def is_written() -> bool:
        file = open_readonly(path)
        try:
            return bool(file.account(request_id))
        finally:
            file.close()

    until(is_written)


class Gateway:
    """url: where it listens; shared: where others do too. Its accounts are read over HTTP, as anybody would."""

    def __init__(self, told: dict[str, str], process: forked.Command) -> None:
        self.url, self.shared, self.process = told["gateway"], told.get("shared"), process
        self.is_stopping = self.is_killed = False

    def stop(self) -> None:
        """Tell it to drain, once: a second signal would end it at once."""
        if not self.is_stopping:
            self.is_stopping = True
            self.process.terminate()

    def kill(self) -> None:
        """As `kill -9`: nothing is told to anybody."""
        self.is_stopping = self.is_killed = True
        self.process.kill()
        self.process.wait()

    def ask(self, model: str, headers=None, path="/v1/chat/completions", timeout_s=30.0, **body):
        """Returns status, headers and body of the answer."""
        told = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **body}
        data = body["raw"] if "raw" in body else json.dumps(told).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def get(self, path: str, key: str | None = None):
        asked = urllib.request.Request(self.url + path)
        if key is not None:
            asked.add_header("authorization", f"Bearer {key}")
        with urllib.request.urlopen(asked, timeout=30) as response:
            return json.load(response)

    def account(self, request_id: str, key: str | None = None, tries: int = 200):
        """The account as JSON; waits until it is closed."""
        for _ in range(tries):
            try:
                return self.get(f"/ledger/requests/{request_id}", key)
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                time.sleep(0.02)
        raise AssertionError(f"no account of {request_id}")


@contextmanager
def gateway_of(folder, text: str, constants: dict | None = None, **environment):
    """Start `splittime gateway` with this config; ends it with SIGTERM, which must end it well."""
    config = folder / "gateway.toml"
    config.write_text("port = 0\n" + text)
    command = ["gateway", "--config", str(config), "--json"]
    with open(folder / "words", "wb") as words:
        process = forked.Command(command, {**os.environ, **environment}, folder, None, words.fileno(), constants)
        try:
            told = process.stdout.readline()
            assert told, (folder / "words").read_text()
            gateway = Gateway(json.loads(told), process)
            yield gateway
            gateway.stop()
            assert process.wait(timeout=30) == (-9 if gateway.is_killed else 0), (folder / "words").read_text()
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


@contextmanager
def hostile_process(port: int = 0):
    """The same misbehaviour in a process of its own, to be stopped and killed; yields the process and its port."""
    command = [sys.executable, str(Path(__file__).with_name("hostile.py")), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="session")
def hostile():
    server = Hostile()
    yield server
    server.stop()


ONE_EACH = (
    *("fine", "broken", "away", "busy", "strict", "redirect", "lying", "garbage", "hangup", "dying", "polite"),
    *("lingering", "claiming", "slow", "halfopen", "stalling", "endless"),
)
SHORT = {"first_byte_s": 0.4, "between_s": 0.4, "total_s": 20.0}
SOON_SILENT = {"splittime.gateway.breaks:SILENT_S": 0.2}  # else ten times `first_byte_s`


@pytest.fixture(scope="session")
def gateway(hostile, tmp_path_factory):
    """One upstream for each way to misbehave, and pairs of them: model `away+fine` has both. Breakers are patient, so
    that one test does not close another's upstream."""
    text = "[breaker]\nfailures = 1000\nmax_backoff_s = 0.05\n[retries]\nspare = 1000\npause_s = 0.01\n"
    for name in ONE_EACH:
        more = SHORT | ({"total_s": 1.0} if name == "endless" else {})
        kind = {"kind": "splittime"} if name in ("claiming", "polite") else {}
        text += upstream(name, hostile.url(name), **more, **kind)
    text += upstream("dead", DEAD, **SHORT)
    for name in ("away", "hangup", "garbage", "busy", "broken", "lying", "dying"):
        pair = f"{name}+fine"
        text += upstream(f"{name}2", hostile.url(name), pair, **SHORT) + upstream(
            f"fine-after-{name}", hostile.url("second"), pair, **SHORT
        )
    text += upstream("dead2", DEAD, "dead+fine", **SHORT)
    text += upstream("fine-after-dead", hostile.url("second"), "dead+fine", **SHORT)
    with gateway_of(tmp_path_factory.mktemp("gateway"), text, SOON_SILENT) as started:
        yield started


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    """A server of Debian's package, on a port of its own."""
    if VALKEY is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    port = free_port()
    folder = str(tmp_path_factory.mktemp("valkey"))
    command = [VALKEY, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}"
        process.terminate()
