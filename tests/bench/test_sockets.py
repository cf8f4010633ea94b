"""Connections that cannot be had are refused before the load; what a mock server remembers has a bound."""

import resource
import subprocess
import sys

import pytest

from splittime.bench import event_loop, mock_server
from splittime.bench.share import LoadShare
from splittime.core.errors import ConfigError
from splittime.wire.target import RunOptions, Target
from tests.bench.test_run import at, carried_out, endings, schedule_of


def share(**fields):
    usual = {"jobs": (None,) * 1000, "concurrency": 50, "duration_ns": None, "targets": (Target(url="u"),)}
    return LoadShare(**{**usual, "kinds": (), "models": (), "run_id": "", "timeout_s": 1.0, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 50),
        ({"targets": (Target(url="a"), Target(url="b"))}, 100),
        ({"max_in_flight": 20}, 20),
        ({"jobs": (None,) * 7}, 7),
        ({"concurrency": None}, 0),
    ],
)
def test_how_many_a_closed_loop_needs(fields, expected):
    assert event_loop.at_most(share(**fields)) == expected


def test_who_does_not_fit_is_refused_with_two_ways_out(monkeypatch):
    monkeypatch.setattr(event_loop, "limit", lambda: 40 + event_loop.SPARE)
    event_loop.check([share(concurrency=40)])
    event_loop.check([share(concurrency=40), share(concurrency=40)])
    with pytest.raises(ConfigError, match=r"41 requests at a time .* may open 40 here") as refused:
        event_loop.check([share(concurrency=41), share(concurrency=40)])
    assert "ulimit -n 65" in refused.value.info.hint
    assert "--workers 3" in refused.value.info.hint
    assert (refused.value.info.value, refused.value.info.limit) == (41, 40)


def test_without_a_limit_everybody_fits(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    event_loop.check([share(concurrency=10**6, jobs=range(10**6))])


def test_nothing_is_sent_by_a_run_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(event_loop, "limit", lambda: 2 + event_loop.SPARE)
    for workers in (0, 1):
        with pytest.raises(ConfigError, match="may open 2 here"):
            carried_out(
                schedule_of(*(at(i, None) for i in range(9)), concurrency=3), options=RunOptions(workers=workers)
            )
    run, _ = carried_out(schedule_of(*(at(i, None) for i in range(4)), concurrency=2))
    assert set(endings(run)) == {"complete"}


HELD = """
import resource
from splittime.bench import event_loop
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
event_loop.allow()
print(resource.getrlimit(resource.RLIMIT_NOFILE), event_loop.limit())
"""


def test_the_limit_is_raised_as_far_as_it_may_be():
    said = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split("\n")[0] == "(200, 200) 200"


def test_a_mock_server_remembers_the_latest(monkeypatch):
    monkeypatch.setattr(mock_server, "MOST_KEPT", 10)
    _, (server,) = carried_out(schedule_of(*(at(i, i) for i in range(15))))
    assert (len(server.request_ids), len(server.lateness_ns), server.served) == (10, 10, 15)
