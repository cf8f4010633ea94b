"""Lines that any client can cause are few, and say how many were left out."""

import contextlib
import logging

import pytest

from patience import until, until_async
from splittime.web import serving

from .test_endings import connect

STORM = 60


def lines(caplog, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


@pytest.mark.parametrize(
    "bad",
    [b"\x00\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"],
    ids=["garbage", "websocket"],
)
def test_a_storm_of_bad_requests_is_a_few_lines(launch, caplog, monkeypatch, bad: bytes) -> None:
    monkeypatch.setattr(serving, "WINDOW_S", 1.0)
    server = launch()
    caplog.clear()
    for _ in range(STORM):
        with connect(server) as client, contextlib.suppress(OSError):
            client.sendall(bad)
            client.recv(100)
    until(lambda: any("left out" in line for line in lines(caplog, "uvicorn.error")))
    told = lines(caplog, "uvicorn.error")
    assert len(told) < STORM
    assert server.get("/health")[0] == 200


def test_failures_of_ours_are_told_as_sparingly(launch, caplog, monkeypatch) -> None:
    server = launch()
    monkeypatch.setattr(server.service.ledger, "account", lambda request_id: 1 / 0)
    for _ in range(STORM):
        assert server.get("/ledger/requests/x")[0] == 500
    assert len(lines(caplog, "splittime.server")) < STORM


def record(text: str = "bad", level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("splittime.test", level, "", 0, text, (), None)


def test_a_few_of_each_kind_in_a_window_and_then_the_count(monkeypatch, caplog) -> None:
    now = [100.0]
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    spare = serving.LogLimit()
    assert [spare.filter(record()) for _ in range(8)] == [True] * serving.BURST + [False] * 3
    assert spare.filter(record("another"))
    assert all(spare.filter(record("ready", logging.INFO)) for _ in range(20))
    now[0] += serving.WINDOW_S - 0.1
    assert not spare.filter(record())
    now[0] += 0.2
    assert spare.filter(record())
    assert lines(caplog, "splittime.test") == ["4 more lines like 'bad' were left out in 10 s"]
    now[0] += 2 * serving.WINDOW_S
    assert spare.filter(record())
    assert len(lines(caplog, "splittime.test")) == 1  # nothing was left out since


async def test_the_count_is_told_when_the_window_ends(monkeypatch, caplog) -> None:
    monkeypatch.setattr(serving, "WINDOW_S", 1.0)
    spare = serving.LogLimit()
    for _ in range(9):
        spare.filter(record())
    await until_async(lambda: lines(caplog, "splittime.test"))
    assert lines(caplog, "splittime.test") == ["4 more lines like 'bad' were left out in 1 s"]


def test_a_kind_is_spared_once_however_many_servers_there_are() -> None:
    serving.limit_log_lines()
    serving.limit_log_lines()
    for name in serving.LOGGERS:
        assert sum(isinstance(each, serving.LogLimit) for each in logging.getLogger(name).filters) == 1
