"""A start in the background is lowered with its threads and children, comes back, and lowers nothing that could not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splittime.core import background
from splittime.core.background import AUTOGROUP, MARK, NICER

SCRIPT = """
import ctypes, os, subprocess, sys, threading
from pathlib import Path
from splittime.core import background

def tell(child):
    threads = os.listdir("/proc/self/task")
    found = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in (*threads, child.pid)}
    share = Path(background.AUTOGROUP).read_text().split()[-1] if Path(background.AUTOGROUP).exists() else ""
    print(*found, share or "-", "marked" if background.MARK in os.environ else "plain")

user = int(sys.argv[1])
if user != os.getuid():
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: what became another user's does not own its files in /proc
background.enter()
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
tell(child)
background.leave()
tell(child)
child.kill()
"""
NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="niceness of a thread is Linux's")
@pytest.mark.parametrize(
    ("user", "may_raise"),
    [
        pytest.param(os.getuid(), None, id="who runs this"),
        pytest.param(NOBODY, False, id="nobody", marks=NEEDS_ROOT),
    ],
)
def test_what_is_lowered_is_raised_again(user, may_raise) -> None:
    command = [sys.executable, "-c", SCRIPT, str(user)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert run.returncode == 0, run.stderr
    lowered, raised = (line.split() for line in run.stdout.splitlines())
    plain, low = os.nice(0), min(19, os.nice(0) + NICER)
    shares = (str(NICER), "0") if Path(AUTOGROUP).exists() else ("-", "-")
    expected = {may_raise} if may_raise is not None else {True, False}
    assert lowered in [[str(low if may else plain), shares[0], "marked"] for may in expected]
    assert raised == [str(plain), shares[1], "plain"]


def test_who_did_not_enter_leaves_nothing(monkeypatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(background, "_set_share", lambda niceness: pytest.fail("a share was set"))
    background.leave()
