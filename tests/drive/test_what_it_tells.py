"""What an engine says of itself reaches its client: at the start, when it has measured, when a knob is turned, when it
has collected garbage, and from a successor again."""

import gc
import os
import signal
import threading
import time

import msgspec
import pytest
from test_process import collect, make_request, running_client, wait_until_ready

from benchmarks.fake_runner import FakeRunner
from patience import until_async
from splittime.core.clock import SystemClock, VirtualClock
from splittime.core.facts import Machine
from splittime.drive import host_time, loop
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.host_time import GcPauses
from splittime.drive.loop import Inbox, run_loop
from splittime.drive.messages import Measured, StepOutput, Submit
from splittime.drive.process import ProcessClient
from splittime.engine.engine import Engine
from splittime.ledger.account import Account
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

MACHINE = Machine(cpu="fake", threads=1, measured_at_unix_ns=7)


def test_nothing_is_known_before_the_engine_is_ready() -> None:
    assert ProcessClient(["none"], b"{}").facts() is None


async def test_facts_are_of_now() -> None:
    async with running_client(measures=True) as client:
        facts = client.facts()
        assert facts is not None
        assert facts.settings["block_size"] == 16
        assert facts.settings["max_num_seqs"] == SchedulerConfig().max_num_seqs  # the knob, not what was said first
        [crank] = facts.processes
        assert crank.name == "engine"
        assert crank.started_ns < (crank.ready_ns or 0) <= time.monotonic_ns()
        begins, ends = [part[1] for part in crank.start], [part[2] for part in crank.start]
        assert [*begins, crank.ready_ns] == [crank.started_ns, *ends]
        assert "import engine" in [part[0] for part in crank.start]
        await client.configure({"max_num_seqs": 3})
        assert client.facts().settings["max_num_seqs"] == 3
        await until_async(lambda: client.facts().machine == MACHINE)


async def test_a_successor_says_it_again() -> None:
    async with running_client(measures=True) as client:
        await until_async(lambda: client.facts().machine is not None)
        first = client.facts().process("engine")
        os.kill(client.pid, signal.SIGKILL)
        await until_async(lambda: not client.is_ready)
        await wait_until_ready(client)
        second = client.facts().process("engine")
        assert client.facts().machine == MACHINE  # it still holds
        assert (first.restarts, second.restarts) == (0, 1)
        assert second.started_ns > first.ready_ns


async def test_long_collections_reach_the_client() -> None:
    async with running_client(collects_garbage=True) as client:
        begin_ns = time.monotonic_ns()
        await collect(client, make_request("a", max_tokens=2))
        pauses = client.facts().process("engine").pauses
        assert pauses
        assert list(pauses) == sorted(set(pauses))  # each once
        assert all(begin_ns < at_ns < time.monotonic_ns() and ns >= host_time.LONG_NS for at_ns, ns in pauses)


def test_pauses_keep_the_latest_long_ones() -> None:
    clock = VirtualClock(100)
    pauses = GcPauses(clock)
    try:
        gc.disable()
        for number in range(host_time.MAX_KEPT + 10):
            pauses._on_gc("start", {})
            clock.advance(host_time.LONG_NS + number)
            pauses._on_gc("stop", {})
        kept = pauses.latest
        pauses._on_gc("start", {})
        clock.advance(host_time.LONG_NS - 1)
        pauses._on_gc("stop", {})
        assert pauses.latest is kept
        assert [ns - host_time.LONG_NS for _, ns in kept] == list(range(10, host_time.MAX_KEPT + 10))
        assert pauses.num_collections == host_time.MAX_KEPT + 11
    finally:
        gc.enable()
        pauses.close()


def test_a_collection_looks_at_little_at_a_time() -> None:
    """All wait for it, and it hardly ever finds anything."""
    thresholds, seen = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    host_time.freeze_heap()
    gc.callbacks.append(note)
    try:
        kept = [[] for _ in range(50_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) // 5_000 < len(seen)
    assert max(seen) < 15_000


def crank_that_measures(taken: list[int]) -> Crank:
    def pieces():
        for _ in range(3):
            taken.append(time.monotonic_ns())
            yield None
        yield MACHINE

    return Crank(EngineParts(Engine(Scheduler(SchedulerConfig())), FakeRunner(), measuring=pieces()), SystemClock())


@pytest.fixture
def in_a_loop():
    """Run the loop in a thread: (inbox, what it sent)."""
    inbox, threads = Inbox(), []

    def start(crank: Crank) -> tuple[Inbox, list]:
        sent: list = []
        threads.append(threading.Thread(target=run_loop, args=(crank, inbox, sent.append), daemon=True))
        threads[0].start()
        return inbox, sent

    yield start
    inbox.close()
    threads[0].join(60)


def test_measuring_waits_for_quiet_and_is_told_once(in_a_loop, monkeypatch) -> None:
    monkeypatch.setattr(loop, "QUIET_S", 0.02)
    taken: list[int] = []
    crank = crank_that_measures(taken)
    begin_ns = time.monotonic_ns()
    _, sent = in_a_loop(crank)
    deadline_s = time.monotonic() + 60
    while not any(isinstance(message, Measured) for message in sent) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert [message for message in sent if isinstance(message, Measured)] == [Measured(MACHINE)]
    gaps_ns = [after - before for before, after in zip([begin_ns, *taken], taken, strict=False)]
    assert min(gaps_ns) >= 0.02 * 1e9


def test_who_comes_during_a_piece_is_told_so_to_the_nanosecond() -> None:
    """The piece takes 40 of the clock's time, and the request comes 10 into it."""
    clock, inbox, sent = VirtualClock(100), Inbox(), []

    def pieces():
        clock.advance(10)
        inbox.put(Submit(msgspec.structs.replace(make_request("a", max_tokens=1), submitted_ns=105)), 110)
        clock.advance(30)
        yield None
        raise AssertionError("a request goes first")

    engine, runner = Engine(Scheduler(SchedulerConfig())), FakeRunner(clock=clock, step_ns=7)
    crank = Crank(EngineParts(engine, runner, measuring=pieces()), clock)

    def send(message) -> None:
        sent.append(message)
        inbox.close()

    run_loop(crank, inbox, send)
    account = Account("a", 105, Stage.HANDOFF)
    for news in sent[0].outputs:
        account.extend(news.marks)
    account.close(clock.now_ns())
    told = [(i.stage, i.cause, i.duration_ns) for i in account.intervals() if i.stage is Stage.QUEUE]
    assert told == [(Stage.QUEUE, Cause.MEASURING, 30)]
    assert sum(i.duration_ns for i in account.intervals()) == clock.now_ns() - 105


def test_a_request_goes_before_measuring(in_a_loop, monkeypatch) -> None:
    monkeypatch.setattr(loop, "QUIET_S", 60.0)
    taken: list[int] = []
    inbox, sent = in_a_loop(crank_that_measures(taken))
    inbox.put(Submit(make_request("a", max_tokens=3)), time.monotonic_ns())
    deadline_s = time.monotonic() + 50
    while not any(isinstance(m, StepOutput) and m.outputs and m.outputs[0].finish_reason for m in sent):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert taken == []
