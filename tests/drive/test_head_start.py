"""An engine process that is started before its settings are known: who gets it, and that it never outlives a command
that did not take it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splittime.bench import own_server
from splittime.cluster import replica_process
from splittime.drive import head_start

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setattr(head_start, "WORKER", SLEEPS)
    head_start.begin()
    yield head_start._waiting
    head_start._end()
    head_start._begun = head_start._waiting = None


def test_the_first_that_asks_for_it_gets_it_and_the_next_gets_another(begun) -> None:
    first, second = head_start.take(SLEEPS), head_start.take(list(SLEEPS))
    assert first is begun
    assert second.process.pid != first.process.pid
    assert second.folder != first.folder
    for taken in (first, second):
        taken.process.kill()
        taken.process.wait()
        Path(taken.folder).rmdir()


def test_another_command_and_a_dead_one_get_a_new_process(begun) -> None:
    other = head_start.take((sys.executable, "-c", "pass"))
    assert other.process.pid != begun.process.pid
    begun.process.kill()
    begun.process.wait()
    successor = head_start.take(SLEEPS)
    assert successor.process.poll() is None
    successor.process.kill()
    for each in (other, successor):
        each.process.wait()
        Path(each.folder).rmdir()


COMMAND = """
import sys
from splittime.drive import head_start
head_start.WORKER = (sys.executable, "-c", "import time; time.sleep(600)")
begin = head_start.begin
def tell():
    begin()
    print(head_start._waiting.process.pid, head_start._waiting.folder, flush=True)
head_start.begin = tell
"""
SCRIPT = "from splittime.cli.entry import main\nmain()"

HELD_IMPORT = """
import sys, time, types
class Finalized:
    def __del__(self):
        print("finalized", flush=True)
        time.sleep(60)
def hold(name):
    if name != "app":
        raise AttributeError(name)
    if "taken" in sys.argv:
        head_start.take(head_start.WORKER)
    Finalized()
held = types.ModuleType("splittime.cli.main")
held.__getattr__ = hold
sys.modules[held.__name__] = held
"""


@pytest.mark.parametrize(
    ("words", "status", "is_begun"),
    [(("serve", "--port", "x"), 2, True), (("serve", "--help"), 0, False), (("config", "show"), 0, False)],
)
def test_a_command_that_serves_nothing_leaves_no_process(words, status, is_begun) -> None:
    run = _run(SCRIPT, *words)
    assert run.returncode == status, run.stderr
    told = run.stdout.split() if is_begun else []
    assert (len(told) == 2) is is_begun
    if told:
        assert not _is_alive(int(told[0]))
        assert not Path(told[1]).exists()


@pytest.mark.parametrize("whose", ["waiting", "taken"])
def test_sigterm_before_the_server_listens_for_it_leaves_no_process_and_no_folder(whose) -> None:
    """It comes within a finalizer, which no exception leaves."""
    command = [sys.executable, "-c", HELD_IMPORT + COMMAND + SCRIPT, "serve", whose]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        assert run.stdout.readline() == "finalized\n"
        run.terminate()
        assert run.wait(30) == 143
    assert not _is_alive(int(pid))
    assert not Path(folder).exists()


@pytest.mark.parametrize("module", [own_server, replica_process])
def test_servers_of_our_own_begin_so_too(module) -> None:
    run = _run(module.STARTED, str(os.getpid()), "serve", "--port", "x")
    assert run.returncode == 2, run.stderr
    assert len(run.stdout.split()) == 2


def _run(started: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", COMMAND + started, *words], capture_output=True, text=True, timeout=60)


def _is_alive(pid: int) -> bool:
    end_s = time.monotonic() + 5
    while time.monotonic() < end_s:
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if status == "Z":
            return False
        time.sleep(0.01)
    return True
