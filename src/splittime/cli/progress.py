"""Bars for long work: drawn on a terminal; in a log a line every ten seconds, so that nobody takes work for a hang."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.progress import Progress, ProgressColumn, Task

from splittime.cli.options import talk

LINE_EVERY_S = 10.0


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


def count_words(task: Task) -> str:
    """The task's name, and how many of how many."""
    total = "" if task.total is None else f" of {task.total:,.0f}"
    return f"{task.description} {task.completed:,.0f}{total}"


def _tell(progress: Progress, words: Callable[[Task], str], over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        for task in progress.tasks:
            if not task.finished:
                progress.console.print(f"{words(task)}, {task.elapsed or 0:,.0f} s", markup=False)
