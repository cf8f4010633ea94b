"""Whatever ends a run early, what was measured is kept, no process is left, and the error says what happened."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from patience import until_async
from splittime.bench import run as run_module
from splittime.bench import servers, workers
from splittime.bench.book.records import Ending
from splittime.bench.event_loop import run_loop
from splittime.bench.mock_server import MockServer, Timings
from splittime.bench.run import run_schedule
from splittime.core.errors import EngineError
from splittime.wire.target import RunOptions, Target
from tests.bench.test_run import MS, at, endings, schedule_of

QUICK = Timings(ttft_ns=MS, itl_ns=MS)
HERE, TWO = RunOptions(), RunOptions(workers=2)
LONG = schedule_of(*(at(i, 0) for i in range(4)), *(at(4 + i, 600_000) for i in range(4)))  # the last in ten minutes


def _all_children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def children():
    """The processes that became this one's in the test, dead ones that nobody waited for too."""
    before = _all_children()
    return lambda: _all_children() - before


@pytest.fixture
def pids(monkeypatch):
    """Of the workers, by number, once each is ready."""
    found = {}
    prepare = workers.WorkerProcess.prepare

    async def noted(self):
        await prepare(self)
        found[self._share.worker] = self._process.pid

    monkeypatch.setattr(workers.WorkerProcess, "prepare", noted)
    return found


def interrupted(stop_when, schedule=LONG, options=HERE, timings=QUICK):
    """The run on a mock server, with `stop` set as soon as the condition on the server holds."""

    async def main():
        async with MockServer(timings) as server:
            stop = asyncio.Event()
            running = asyncio.create_task(run_schedule(schedule, [Target(url=server.url)], options, None, stop))
            if stop_when is not None:
                await until_async(lambda: stop_when(server))
            stop.set()
            return await running

    return run_loop(main())


@pytest.mark.parametrize("options", [HERE, TWO])
def test_before_the_load_nothing_was_measured(options, children):
    with pytest.raises(EngineError, match="interrupted before the load") as refused:
        interrupted(None, options=options)
    assert refused.value.info.code == "interrupted"
    assert children() == set()


@pytest.mark.parametrize("workers", [0, 2])
def test_while_the_load_is_prepared(workers, monkeypatch, children):
    """By who is not ready yet, and never will be."""
    stop = asyncio.Event()
    part = run_module.WorkerProcess if workers else run_module.Load
    prepare = part.prepare

    async def never_ready(self):
        await prepare(self)
        stop.set()
        await asyncio.Event().wait()

    async def main():
        async with MockServer(QUICK) as server, asyncio.timeout(60):
            await run_schedule(LONG, [Target(url=server.url)], RunOptions(workers=workers), None, stop)

    monkeypatch.setattr(part, "prepare", never_ready)
    with pytest.raises(EngineError, match="interrupted before the load"):
        run_loop(main())
    assert children() == set()


