"""Runs the tests in several processes: `pytest --forks 3`.

Everything is imported and collected once; each process is a fork of that, so the third one costs next to nothing. A
process asks for the next file when it comes to the last test of its own: what that file shares with the next is kept.
Where a process dies, its test has failed, and another one goes on with the rest of the file. What a file's tests leave
in the environment ends with the file, in one process too.
"""

import os
import signal
import socket
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

File = list[pytest.Item]
ENVIRONMENT = dict[str, str]()  # that of the tests, as they were collected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=1, metavar="N", help="run the tests in so many processes")


def pytest_collection_finish() -> None:
    ENVIRONMENT.update(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Take back what a file has left in the environment, when its last test has ended."""
    found = yield
    if (nextitem is None or nextitem.path != item.path) and os.environ != ENVIRONMENT:
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Give the files of tests to the processes, and pass on what they report."""
    config = session.config
    if config.getoption("forks") < 2 or config.option.collectonly or session.testsfailed:
        return None
    config._tmp_path_factory.getbasetemp()  # one for all of them
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    workers = [Worker(session, files) for _ in range(min(config.getoption("forks"), len(files)))]
    try:
        while workers and not (session.shouldfail or session.shouldstop):
            wait([one for worker in workers for one in (worker.connection, worker.ending)])
            for worker in list(workers):
                if not worker.hear():
                    workers.remove(worker)
                    worker.bury()
                    workers += [Worker(session, files)] if files else []
    finally:
        for worker in workers:
            worker.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Worker:
    """A process that runs tests, as the one that forked it sees it. Its messages: a report, a warning, or None, which
    asks for the next file."""

    def __init__(self, session: pytest.Session, files: deque[File]) -> None:
        self.session, self.files = session, files
        self.left = deque[pytest.Item]()  # what it has been given and not reported
        ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
        self.connection = ours
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _be_a_worker(session, theirs)
        theirs.close()
        self.ending = os.pidfd_open(self.pid)  # what it has forked may hold its end of the socket

    def hear(self) -> bool:
        """Take one message, if there is one. Returns False where the process has ended."""
        has_ended = bool(wait([self.ending], 0))  # asked first: what it sent before is still there to be read
        try:
            if not self.connection.poll():
                return not has_ended
            message = self.connection.recv()
        except (EOFError, OSError):
            return False
        if message is None:
            given = self.files.popleft() if self.files else []
            self.left += given
            with suppress(OSError):  # one that has died is heard of next
                self.connection.send([item.nodeid for item in given])
        else:
            self._pass_on(*message)
        return True

    def _pass_on(self, kind: str, told: dict[str, Any]) -> None:
        hook = self.session.config.hook
        if kind == "warning":
            record = warnings.WarningMessage(told.pop("text"), UserWarning, told.pop("filename"), told.pop("lineno"))
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": record, **told})
            return
        for data in told["reports"]:
            report = hook.pytest_report_from_serializable(config=self.session.config, data=data)
            if report.when == "teardown":
                assert self.left.popleft().nodeid == report.nodeid
            hook.pytest_runtest_logreport(report=report)

    def bury(self) -> None:
        """Tell how it ended of the test that it ran, and give back what it had been given."""
        status = self._wait()
        if not self.left:
            return
        died, *rest = self.left
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        text = f"the process that ran it ended: {how}"
        report = pytest.TestReport(died.nodeid, died.location, {}, "failed", text, "call", start=0, stop=0)
        self.session.config.hook.pytest_runtest_logreport(report=report)
        if rest:
            self.files.appendleft(rest)

    def end(self) -> None:
        """End it as Ctrl-C does, so that it ends what it has started; after ten seconds whatever it does."""
        os.kill(self.pid, signal.SIGINT)
        if not wait([self.ending], 10):
            os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.ending)
        self.connection.close()
        return status


class Teller:
    """Sends what the tests of this process come to: one message of each test, when it is over."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection
        self._reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
        if report.when == "teardown":
            self.connection.send(("report", {"reports": self._reports}))
            self._reports = []

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        told = {"when": when, "nodeid": nodeid, "location": location}
        where = {"filename": warning_message.filename, "lineno": warning_message.lineno}
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self.connection.send(("warning", {"text": text, **where, **told}))


def _be_a_worker(session: pytest.Session, connection: Connection) -> None:
    """Run what is given, and end the process."""
    status = 1
    try:
        config = session.config
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 -- until the process ends
        _capture_anew(config)
        config.pluginmanager.register(Teller(config, connection))
        for item, following in _given(session, connection):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the tests have started is ended first
        try:
            session._setupstate.teardown_exact(None)
        finally:
            os._exit(status)


def _capture_anew(config: pytest.Config) -> None:
    """Capture into files of this process: what a fork shares of a file is also where it stands in it."""
    manager = config.pluginmanager.getplugin("capturemanager")
    manager.stop_global_capturing()
    manager.start_global_capturing()
    manager.suspend_global_capture()


def _given(session: pytest.Session, connection: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    by_name = {item.nodeid: item for item in session.items}
    items = _asked(by_name, connection)
    while items:
        yield from pairwise(items)
        last, items = items[-1], _asked(by_name, connection)
        yield last, items[0] if items else None


def _asked(by_name: dict[str, pytest.Item], connection: Connection) -> File:
    connection.send(None)
    return [by_name[name] for name in connection.recv()]
