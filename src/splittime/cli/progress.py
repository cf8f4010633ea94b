"""Bars for long work: drawn on a terminal; in a log a line every ten seconds, so that nobody takes work for a hang."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.progress import Progress, ProgressColumn, Task

from splittime.cli.options import talk

LINE_EVERY_S = 10.0
STARTING_EVERY_S = 1.0


@contextmanager
def bars(*columns: ProgressColumn, words: Callable[[Task], str]) -> Iterator[Progress]:
    """On standard error. words: what a log is told of a task that goes on."""
    console = talk()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        if console.is_terminal:
            yield progress
            return
        over = threading.Event()
        teller = threading.Thread(target=_tell, args=(progress, words, over), daemon=True)
        teller.start()
        try:
            yield progress
        finally:
            over.set()
            teller.join()


def doing(words: str) -> AbstractContextManager[object]:
    """A sign of life for what has no parts to count."""
    console = talk()
    if console.is_terminal:
        return console.status(words)
    console.print(words, markup=False)
    return nullcontext()


@contextmanager
def seconds_of(words: str) -> Iterator[Callable[[str], None]]:
    """A sign of life at once, and each second until it is over: on a terminal one line that changes, in a log a line
    each. Yields a function that changes the words."""
    console, begin_s, told = talk(), time.monotonic(), [words]
    over, shown = threading.Event(), console.status(words) if console.is_terminal else None

    def tell() -> None:
        while not over.wait(STARTING_EVERY_S):
            line = f"{told[0]}, {time.monotonic() - begin_s:.0f} s"
            shown.update(line) if shown is not None else console.print(line, markup=False)

    teller = threading.Thread(target=tell, daemon=True)
    if shown is None:
        console.print(words, markup=False)
    with shown or nullcontext():
        teller.start()
        try:
            yield lambda new: told.__setitem__(0, new)
        finally:
            over.set()
            teller.join()


def count_words(task: Task) -> str:
    """The task's name, and how many of how many."""
    total = "" if task.total is None else f" of {task.total:,.0f}"
    return f"{task.description} {task.completed:,.0f}{total}"


def _tell(progress: Progress, words: Callable[[Task], str], over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        for task in progress.tasks:
            if not task.finished:
                progress.console.print(f"{words(task)}, {task.elapsed or 0:,.0f} s", markup=False)