def test_while_a_server_keeps_silent_that_is_asked_who_it_is():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            stop = asyncio.Event()
            target = Target(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
            running = asyncio.create_task(run_schedule(LONG, [target], None, None, stop))
            await asyncio.to_thread(silent.accept)  # it has been asked
            stop.set()
            await running

    with pytest.raises(EngineError, match="interrupted before the load"):
        asyncio.run(main())


@pytest.mark.parametrize("options", [HERE, TWO])
def test_in_the_load_what_has_ended_is_kept(options, children):
    run = interrupted(lambda server: server.served >= 4, options=options)
    assert run.stopped == "interrupted"
    assert set(endings(run)[:4]) <= {Ending.COMPLETE, Ending.CANCELLED}
    assert endings(run)[4:] == [Ending.UNSENT] * 4
    assert len(run.arms[0].round_trip_ns) == 100, "asked after the load too"
    assert children() == set()


def closing(monkeypatch, close_arm, stop=None):
    """A run of one request with this in place of what asks the servers afterwards."""

    async def main():
        monkeypatch.setattr(servers, "close_arm", close_arm)
        async with MockServer(QUICK) as server:
            return await run_schedule(schedule_of(at(0, 0)), [Target(url=server.url)], None, None, stop)

    return asyncio.run(main())


def test_while_the_servers_are_asked_about_the_load_they_are_asked_no_more(monkeypatch):
    stop = asyncio.Event()

    async def never(*_):
        stop.set()
        await asyncio.Event().wait()

    run = closing(monkeypatch, never, stop)
    assert endings(run) == [Ending.COMPLETE]
    assert "interrupted" in run.arms[0].notes[-1]
    assert run.checks


async def test_a_stopped_run_waits_for_its_servers_but_not_for_long(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(run_module, "PATIENCE_S", 0.05)
    stop = asyncio.Event()
    monkeypatch.setattr(servers, "close_arm", never)
    async with MockServer(QUICK) as server:
        running = asyncio.create_task(run_schedule(LONG, [Target(url=server.url)], None, None, stop))
        await until_async(lambda: server.served >= 4)
        stop.set()
        run = await running
    assert "did not answer within 0.05 s" in run.arms[0].notes[-1]
    assert len(run.outcomes) == 8


def test_what_goes_wrong_after_the_load_takes_nothing_with_it(monkeypatch):
    async def broken(*_):
        raise RecursionError("a book of books of books")

    run = closing(monkeypatch, broken)
    assert endings(run) == [Ending.COMPLETE]
    assert "RecursionError: a book of books" in run.arms[0].notes[-1]


async def test_a_display_that_is_gone_does_not_end_a_run():
    shown = []

    def gone(progress):
        shown.append(progress)
        raise BrokenPipeError

    async with MockServer(Timings(ttft_ns=MS, itl_ns=100 * MS)) as server:
        schedule = schedule_of(at(0, 0, output_tokens=6))
        run, shown = await run_schedule(schedule, [Target(url=server.url)], None, gone), shown
    assert endings(run) == [Ending.COMPLETE]
    assert len(shown) == 1


# ---- a process dies


def test_a_worker_that_dies_ends_and_voids_the_run(pids, children):
    """The last request is due in ten minutes: the run ends because it can tell nothing any more."""

    async def main():
        async with MockServer(QUICK) as server:
            running = asyncio.create_task(run_schedule(LONG, [Target(url=server.url)], TWO))
            await until_async(lambda: server.served >= 4)
            os.kill(pids[1], signal.SIGKILL)
            return await running

    run = run_loop(main())
    assert run.is_void
    assert "worker 1 of the load died with status -9" in run.stopped
    assert [o.index for o in run.outcomes] == list(range(8))
    lost = [o for o in run.outcomes if o.index % 2 == 1]
    assert {o.ending for o in lost} == {Ending.UNSENT}
    assert all("not known" in o.error for o in lost)
    kept = [o.ending for o in run.outcomes if o.index % 2 == 0]
    assert set(kept[:2]) <= {Ending.COMPLETE, Ending.CANCELLED}
    assert kept[2:] == [Ending.UNSENT] * 2
    assert children() == set()


def test_a_worker_that_dies_before_the_begin_voids_the_run_too(monkeypatch, children):
    prepare = workers.WorkerProcess.prepare

    async def killed(self):
        await prepare(self)
        os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers.WorkerProcess, "prepare", killed)
    run = _run_of_two()
    assert run.is_void
    assert set(endings(run)) == {Ending.UNSENT}
    assert children() == set()


def _run_of_two():
    async def main():
        async with MockServer(QUICK) as server:
            return await run_schedule(LONG, [Target(url=server.url)], TWO)

    return run_loop(main())


def test_a_worker_that_cannot_start_is_an_error_with_a_way_out(monkeypatch, children):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="did not start: it ended with status 1") as refused:
        _run_of_two()
    assert "--workers 1" in refused.value.info.hint
    assert children() == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_leaves_the_stopping_to_the_run(pids, number):
    async def main():
        async with MockServer(QUICK) as server:
            stop = asyncio.Event()
            running = asyncio.create_task(run_schedule(LONG, [Target(url=server.url)], TWO, None, stop))
            await until_async(lambda: server.served >= 4)
            assert {os.getsid(pid) for pid in pids.values()} == set(pids.values()), "what is sent to us is not for them"
            for pid in pids.values():
                os.kill(pid, number)
            stop.set()
            return await running

    run = run_loop(main())
    assert run.stopped == "interrupted"
    assert not run.is_void or all(check.name != "workers" for check in run.checks)


