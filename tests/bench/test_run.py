"""A schedule is carried out as drawn: when, in which order, on which server, and what became of all of it."""

import asyncio
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import until_async
from splittime.bench.book.records import Ending, Phase, load_run, save
from splittime.bench.mock_server import MockServer, Timings
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Planned, Schedule, jobs_of, split
from splittime.core.errors import ConfigError
from splittime.stats import saturation
from splittime.wire.target import Interleave, RunOptions, Target
from tests.bench.test_client import planned
from tests.bench.waiting import Gathering

MS = 1_000_000
QUICK = Timings(ttft_ns=5 * MS, itl_ns=MS)
WITHIN_S = 90.0  # a run that does not end fails by this, not by the time limit of all tests


def schedule_of(*requests, **fields):
    return Schedule(seed=1, requests=requests, **fields)


def at(index, at_ms, **fields):
    fields = {"output_tokens": 3, "prompt": (1, 2, 3), "expected_prompt_tokens": 3, **fields}
    return Planned(index=index, at_ns=None if at_ms is None else at_ms * MS, **fields)


def carried_out(schedule, *timings, options=None, on_progress=None, stop_when=None):
    """The run on these mock servers (timings stand for one), stopped when `stop_when` holds of the first; and they."""

    async def main():
        servers = [one if isinstance(one, MockServer) else MockServer(one) for one in timings or (QUICK,)]
        for server in servers:
            await server.start()
        stop = asyncio.Event()
        targets = [Target(url=server.url) for server in servers]
        running = asyncio.create_task(run_schedule(schedule, targets, options, on_progress, stop))
        try:
            if stop_when is not None:
                await until_async(lambda: running.done() or stop_when(servers[0]))
                stop.set()
            return await asyncio.wait_for(running, WITHIN_S), servers
        finally:
            for server in servers:
                await server.stop()

    return asyncio.run(main())


def endings(run, arm=0):
    return [outcome.ending for outcome in run.outcomes if outcome.arm == arm]


