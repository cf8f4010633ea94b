"""The mock server keeps what it declares, as far as a busy machine lets it be looked at: order, counts, never early."""

import asyncio
import time

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.bench.book.records import Ending
from splittime.bench.mock_server import MODEL, MockConnection, MockServer, Timings, after
from splittime.core.errors import ConfigError
from tests.bench.test_client import ask, planned

MS = 1_000_000


class Watched(MockServer):
    """Keeps when each request arrived, from its start: a bound of what a client sees, however late the client looks."""

    def __init__(self, timings):
        super().__init__(timings)
        self.begin_ns = time.monotonic_ns()
        self.arrived_ns = []

    def arrive(self, answering, arrived_ns):
        self.arrived_ns.append(arrived_ns - self.begin_ns)
        super().arrive(answering, arrived_ns)


def served(timings, *requests, **options):
    async def main():
        async with Watched(timings) as server:
            return await ask(server.url, *requests, begin_ns=server.begin_ns, **options), server

    return asyncio.run(main())


@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
def test_no_chunk_comes_before_it_is_due(tokens_per_chunk):
    timings = Timings(ttft_ns=20 * MS, ttft_per_token_ns=MS, itl_ns=3 * MS, tokens_per_chunk=tokens_per_chunk)
    (outcome,), server = served(timings, planned(output_tokens=10))
    last_of_chunk = [min(k + tokens_per_chunk, 10) - 1 for k in range(0, 10, tokens_per_chunk)]
    for at_ns, token in zip(outcome.chunk_ns, last_of_chunk, strict=True):
        assert at_ns - server.arrived_ns[0] >= (20 + 3 + 3 * token) * MS
    assert sum(outcome.chunk_tokens) == 10


def test_requests_queue_for_slots():
    timings = Timings(ttft_ns=20 * MS, itl_ns=0, slots=1)
    outcomes, server = served(timings, *(planned(i, output_tokens=1) for i in range(4)), together=True)
    ends = sorted(outcome.end_ns for outcome in outcomes)
    assert server.most_in_service == 1
    for served_before, end_ns in enumerate(ends):
        assert end_ns - min(server.arrived_ns) >= (served_before + 1) * 20 * MS


def test_who_hangs_up_in_the_queue_takes_no_slot():
    timings = Timings(ttft_ns=60 * MS, itl_ns=0, slots=1)
    requests = [planned(0, output_tokens=1), planned(1, cancel_after_ns=10 * MS), planned(2, output_tokens=1)]
    outcomes, server = served(timings, *requests, together=True)
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETE, Ending.CANCELLED, Ending.COMPLETE]
    assert (server.in_service, len(server.waiting)) == (0, 0)


def test_buffered_chunks_come_together(monkeypatch):
    written, write = [], MockConnection.write

    def keep(self, data, is_last=False):
        written.append(data.count(b"data: {"))
        write(self, data, is_last)

    monkeypatch.setattr(MockConnection, "write", keep)
    (outcome,), _ = served(Timings(ttft_ns=MS, itl_ns=2 * MS, buffer_chunks=5), planned(output_tokens=10))
    assert [number for number in written if number] == [5, 5 + 1]  # and the usage
    assert len(set(outcome.chunk_ns)) <= 2, "on a busy machine both may be read at once"
    assert len(outcome.chunk_ns) == 10


def test_declared_errors():
    refused, _ = served(Timings(ttft_ns=0, error_rate=1.0), planned())
    assert refused[0].ending is Ending.REFUSED
    assert "told to fail" in refused[0].error
    broken, _ = served(Timings(ttft_ns=0, itl_ns=0, break_rate=1.0), planned(output_tokens=10))
    assert broken[0].ending is Ending.FAILED
    assert "told to break off" in broken[0].error
    assert 0 < len(broken[0].chunk_ns) < 10


def test_a_freeze_stops_time():
    timings = Timings(ttft_ns=10 * MS, itl_ns=10 * MS, freezes=((35 * MS, 200 * MS),))
    (outcome,), server = served(timings, planned(output_tokens=6))
    for at_ns, due_ms in zip(outcome.chunk_ns, (10, 20, 30, 240, 250, 260), strict=True):
        assert at_ns - server.arrived_ns[0] >= due_ms * MS


@given(
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), max_size=4),
)
def test_time_outside_freezes(begin_ns, duration_ns, gaps_and_lengths):
    """Against counting one nanosecond after the other."""
    freezes, at_ns = [], 0
    for gap, length in gaps_and_lengths:
        freezes.append((at_ns + gap, length))
        at_ns += gap + length
    left, now = duration_ns, begin_ns
    while True:
        frozen = next((b + n for b, n in freezes if b <= now < b + n), None)
        if frozen is not None and left >= 0 and (left > 0 or now >= begin_ns):
            now = frozen
            continue
        if left == 0:
            break
        now, left = now + 1, left - 1
    assert after(begin_ns, duration_ns, freezes) == now


async def test_what_it_says_of_itself():
    async with MockServer(Timings(ttft_ns=0, itl_ns=0)) as server, aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/v1/models") as response:
            models = await response.json()
        async with session.get(f"{server.url}/nothing") as response:
            missing = response.status
        async with session.get(f"{server.url}/stats") as response:
            assert (await response.json())["served"] == 0
        body = {"prompt": "a b c", "max_tokens": 2}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            whole = await response.json()
        async with session.post(f"{server.url}/v1/completions", data=b"{") as response:
            bad = response.status
    assert models["data"][0]["id"] == MODEL
    assert (missing, bad) == (404, 400)
    assert whole["usage"]["completion_tokens"] == 2
    assert whole["usage"]["prompt_tokens"] == 3


def test_what_cannot_be_declared_is_refused():
    for wrong in (Timings(ttft_ns=-1), Timings(tokens_per_chunk=0), Timings(error_rate=1.1), Timings(slots=0)):
        with pytest.raises(ConfigError):
            wrong.validate()


def test_it_measures_its_own_lateness():
    begin_ns = time.monotonic_ns()
    _, server = served(Timings(ttft_ns=MS, itl_ns=MS), planned(output_tokens=20))
    assert len(server.lateness_ns) == 20
    assert all(0 <= late < time.monotonic_ns() - begin_ns for late in server.lateness_ns)
