"""Upstreams that are killed, stopped and started again, a gateway that is killed, and a wall clock that steps."""

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from patience import until
from splittime.ledger.account_json import account_from_json

from .conftest import SHORT, SOON_SILENT, gateway_of, hostile_process, upstream
from .test_chaos import QUICK, breakers, kept, sums
from .test_endings import assert_nothing_is_left, send
from .test_relay import events


def both(first: int, second: int, **more) -> str:
    text = "[breaker]\nfailures = 2\nopen_s = 0.5\n[retries]\nspare = 1000\npause_s = 0.01\n"
    for name, port in (("first", first), ("second", second)):
        text += upstream(name, f"http://127.0.0.1:{port}/fine", "fine", **SHORT, **more)
    return text + upstream(
        "first-endless", f"http://127.0.0.1:{first}/endless", "endless", **QUICK | {"between_s": 20.0}
    )


def streams(gateway, number: int):
    return [send(gateway, "endless", stream=True) for _ in range(number)]


def begun(connection: socket.socket) -> http.client.HTTPResponse:
    """The answer on this socket, of which the first token is there."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert b"tick" in answer.readline() + answer.readline()
    return answer


@contextmanager
def two_of_us(folder):
    """Yields the process of the first upstream, its port, and the gateway in front of both."""
    with (
        hostile_process() as (first, port),
        hostile_process() as (_, other),
        gateway_of(folder, both(port, other), SOON_SILENT) as gateway,
    ):
        yield first, port, gateway


def test_a_killed_upstream_ends_its_streams_and_no_others(tmp_path):
    with two_of_us(tmp_path) as (first, port, gateway):
        open_ones = [(request_id, begun(c)) for request_id, c in streams(gateway, 20)]
        first.kill()
        for request_id, answer in open_ones:
            told = events(answer.read())
            assert [json.loads(data)["error"]["code"] for data in told if b'"error"' in data] == ["upstream_died"]
            assert b'"error"' in told[-1]
            account = account_from_json(gateway.account(request_id))
            sums(account)
            assert (account.error.code, len(account.attempts)) == ("upstream_died", 1)
        assert [gateway.ask("fine", stream=True)[0] for _ in range(20)] == [200] * 20
        assert breakers(gateway)["first-endless"]
        with hostile_process(port):  # it comes back where it was
            deadline_s = time.monotonic() + 10
            while breakers(gateway)["first"] or breakers(gateway)["first-endless"]:
                assert time.monotonic() < deadline_s
                gateway.ask("fine")
                gateway.ask("endless", stream=True)
                time.sleep(0.05)


def test_a_process_that_hangs_is_half_open(tmp_path):
    """Stopped, it accepts and says nothing: the system answers for it."""
    with two_of_us(tmp_path) as (first, _, gateway):
        first.send_signal(signal.SIGSTOP)
        told = []
        for _ in range(12):
            request_id = uuid.uuid4().hex
            status, *_ = gateway.ask("fine", {"x-request-id": request_id})
            told.append((status, account_from_json(gateway.account(request_id))))
        first.send_signal(signal.SIGCONT)
        assert [status for status, _ in told] == [200] * 12
        failed = [attempt.error for _, account in told for attempt in account.attempts[:-1]]
        assert set(failed) == {"upstream_first_byte_timeout"}
        assert len(failed) <= 2 + 4  # its breaker opened after two, and let one try each half second
        for _, account in told:
            sums(account)


# ---- the gateway itself


@pytest.fixture(scope="module")
def stepping_clock(tmp_path_factory) -> str:
    """A library that steps the wall clock of who loads it."""
    made = tmp_path_factory.mktemp("clock") / "stepping_clock.so"
    source = Path(__file__).with_name("stepping_clock.c")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    return str(made)


def test_a_wall_clock_that_steps_changes_no_account(hostile, tmp_path, stepping_clock):
    """Of its stages no instant is the wall clock's; only the date of a request is."""
    text = upstream("fine", hostile.url("fine"), **SHORT) + upstream("slow", hostile.url("slow"), **SHORT)
    with gateway_of(tmp_path, text, LD_PRELOAD=stepping_clock) as gateway:
        dates, begin_s = set(), time.monotonic()
        while len(dates) < 2 or time.monotonic() - begin_s < 0.5:
            request_id = uuid.uuid4().hex
            sent_ns = time.monotonic_ns()
            status, *_ = gateway.ask("fine", {"x-request-id": request_id}, stream=True, pause_s=0.01)
            account = account_from_json(gateway.account(request_id))
            lasted_ns = time.monotonic_ns() - sent_ns  # a client may have the end before the gateway knows that it has
            sums(account)
            assert status == 200
            assert 0.05e9 < account.end_ns - account.start_ns <= lasted_ns
            dates.add(round((account.started_at_unix_ns / 1e9 - time.time()) / 3600))
        assert dates == {-1, 1}  # it did step
        assert gateway.ask("slow", stream=True)[0] == 504  # limits are neither cut short nor never met
        assert_nothing_is_left(gateway)


def test_a_killed_gateway_keeps_its_books(hostile, tmp_path):
    """`kill -9`, and a restart with the same ledger file: what was closed is there, once, and nothing half."""
    text = f'ledger_file = "{tmp_path}/ledger.sqlite"\n'
    text += upstream("fine", hostile.url("fine")) + upstream("endless", hostile.url("endless"))
    asked, seen = [], len(hostile.gone_s["endless"])
    with gateway_of(tmp_path, text) as gateway:
        open_ones = streams(gateway, 10)
        for _, connection in open_ones:
            assert connection.recv(65536)
        stop = threading.Event()
        asking = threading.Thread(target=keep_asking, args=(gateway, asked, stop))
        asking.start()
        until(lambda: len(kept_or_none(tmp_path / "ledger.sqlite")) >= 20)
        before = set(kept(tmp_path / "ledger.sqlite"))
        gateway.kill()
        stop.set()
        asking.join()
        for _, connection in open_ones:
            assert b"[DONE]" not in until_end(connection)
        until(lambda: len(hostile.gone_s["endless"]) >= seen + 10)  # the upstream is rid of them
    with gateway_of(tmp_path, text) as gateway:
        asked.append("after")
        assert gateway.ask("fine", {"x-request-id": "after"})[0] == 200
        assert_nothing_is_left(gateway)
    found = kept(tmp_path / "ledger.sqlite")
    assert before | {"after"} <= set(found) <= set(asked)
    for accounts in found.values():
        assert len(accounts) == 1
        sums(accounts[0])


def keep_asking(gateway, asked: list[str], stop: threading.Event) -> None:
    while not stop.is_set():
        asked.append(uuid.uuid4().hex)
        try:
            gateway.ask("fine", {"x-request-id": asked[-1]})
        except (OSError, ValueError, http.client.HTTPException):
            return


def kept_or_none(path: Path) -> dict[str, list]:
    return kept(path) if path.exists() else {}


def until_end(connection: socket.socket) -> bytes:
    pieces = []
    try:
        while data := connection.recv(65536):
            pieces.append(data)
    except ConnectionError:
        pass
    return b"".join(pieces)