def test_a_run_is_whole(tmp_path):
    requests = [at(i, 10 * i, phase=Phase.WARM_UP if i < 5 else Phase.MEASURED) for i in range(20)]
    schedule = schedule_of(*requests, settings={"rate": 100})
    progress = []
    options = RunOptions(label="a", slo={"ttft_p99": 1e9}, sample_interval_s=0.02)
    run, _ = carried_out(schedule, options=options, on_progress=progress.append)
    assert endings(run) == [Ending.COMPLETE] * 20
    assert [o.intended_ns for o in run.outcomes] == [10 * i * MS for i in range(20)]
    assert len({o.request_id for o in run.outcomes}) == 20
    assert (run.measured_from_ns, run.measured_until_ns) == (50 * MS, 190 * MS + 1)
    assert (run.schedule_digest, run.seed, run.label) == (schedule.digest, 1, "a")
    assert run.settings == {"rate": 100}
    assert run.arms[0].kind == "mock"
    assert run.samples
    assert all(sample.in_flight >= 0 for sample in run.samples)
    assert progress[-1].ended <= 20
    assert {"loop_lag", "start_lag", "cpu", "sockets", "nodelay", "output_length"} <= {c.name for c in run.checks}
    save(run, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == run


def test_an_open_loop_does_not_wait_for_answers():
    """Nobody is answered before all have asked."""
    run, _ = carried_out(schedule_of(*(at(i, 5 * i) for i in range(30))), Gathering(30))
    assert endings(run) == [Ending.COMPLETE] * 30
    assert all(o.sent_ns >= o.intended_ns for o in run.outcomes)


def test_a_closed_loop_takes_the_next_when_the_last_has_ended():
    requests = [at(i, None) for i in range(12)]
    run, servers = carried_out(schedule_of(*requests, concurrency=3), Gathering(3, Timings(ttft_ns=20 * MS, itl_ns=0)))
    assert servers[0].most_in_service == 3
    assert endings(run) == [Ending.COMPLETE] * 12
    by_start = sorted(run.outcomes, key=lambda o: o.intended_ns)
    for earlier, later in zip(by_start, by_start[3:], strict=False):
        assert later.intended_ns >= min(o.end_ns for o in by_start[: by_start.index(later)] if o.end_ns) - MS
        assert earlier.intended_ns <= later.intended_ns
    assert run.measured_until_ns >= max(o.end_ns for o in run.outcomes)


def test_a_closed_loop_ends_by_the_clock():
    """A server that answers in 100 ms or later can be asked ten times a second at most, by each of the two."""
    requests = [at(i, None) for i in range(5000)]
    schedule = schedule_of(*requests, concurrency=2, duration_ns=1000 * MS)
    run, _ = carried_out(schedule, Timings(ttft_ns=100 * MS, itl_ns=0))
    assert 2 <= len(run.outcomes) <= 22
    assert {o.ending for o in run.outcomes} == {Ending.COMPLETE}
    assert all(o.intended_ns < 1000 * MS for o in run.outcomes)


def test_a_later_turn_waits_for_the_one_before_and_keeps_its_intended_start():
    """Expected to take 20 ms, it takes 100: the next turn is late, and that is counted."""
    turns = [
        at(0, 0, session=7, turn=0, expected_ns=20 * MS),
        at(1, None, session=7, turn=1, think_ns=30 * MS, expected_ns=20 * MS),
        at(2, None, session=7, turn=2, think_ns=0),
        at(3, 10),
    ]
    run, servers = carried_out(schedule_of(*turns), Timings(ttft_ns=100 * MS, itl_ns=0))
    first, second, third, other = run.outcomes
    assert (second.intended_ns, third.intended_ns) == (50 * MS, 70 * MS)
    assert second.picked_up_ns >= first.end_ns + 30 * MS
    assert third.picked_up_ns >= second.end_ns
    assert second.held_ns >= first.end_ns - 20 * MS - MS
    assert other.end_ns < second.end_ns  # who is in no session waits for nobody
    assert servers[0].most_in_service == 2
    assert next(check for check in run.checks if check.name == "held").voids is False


def test_a_quick_answer_does_not_bring_the_next_turn_forward():
    turns = [at(0, 0, session=1, expected_ns=480 * MS), at(1, None, session=1, turn=1, think_ns=20 * MS)]
    run, _ = carried_out(schedule_of(*turns), QUICK)
    first, second = run.outcomes
    assert second.intended_ns == 500 * MS
    assert second.picked_up_ns >= 500 * MS
    assert second.held_ns == 0 or first.end_ns > 480 * MS  # no quick answer, on a machine that stood still


def test_sessions_in_a_closed_loop():
    turns = [
        at(2 * s + turn, None, session=s, turn=turn, think_ns=10 * MS if turn else 0)
        for s in range(4)
        for turn in range(2)
    ]
    run, servers = carried_out(schedule_of(*turns, concurrency=2), Gathering(2, QUICK))
    assert endings(run) == [Ending.COMPLETE] * 8
    assert servers[0].most_in_service == 2
    for first, second in zip(run.outcomes[::2], run.outcomes[1::2], strict=True):
        assert second.picked_up_ns >= first.end_ns + 10 * MS


def test_a_cap_on_requests_in_flight_is_lateness():
    requests = [at(i, 0) for i in range(6)]
    options = RunOptions(max_in_flight=2)
    server = Gathering(2, Timings(ttft_ns=30 * MS, itl_ns=0))
    run, servers = carried_out(schedule_of(*requests), server, options=options)
    assert servers[0].most_in_service == 2
    assert max(o.held_ns for o in run.outcomes) >= 55 * MS
    assert max(o.sent_ns - o.intended_ns for o in run.outcomes) >= 55 * MS
    assert next(check for check in run.checks if check.name == "held").ok is False


def test_two_servers_get_the_same_requests_paired():
    run, servers = carried_out(schedule_of(*(at(i, 10 * i) for i in range(10))), QUICK, QUICK)
    assert [server.served for server in servers] == [10, 10]
    pairs = list(zip(run.measured(0), run.measured(1), strict=True))
    assert all((a.index, a.intended_ns) == (b.index, b.intended_ns) for a, b in pairs)
    first_places = [a.sent_ns < b.sent_ns for a, b in pairs]
    assert {True, False} == set(first_places)
    assert len(run.arms) == 2


def test_the_end_of_the_measured_ends_the_cool_down():
    """The measured one is answered when one of the cool-down is there; the other is due in ten minutes."""
    late = [at(i, at_ms, phase=Phase.COOL_DOWN, output_tokens=1_000_000) for i, at_ms in ((1, 10), (2, 600_000))]
    run, _ = carried_out(schedule_of(at(0, 0, output_tokens=50), *late), Gathering(2, QUICK))
    assert run.stopped is None
    assert endings(run) == [Ending.COMPLETE, Ending.CANCELLED, Ending.UNSENT]


def test_an_interrupted_run_keeps_what_was_measured():
    """It is stopped when the first has its answer and the second so much that it must have read of it."""
    requests = [at(0, 0), at(1, 10, output_tokens=1_000_000), at(2, 600_000)]
    run, _ = carried_out(schedule_of(*requests), stop_when=lambda server: len(server.lateness_ns) > 20)
    assert endings(run) == [Ending.COMPLETE, Ending.CANCELLED, Ending.UNSENT]
    assert run.stopped == "interrupted"
    assert "interrupted" in run.outcomes[1].error
    assert run.outcomes[1].chunk_ns
    assert run.outcomes[2].intended_ns == 600_000 * MS


def test_an_overloaded_run_is_stopped_if_asked(monkeypatch):
    """20 requests/s is what the server can; 60 are sent. (The test of it has tests of its own.)"""
    monkeypatch.setattr(saturation, "MIN_VALUES", 16)
    monkeypatch.setattr(saturation, "Judge", partial(saturation.Judge, first_look_s=3.0))
    requests = [at(i, i * 1000 // 60, output_tokens=1) for i in range(1200)]
    options = RunOptions(stop_on_saturation=True)
    run, _ = carried_out(schedule_of(*requests), Timings(ttft_ns=50 * MS, itl_ns=0, slots=1), options=options)
    assert run.stopped is not None
    assert "overloaded" in run.stopped
    assert run.outcomes[-1].ending is Ending.UNSENT
    assert len(run.outcomes) == 1200


def test_failures_do_not_end_a_run():
    requests = [at(i, 10 * i) for i in range(20)]
    run, _ = carried_out(schedule_of(*requests), Timings(ttft_ns=MS, itl_ns=MS, error_rate=0.5, seed=3))
    assert {Ending.COMPLETE, Ending.REFUSED} == set(endings(run))


@pytest.mark.parametrize(
    ("schedule", "options", "count"),
    [
        (schedule_of(), RunOptions(), 1),
        (schedule_of(at(0, None)), RunOptions(), 1),
        (schedule_of(at(0, 0, phase=Phase.WARM_UP)), RunOptions(), 1),
        (schedule_of(at(0, 0)), RunOptions(timeout_s=0), 1),
        (schedule_of(at(0, 0)), RunOptions(workers=-1), 1),
        (schedule_of(at(0, 0)), RunOptions(), 3),
        (schedule_of(at(0, None), concurrency=1), RunOptions(interleave=Interleave.BLOCKS), 2),
    ],
)
async def test_what_cannot_be_run_is_refused(schedule, options, count):
    with pytest.raises(ConfigError):
        await run_schedule(schedule, [Target(url="http://127.0.0.1:1")] * count, options)


INSTANTS = st.lists(st.integers(0, 100_000), min_size=1, max_size=30)


@given(INSTANTS, st.integers(1, 3), st.integers(1000, 30_000), st.sampled_from(Interleave), st.data())
def test_every_arm_gets_every_request_once(instants, arms, block_ns, interleave, data):
    requests = [
        msgspec.structs.replace(planned(i), at_ns=at_ns, session=data.draw(st.sampled_from([None, 1, 2])), turn=i)
        for i, at_ns in enumerate(instants)
    ]
    jobs = jobs_of(schedule_of(*requests), arms, interleave, block_ns)
    expected = sorted((i, arm) for i in range(len(requests)) for arm in range(arms))
    assert sorted((job.planned.index, job.arm) for job in jobs) == expected
    for workers in (1, 2, 3):
        parts = split(jobs, workers)
        assert sorted((job.planned.index, job.arm) for part in parts for job in part) == expected
        for session in (1, 2):
            assert sum(any(job.planned.session == session for job in part) for part in parts) <= 1
    if arms == 1:
        assert [job.at_ns for job in jobs] == sorted(instants)


@given(INSTANTS, st.integers(1000, 30_000))
def test_in_blocks_a_session_stays_together(instants, block_ns):
    """All turns are shifted by as much as the first."""
    requests = [
        msgspec.structs.replace(planned(i), at_ns=at_ns, session=1, turn=i) for i, at_ns in enumerate(sorted(instants))
    ]
    for arm in (0, 1):
        jobs = [job for job in jobs_of(schedule_of(*requests), 2, Interleave.BLOCKS, block_ns) if job.arm == arm]
        assert len({job.at_ns - job.planned.at_ns for job in jobs}) == 1


@given(INSTANTS, st.integers(1000, 30_000))
def test_in_blocks_the_arms_take_turns(instants, block_ns):
    requests = [msgspec.structs.replace(planned(i), at_ns=at_ns) for i, at_ns in enumerate(instants)]
    jobs = jobs_of(schedule_of(*requests), 2, Interleave.BLOCKS, block_ns)
    arm_of = {}
    for job in jobs:
        assert arm_of.setdefault(job.at_ns // block_ns, job.arm) == job.arm  # never both at once
        block = job.planned.at_ns // block_ns
        assert job.at_ns // block_ns in (2 * block, 2 * block + 1)
        assert job.at_ns % block_ns == job.planned.at_ns % block_ns
    assert all(arm_of.get(slot) in (None, (0, 1, 1, 0)[slot % 4]) for slot in arm_of)
