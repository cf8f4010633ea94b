"""Connections that say nothing shut nobody out: those of a server that is full give way."""

import socket

import pytest

from patience import until
from splittime.web import serving
from splittime.web.connection import Places

from .conftest import say
from .test_endings import connect

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def full(launch, monkeypatch):
    monkeypatch.setattr(serving, "places_of_process", lambda: Places(6))
    return launch(say("hello"), config={"api_key": ("k",)})


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def ask(client: socket.socket, key: str) -> bytes:
    client.settimeout(60)
    client.sendall(f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    return client.recv(4096)


def test_silent_connections_give_way_and_those_with_a_key_stay(full) -> None:
    until(lambda: not full.server.server_state.connections)  # that of the launch
    known, stranger = connect(full), connect(full)
    assert ask(known, "k").startswith(b"HTTP/1.1 200")
    assert ask(stranger, "wrong").startswith(b"HTTP/1.1 401")
    silent = [connect(full) for _ in range(20)]
    until(lambda: sum(map(is_open, silent)) <= 5)
    assert full.post("/v1/completions", {"prompt": "x"}, KEY)[0] == 200
    assert not is_open(stranger)
    assert is_open(silent[-1])
    assert is_open(known)
    assert ask(known, "k").startswith(b"HTTP/1.1 200")
    for one in (known, stranger, *silent):
        one.close()
    until(lambda: not full.server.server_state.connections)


def test_who_is_at_work_keeps_its_place(full) -> None:
    at_work = connect(full)
    at_work.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\ncontent-length: 14\r\n\r\n"
    )
    until(lambda: full.service.num_open == 1)
    others = [connect(full) for _ in range(20)]
    until(lambda: sum(map(is_open, others)) <= 5)
    at_work.settimeout(60)
    at_work.sendall(b'{"prompt":"x"}')
    assert at_work.recv(4096).startswith(b"HTTP/1.1 200")
    for one in (at_work, *others):
        one.close()
