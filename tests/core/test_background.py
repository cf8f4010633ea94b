"""A start in the background is lowered with its threads and children, comes back, and lowers nothing that could not."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from splittime.core import background
from splittime.core.background import AUTOGROUP, MARK, NICER

SCRIPT = """
import ctypes, os, subprocess, sys, threading
from pathlib import Path
from splittime.core import background

def niceness(thread):
    try:
        return os.getpriority(os.PRIO_PROCESS, int(thread))
    except ProcessLookupError:  # it has just ended
        return None

def tell(child):
    found = {niceness(thread) for thread in (*os.listdir("/proc/self/task"), child.pid)} - {None}
    share = Path(background.AUTOGROUP).read_text().split()[-1] if Path(background.AUTOGROUP).exists() else ""
    print(*found, share or "-", "marked" if background.MARK in os.environ else "plain")

user, leaves = int(sys.argv[1]), sys.argv[2] == "leaves"
if user != os.getuid():
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: what became another user's does not own its files in /proc
leave, told = background.leave, threading.Event()
background.leave = lambda: (told.wait(), leave())  # late, but not before it was told of
background.LONGEST_S = 60 if leaves else 0.1
background.enter()
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
tell(child)
told.set()
if leaves:
    leave()
else:
    [one.join() for one in threading.enumerate() if isinstance(one, threading.Timer)]
tell(child)
child.kill()
"""
RAISES = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) - 1)"
MAY_RAISE = subprocess.run([sys.executable, "-c", RAISES], stderr=subprocess.DEVNULL).returncode == 0
OTHERS = """
import subprocess, sys
from pathlib import Path
from splittime.core import background

background._set_share(5)
there_and_back = "from splittime.core.background import enter, leave; enter(); leave()"
subprocess.run([sys.executable, "-c", there_and_back], check=True)
print(Path(background.AUTOGROUP).read_text().split()[-1])
"""
NOBODY = 65534
NEEDS_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="niceness of a thread is Linux's")
NEEDS_ROOM = pytest.mark.skipif(
    not MAY_RAISE or os.nice(0) + NICER + 5 > 19, reason="no thread may be raised here, or there is no lower one"
)
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@NEEDS_LINUX
@pytest.mark.parametrize(
    ("user", "how", "may_raise"),
    [
        pytest.param(os.getuid(), "leaves", MAY_RAISE, id="who runs this"),
        pytest.param(os.getuid(), "is late", MAY_RAISE, id="late"),
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
    assert lowered == [str(low if may_raise else plain), shares[0], "marked"]
    assert raised == [str(plain), shares[1], "plain"]


NICE_CHILD = """
import os, subprocess
from splittime.core import background

background.enter()
child = subprocess.Popen(["nice", "-n", "5", "sleep", "60"])
while os.getpriority(os.PRIO_PROCESS, child.pid) == os.nice(0):
    pass
background.leave()
print(os.getpriority(os.PRIO_PROCESS, child.pid) - os.nice(0))
child.kill()
"""


@NEEDS_ROOM
def test_who_gives_way_to_its_parent_still_does() -> None:
    command = [sys.executable, "-c", NICE_CHILD]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert run.stdout == "5\n", run.stderr


LEFT_CHILD = """
import os, subprocess, sys, threading
from splittime.core import background

is_late, leave, told = sys.argv[1] == "late", background.leave, threading.Event()
background.leave, background.LONGEST_S = (lambda: (told.wait(), leave())), 0.1 if is_late else 60
background.enter()
left = subprocess.Popen(
    [sys.executable, "-c", "import os, subprocess, sys; from splittime.core import background as b; b.leave();"
     "os.nice(5); own = subprocess.Popen(['nice', '-n', '5', 'sleep', '60']); print(own.pid, flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
own = int(left.stdout.readline())
while os.getpriority(os.PRIO_PROCESS, own) - os.getpriority(os.PRIO_PROCESS, left.pid) < 5:
    pass
told.set()
[one.join() for one in threading.enumerate() if isinstance(one, threading.Timer)] if is_late else leave()
base = os.nice(0)
print(os.getpriority(os.PRIO_PROCESS, left.pid) - base, os.getpriority(os.PRIO_PROCESS, own) - base)
os.kill(own, 9)
left.communicate("")
"""


@NEEDS_ROOM
@pytest.mark.parametrize("when", ["ready", "late"])
def test_who_left_by_itself_is_raised_no_more_nor_what_it_started(when: str) -> None:
    """An engine leaves long before its server is ready, where a model takes long to load."""
    command = [sys.executable, "-c", LEFT_CHILD, when]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert run.stdout == "5 10\n", run.stderr


def test_who_did_not_enter_leaves_nothing(monkeypatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setattr(background, "_set_share", lambda niceness: pytest.fail("a share was set"))
    background.leave()


@pytest.mark.skipif(not Path(AUTOGROUP).exists(), reason="there are no autogroups here")
def test_the_share_of_a_session_of_others_is_left_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", OTHERS], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert run.stdout.split() == ["5"], run.stderr


@NEEDS_LINUX
def test_a_thread_that_ends_meanwhile_hides_no_other() -> None:
    ends = [threading.Event() for _ in range(3)]
    others = [threading.Thread(target=end.wait) for end in ends]
    for other in others:
        other.start()
    found, ended = [], None
    for thread in background._threads(os.getpid()):
        found.append(thread)
        place = next((place for place, other in enumerate(others) if other.native_id == thread), None)
        if ended is None and place is not None:
            ended = thread
            ends[place].set()
            while Path(f"/proc/self/task/{ended}").exists():
                time.sleep(0.01)
    for end in ends:
        end.set()
    assert {other.native_id for other in others} <= set(found)
