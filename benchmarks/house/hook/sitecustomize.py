"""Runs in each process of a server that `benchmarks.house.walk` watches: notes the tree's functions as they are first
called, while the walk's file says that a request is watched. From outside, so that any commit's tree can be walked.

One line a call: round, time, process, thread, file, function, and the file that called it (the nearest caller that is
in the tree; empty where it is the event loop or a thread's own start).
"""

import mmap
import os
import sys
import threading
import time
from types import FrameType

TREE = os.environ.get("HOUSE_WALK_TREE", "")
FOLDER = os.environ.get("HOUSE_WALK_FOLDER", "")


class Hook:
    def __init__(self) -> None:
        with open(os.path.join(FOLDER, "round"), "rb") as file:
            self.round = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        path = os.path.join(FOLDER, f"calls-{os.getpid()}")
        self.calls = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.seen: set[tuple[int, int, str, str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        number = self.round[0]
        if number and event == "call" and frame.f_code.co_filename.startswith(TREE):
            self.note(number, frame)

    def note(self, number: int, frame: FrameType) -> None:
        code = frame.f_code
        call = (number, threading.get_ident(), code.co_filename, code.co_qualname, caller(frame))
        if call not in self.seen:
            self.seen.add(call)
            fields = (number, time.monotonic_ns(), os.getpid(), *call[1:])
            os.write(self.calls, ("\t".join(map(str, fields)) + "\n").encode())


def caller(frame: FrameType) -> str:
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(TREE):
        above = above.f_back
    return above.f_code.co_filename if above is not None else ""


if TREE and FOLDER:
    hook = Hook()
    threading.setprofile(hook)
    sys.setprofile(hook)
