"""Several processes make one load: nothing is lost or sent twice, on one clock. (Deaths: `test_interruption`.)"""

import os

import pytest

from splittime.bench import workers
from splittime.bench.book.records import Ending
from splittime.bench.mock_server import Timings
from splittime.bench.schedule import Job
from splittime.bench.share import LoadCounts
from splittime.wire.target import RunOptions
from tests.bench.test_run import MS, at, carried_out, schedule_of
from tests.bench.waiting import Gathering

TWO = RunOptions(workers=2)


def test_two_processes_make_one_run():
    requests = [at(i, 10 * i) for i in range(40)]
    run, servers = carried_out(schedule_of(*requests), Timings(ttft_ns=20 * MS, itl_ns=MS), options=TWO)
    assert [o.index for o in run.outcomes] == list(range(40))
    assert {o.ending for o in run.outcomes} == {Ending.COMPLETE}
    assert {o.worker for o in run.outcomes} == {0, 1}
    assert sorted(servers[0].request_ids) == sorted(o.request_id for o in run.outcomes)
    assert all(o.sent_ns >= o.intended_ns == 10 * o.index * MS for o in run.outcomes)
    assert "2 client processes" in next(check for check in run.checks if check.name == "cpu").sentence


def test_concurrency_is_dealt_out():
    requests = [at(i, None) for i in range(12)]
    server = Gathering(3, Timings(ttft_ns=20 * MS, itl_ns=0))
    run, servers = carried_out(schedule_of(*requests, concurrency=3), server, options=TWO)
    assert servers[0].most_in_service == 3
    assert len(run.outcomes) == 12


def test_processes_are_stopped_together():
    requests = [at(i, 0, output_tokens=1_000_000) for i in range(4)] + [at(4 + i, 600_000) for i in range(2)]
    run, _ = carried_out(schedule_of(*requests), options=TWO, stop_when=lambda server: server.in_service == 4)
    assert [o.ending for o in run.outcomes] == [Ending.CANCELLED] * 4 + [Ending.UNSENT] * 2
    assert run.stopped == "interrupted"


@pytest.mark.parametrize(
    ("asked", "tokens", "cores", "expected"),
    [(3, 1, 1, 3), (None, 100, 8, 2), (None, 10, 8, 1), (None, 10_000, 4, 3), (None, 10_000, 1, 1), (0, 10_000, 8, 1)],
)
def test_how_many(asked, tokens, cores, expected, monkeypatch):
    """40 requests at 100/s of so many tokens."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    jobs = [Job(at(i, 10 * i, output_tokens=tokens), 0, 10 * i * MS) for i in range(40)]
    assert workers.num_workers(asked, jobs) == expected


def test_news_add_up():
    worker = workers.WorkerProcess(None)
    worker._counts.add(LoadCounts(begun=2, ended=1, in_flight=(3,), ttft_ns=[(1, 2)]))
    worker._counts.add(LoadCounts(begun=1, ended=1, in_flight=(1,), ttft_ns=[(3, 4)]))
    counts = worker.take_counts()
    assert (counts.begun, counts.ended, counts.in_flight, counts.ttft_ns) == (3, 2, (1,), [(1, 2), (3, 4)])
    assert (worker.take_counts().begun, worker.take_counts().in_flight) == (0, (1,))
