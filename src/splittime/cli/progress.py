"""Bars for long work: drawn on a terminal; in a log a line every ten seconds, so that nobody takes work for a hang."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn

from splittime.cli.options import talk

LINE_EVERY_S = 10.0
BAR_COLUMNS = 24
NEARLY = 1 - 1e-9  # of a bar: a full one counts as ended, its clock stands still, and a log hears no more of it


class Say(Protocol):
    """Changes the words that are shown, and says what share of all is done."""

    def __call__(self, new: str, share: float | None = None) -> None: ...


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


@contextmanager
def loading(words: str, at_once: bool = False) -> Iterator[Say]:
    """A bar once it is told how much is done, else a sign of life; in a log a line now and then, or at once too."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(BAR_COLUMNS))
    with bars(*columns, TimeElapsedColumn(), words=lambda task: task.description) as progress:
        if at_once and not progress.console.is_terminal:
            progress.console.print(words, markup=False)
        bar = progress.add_task(words, total=None)

        def say(new: str, share: float | None = None) -> None:
            done = None if share is None else min(share, NEARLY)
            progress.update(bar, description=new, completed=done, total=None if share is None else 1.0)

        yield say


def count_words(task: Task) -> str:
    """The task's name, and how many of how many."""
    total = "" if task.total is None else f" of {task.total:,.0f}"
    return f"{task.description} {task.completed:,.0f}{total}"


def _tell(progress: Progress, words: Callable[[Task], str], over: threading.Event) -> None:
    while not over.wait(LINE_EVERY_S):
        for task in progress.tasks:
            if not task.finished:
                progress.console.print(f"{words(task)}, {task.elapsed or 0:,.0f} s", markup=False)