def test_workers_end_with_the_run(tmp_path):
    """The run's process is killed: its workers see the end of their pipes, and say nothing."""
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, sys\n"
        "from splittime.bench import workers\n"
        "from splittime.bench.run import run_schedule\n"
        "from splittime.bench.schedule import load_schedule\n"
        "from splittime.wire.target import RunOptions, Target\n"
        "from pathlib import Path\n"
        "prepare = workers.WorkerProcess.prepare\n"
        "async def noted(self):\n"
        "    await prepare(self)\n"
        "    print(self._process.pid, flush=True)\n"
        "workers.WorkerProcess.prepare = noted\n"
        "schedule = load_schedule(Path(sys.argv[2]))\n"
        "asyncio.run(run_schedule(schedule, [Target(url=sys.argv[1])], RunOptions(workers=2)))\n"
    )
    from splittime.bench.schedule import save

    save(LONG, tmp_path / "s.jsonl")

    async def main():
        async with MockServer(QUICK) as server:
            process = await asyncio.create_subprocess_exec(
                workers.sys.executable, script, server.url, tmp_path / "s.jsonl", stdout=-1, stderr=-1
            )
            pids = [int(await process.stdout.readline()) for _ in range(2)]
            await until_async(lambda: server.served >= 4)
            process.kill()
            said = await process.stderr.read()  # until the last who holds it has ended
            await process.wait()
            await until_async(lambda: not any(_lives(pid) for pid in pids))
            return said

    assert b"Traceback" not in asyncio.run(main())


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- the server dies


async def test_a_server_that_dies_in_the_load_is_told_request_by_request():
    """It is stopped once two of four requests have their answers, and is not there for the turn after one of these."""
    answered = [at(i, 0, output_tokens=1) for i in range(2)]
    broken = [at(2, 0, output_tokens=1_000_000, session=1), at(3, 0, output_tokens=1_000_000)]
    schedule = schedule_of(*answered, *broken, at(4, None, session=1, turn=1))
    async with MockServer(QUICK) as server:
        running = asyncio.create_task(run_schedule(schedule, [Target(url=server.url)]))
        await until_async(lambda: server.served >= 2 and server.in_service == 2)
        await server.stop()
        run = await running
    assert endings(run)[:2] == [Ending.COMPLETE] * 2
    assert endings(run)[2:] == [Ending.FAILED] * 3
    assert "closed" in run.outcomes[2].error
    assert "cannot connect" in run.outcomes[4].error
    assert any("did not answer any more" in note for note in run.arms[0].notes)


BOTH = """
import asyncio, os, signal
from splittime.bench.event_loop import ENDING, interrupted, run_loop

async def main():
    stop = interrupted()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in SENT:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # all came, and none was handled yet
    await stop.wait()
    print("kept")

run_loop(main())
"""


@pytest.mark.parametrize(
    ("sent", "status", "told"), [("SIGINT", 0, "kept\n"), ("SIGTERM", 0, "kept\n"), ("SIGINT SIGTERM", -15, "")]
)
def test_the_second_signal_ends_the_program_also_at_the_instant_of_the_first(sent, status, told):
    """Python tells of a signal that came while it had a handler, and has none when its turn comes."""
    script = BOTH.replace("SENT", f"({''.join(f'signal.{name}, ' for name in sent.split())})")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, told, "")
