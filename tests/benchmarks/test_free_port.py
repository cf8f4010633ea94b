"""The ports that tests and benchmarks give to servers which are about to start."""

import multiprocessing
import socket

import pytest

from benchmarks import server_process
from benchmarks.server_process import PORTS, free_port


def test_none_is_given_twice_and_those_in_a_row_can_all_be_served_on(monkeypatch):
    monkeypatch.setattr(server_process, "PORTS", (PORTS[0], PORTS[0] + 40))
    monkeypatch.setattr(server_process, "_KEPT", [])
    first = {free_port(2) for _ in range(5)}
    given = sorted(first | {port + 1 for port in first})
    assert len(given) == 10
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(can_be_given, given) == [False] * 10, "another process gets none of them"
    for port in given:
        socket.create_server(("127.0.0.1", port)).close()


def can_be_given(port):
    server_process.PORTS = (port, port + 2)
    try:
        return free_port() == port
    except OSError:
        return False


def test_one_that_is_served_on_is_not_given(monkeypatch):
    monkeypatch.setattr(server_process, "_KEPT", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "PORTS", (port, port + 3))  # of two in a row, this one would be the first
        with pytest.raises(OSError, match="no 2 free ports in a row"):
            free_port(2)
