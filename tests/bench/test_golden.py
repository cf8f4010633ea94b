"""What is measured against what was declared: counts, order and definitions; and coordinated omission.

No bound here can be missed because the machine is busy: nothing may be early, the best of many must be near what was
declared, and the median request must be, where the machine would have to stand still for most of the time to spoil it.
`benchmarks/scenarios/bench_golden.py` measures how near all of them are.
"""

import pytest

from splittime.bench.book.records import Ending
from splittime.bench.mock_server import Timings
from splittime.wire.target import RunOptions
from tests.bench.test_run import MS, at, carried_out, schedule_of

pytestmark = pytest.mark.timing

FREEZE_MS = 2000


def test_counts_and_definitions_are_those_declared():
    """Each of the ten tokens is at its place: the best of 50 is less than half a gap late."""
    timings = Timings(ttft_ns=50 * MS, itl_ns=20 * MS)
    requests = [at(i, 20 * i, output_tokens=10) for i in range(50)]
    run, servers = carried_out(schedule_of(*requests), timings)
    assert [o.ending for o in run.outcomes] == [Ending.COMPLETE] * 50
    assert sorted(servers[0].request_ids) == sorted(o.request_id for o in run.outcomes)
    for o in run.outcomes:
        assert o.chunk_tokens == (1,) * 10
        assert list(o.chunk_ns) == sorted(o.chunk_ns)
    for k in range(10):
        assert -MS <= min(o.chunk_ns[k] - o.sent_ns - (50 + 20 * k) * MS for o in run.outcomes) < 10 * MS


def frozen(**options):
    """20 requests/s for 3 s at a server that stands still from second 0.5 to 2.5 and answers at once otherwise."""
    timings = Timings(ttft_ns=0, itl_ns=0, freezes=((500 * MS, FREEZE_MS * MS),))
    requests = [at(i, 50 * i, output_tokens=1) for i in range(60)]
    run, _ = carried_out(schedule_of(*requests), timings, **options)
    return run.outcomes


def test_an_open_loop_sees_the_whole_freeze():
    """Theory: who arrives t after the freeze's begin waits 2 s - t; so of 20 a second over 2 s, 40 wait, 1 s on
    average, and the response time's mean over 60 requests is 40 * 1 s / 60 = 0.67 s."""
    outcomes = frozen()
    begin_ns = outcomes[0].sent_ns  # the freeze counts from the first arrival
    errors_ms = {True: [], False: []}
    for o in outcomes:
        into_freeze_ms = (o.intended_ns - begin_ns) / MS - 500
        is_frozen = 0 <= into_freeze_ms < FREEZE_MS
        expected_ms = FREEZE_MS - into_freeze_ms if is_frozen else 0
        errors_ms[is_frozen].append((o.chunk_ns[0] - o.intended_ns) / MS - expected_ms)
    assert len(errors_ms[True]) >= 30
    assert min(errors_ms[True]) > -10
    assert all(sorted(errors)[len(errors) // 2] < 100 for errors in errors_ms.values())
    responses_ms = [(o.chunk_ns[0] - o.intended_ns) / MS for o in outcomes]
    assert sum(response > 250 for response in responses_ms) >= 30
    assert abs(sum(responses_ms) / len(responses_ms) - 40 * 1000 / 60) < 300


def test_a_closed_loop_sees_one_bad_request():
    """The same server but for 20 ms of work, one at a time: one request of 60 meets the freeze, and the median, the p90
    and the mean of the others know nothing of it."""
    timings = Timings(ttft_ns=20 * MS, itl_ns=0, freezes=((500 * MS, FREEZE_MS * MS),))
    run, _ = carried_out(schedule_of(*(at(i, None, output_tokens=1) for i in range(60)), concurrency=1), timings)
    slow = [o for o in run.outcomes if o.chunk_ns[0] - o.sent_ns > FREEZE_MS * MS // 2]
    assert len(slow) == 1
    responses_ms = sorted((o.chunk_ns[0] - o.intended_ns) / MS for o in run.outcomes)
    assert responses_ms[len(responses_ms) // 2] < 250


def test_the_two_clocks_differ_where_requests_are_held_back():
    """A cap of one in flight turns the freeze into lateness: service times hide it, response times do not."""
    outcomes = frozen(options=RunOptions(max_in_flight=1))
    service_ms = [(o.chunk_ns[0] - o.sent_ns) / MS for o in outcomes]
    response_ms = [(o.chunk_ns[0] - o.intended_ns) / MS for o in outcomes]
    assert sum(service > FREEZE_MS / 2 for service in service_ms) == 1
    assert sum(response > 250 for response in response_ms) >= 30
    assert sum(o.held_ns > 250 * MS for o in outcomes) >= 30
