"""A start in the background: until it calls `leave`, or for `LONGEST_S` where nothing is left, a process has what
others leave of the processors, and from then on as much as they. An engine's process leaves when it has imported what
it is made of, and its session with it; the threads of the server's process when that engine is ready.

Linux shares processors out among sessions (where it has autogroups), and within a session or a control group among
threads, by their niceness. A session may be raised again by whoever owns it; a thread only by who has the right to
(CAP_SYS_NICE, or RLIMIT_NICE). `enter` lowers what `leave` can raise, and nothing else. Where neither can be, as for a
user without rights in a container, a start is as any other.

What a start measures is measured after it has left.
"""

import os
import threading
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

NICER = 10  # a tenth of the weight of a thread that serves
RATHER_NICE = 5  # a third of it: what the engine has beside the server's loop
MARK = "ST_NICENESS"  # in the environment of those that are in the background: what to go back to, and SESSION's word
SESSION = "session"  # it was lowered, too
AUTOGROUP = "/proc/self/autogroup"
LONGEST_S = 20.0  # in the background: ten times what a start takes where a processor is idle
TRIES, PAUSE_S = 20, 0.1  # Linux lets a user change an autogroup so often


def enter() -> None:
    """Lower this process and those that it will start. Call it before there is another thread."""
    niceness = os.nice(0)
    is_own = os.getsid(0) == os.getpid()  # else it is others' session, too
    if is_own:
        _set_share(NICER)
    if _may_raise(niceness):
        os.nice(NICER)
    os.environ[MARK] = f"{niceness} {SESSION}" if is_own else str(niceness)
    late = threading.Timer(LONGEST_S, leave)
    late.daemon = True
    late.start()


def leave() -> None:
    """Raise all threads of this process and of those that it has started by as much, if one of `enter` began it. A
    child that is no longer as low has left by itself: the niceness of it and of its children is their own since."""
    told = os.environ.pop(MARK, "").split()
    if not told:
        return
    if SESSION in told:
        _set_share(0)
    own, raised = int(told[0]), set[int]()
    for _ in range(2):  # a thread that was not raised yet may have started one
        for thread in set(_threads(os.getpid(), min(19, own + NICER), raised)) - raised:
            raised.add(thread)
            with suppress(OSError):  # it has ended, or may not be raised, and so was not lowered
                os.setpriority(os.PRIO_PROCESS, thread, max(own, os.getpriority(os.PRIO_PROCESS, thread) - NICER))


def _set_share(niceness: int) -> None:
    """Set this session's share. Without autogroups there is no such file."""
    for _ in range(TRIES):
        try:
            if Path(AUTOGROUP).read_text().split()[-1:] != [str(niceness)]:
                Path(AUTOGROUP).write_text(str(niceness))
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return
        else:
            return


def _may_raise(niceness: int) -> bool:
    """Returns whether a thread that is lowered can be raised again: one that ends thereafter tries."""
    done: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness + 1)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
            done.append(True)

    trying = threading.Thread(target=attempt)
    trying.start()
    trying.join()
    return bool(done)


def _threads(pid: int, least: int = -20, raised: Container[int] = ()) -> Iterator[int]:
    """Yields the threads of a process and of its descendants of this niceness or more, or that were raised; of those
    that have just ended, some or none."""
    threads: list[str] = []
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        yield int(thread)
        for child in _children(pid, thread):
            with suppress(OSError):
                if child in raised or os.getpriority(os.PRIO_PROCESS, child) >= least:
                    yield from _threads(child, least, raised)


def _children(pid: int, thread: str) -> list[int]:
    """Returns the processes that a thread started: none if it has ended, or Linux tells none (CONFIG_PROC_CHILDREN)."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return []
