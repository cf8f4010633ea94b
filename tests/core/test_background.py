"""A start in the background is lowered with its threads and children, comes back, and lowers nothing that could not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splittime.core import background
from splittime.core.background import AUTOGROUP, MARK, NICER

SCRIPT = """
import ctypes, os, subprocess, sys, threading, time
from pathlib import Path
from splittime.core import background

def tell(child):
    threads = os.listdir("/proc/self/task")
    found = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in (*threads, child.pid)}
    share = Path(background.AUTOGROUP).read_text().split()[-1] if Path(background.AUTOGROUP).exists() else ""
    print(*found, share or "-", "marked" if background.MARK in os.environ else "plain")

user, leaves = int(sys.argv[1]), sys.argv[2] == "leaves"
if user != os.getuid():
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: what became another user's does not own its files in /proc
before = os.nice(0)
background.LONGEST_S = 60 if leaves else 1
background.enter()
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
tell(child)
if leaves:
    background.leave()
while os.getpriority(os.PRIO_PROCESS, child.pid) != before or background.MARK in os.environ:
    time.sleep(0.01)  # the child is raised last
tell(child)
child.kill()
"""
NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="niceness of a thread is Linux's")
@pytest.mark.parametrize(
    ("user", "how", "may_raise"),
    [
        pytest.param(os.getuid(), "leaves", None, id="who runs this"),
        pytest.param(os.getuid(), "is late", None, id="late"),
        pytest.param(NOBODY, "leaves", False, id="nobody", marks=NEEDS_ROOT),
    ],
)
def test_what_is_lowered_is_raised_again(user, how, may_raise) -> None:
    command = [sys.executable, "-c", SCRIPT, str(user), how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert run.returncode == 0, run.stderr
    lowered, raised = (line.split() for line in run.stdout.splitlines())
    plain, low = os.nice(0), min(19, os.nice(0) + NICER)
    shares = (str(NICER), "0") if Path(AUTOGROUP).exists() else ("-", "-")
    expected = {may_raise} if may_raise is not None else {True, False}
    assert how == "is late" or lowered in [[str(low if may else plain), shares[0], "marked"] for may in expected]
    assert raised == [str(plain), shares[1], "plain"]


def test_who_did_not_enter_leaves_nothing(monkeypatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(background, "_set_share", lambda niceness: pytest.fail("a share was set"))
    background.leave()
