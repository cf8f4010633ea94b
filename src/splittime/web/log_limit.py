"""Log lines that any client can cause are few: a storm of bad requests must not fill a disk, or take the loop's time.

Of each kind (a logger and its message before the values are put in) `BURST` lines in `WINDOW_S` are written. How many
more there were is said in one line when the window ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable

BURST = 5
WINDOW_S = 10.0
LOGGERS = ("uvicorn.error", "splittime.server")


class LogWindow:
    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.num_written = self.num_left_out = 0


class LogLimit(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, str], LogWindow] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or hasattr(record, "num_left_out"):
            return True
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        window = self._windows.get(kind)
        if window is None or now_s - window.begin_s >= WINDOW_S:
            self._close(kind)
            window = self._windows[kind] = LogWindow(now_s)
        if window.num_written < BURST:
            window.num_written += 1
            return True
        window.num_left_out += 1
        if window.num_left_out == 1:
            _call_later(WINDOW_S - (now_s - window.begin_s), lambda: self._close(kind))
        return False

    def _close(self, kind: tuple[str, str]) -> None:
        """Close a window, and log how many lines it left out, if any."""
        window = self._windows.pop(kind, None)
        if window is not None and window.num_left_out:
            (name, text), more = kind, {"num_left_out": window.num_left_out}
            words = "%d more lines like %r were left out in %g s"
            logging.getLogger(name).warning(words, window.num_left_out, text, WINDOW_S, extra=more)


def _call_later(delay_s: float, work: Callable[[], None]) -> None:
    """In the event loop, if there is one here; else the next line of the kind closes the window."""
    try:
        asyncio.get_running_loop().call_later(delay_s, work)
    except RuntimeError:
        return


def install() -> None:
    """Add the filter to each logger, once a process, however many servers it makes."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, LogLimit) for each in logger.filters):
            logger.addFilter(LogLimit())
