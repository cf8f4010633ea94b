"""Who had the processors: what this process and its children ran is its own, whoever else ran are the others."""

import os
import subprocess
import sys
import time

import pytest

from patience import until
from splittime.drive import host_time
from splittime.drive.host_time import MachineTime

BUSY_S = 0.4
BUSY = f"import time\nwhile time.process_time() < {BUSY_S}: pass"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}]); print('done', flush=True)"

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(host_time.machine_time() is None, reason="this system does not tell who ran"),
]


@pytest.fixture
def ran(monkeypatch):
    monkeypatch.setattr(host_time, "EVERY_NS", 0)
    return MachineTime()


def busy() -> None:
    until_s = time.process_time() + BUSY_S
    while time.process_time() < until_s:
        pass


def test_what_this_process_runs_is_its_own(ran):
    before = ran()
    busy()
    after = ran()
    assert after.server_ns - before.server_ns >= 0.9 * BUSY_S * 1e9


def test_what_its_descendants_run_is_its_own_too_while_they_live_and_after(ran):
    before = ran()
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD + "; input()"], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "done\n"
        alive = ran()
        child.communicate("\n")
    gone = ran()
    assert alive.server_ns - before.server_ns >= 0.9 * BUSY_S * 1e9
    assert gone.server_ns >= alive.server_ns


def test_what_others_run_is_theirs(ran, monkeypatch):
    """Its own child, told to be nobody's."""
    monkeypatch.setattr(host_time, "_tree", lambda pid: iter([pid]))
    before = ran()
    child = subprocess.Popen([sys.executable, "-c", BUSY + "\ninput()"], stdin=-1)
    busy()
    until(lambda: _ran_s(child.pid) >= 0.9 * BUSY_S)
    after = ran()
    child.communicate(b"\n")
    assert after.others_ns - before.others_ns >= 0.5 * BUSY_S * 1e9


def _ran_s(pid: int) -> float:
    return host_time._own_ticks(pid) / os.sysconf("SC_CLK_TCK")


def test_it_is_not_read_at_each_call(monkeypatch):
    monkeypatch.setattr(host_time, "EVERY_NS", 60 * 10**9)
    told = MachineTime()
    before = told()
    busy()
    assert told() is before


def test_a_process_that_has_ended_ran_nothing_more():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert host_time._own_ticks(child.pid) == 0


def test_a_system_that_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(host_time, "STAT", tmp_path / "none")
    assert host_time.machine_time() is None
    (tmp_path / "none").write_text("cpu  1 2 3\nintr 5\n")
    assert host_time.machine_time() is None


def test_a_reading_that_fails_tells_what_was_read_before(ran, monkeypatch, tmp_path):
    before = ran()
    monkeypatch.setattr(host_time, "STAT", tmp_path / "gone")
    busy()
    assert ran() == before
