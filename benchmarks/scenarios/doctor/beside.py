"""What goes on beside a load: somebody pauses the engine, stops its process, takes the processors, or puts it to sleep.

    async with pausing(url): ...

Signals go to nobody but the engine process of a server that this benchmark started itself.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp

EVERY_S = 0.4
LONG_S = 3.0
GROUPS = Path("/sys/fs/cgroup")
QUOTA = {"cpu.max": "{quota} 100000", "cpu.cfs_quota_us": "{quota}"}  # of version 2, and of 1
BUSY = "while True: pass"


@asynccontextmanager
async def _again_and_again(
    turn: Callable[[], Awaitable[None]], at_last: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    async def go_on() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await turn()

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await at_last()


@asynccontextmanager
async def pausing(url: str) -> AsyncIterator[None]:
    """The engine is paused for a quarter of the time."""
    async with aiohttp.ClientSession() as session:

        async def turn(paused: bool) -> None:
            async with session.patch(f"{url}/knobs", json={"paused": paused}) as response:
                response.raise_for_status()

        async def both() -> None:
            await turn(True)
            await asyncio.sleep(EVERY_S / 3)
            await turn(False)

        async with _again_and_again(both, lambda: turn(False)):
            yield


@asynccontextmanager
async def stopping(url: str) -> AsyncIterator[None]:
    """The engine process is stopped for a quarter of the time."""
    (engine,) = engines_of(os.getpid())

    async def go_on() -> None:
        os.kill(engine, signal.SIGCONT)

    async def both() -> None:
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(EVERY_S / 3)
        await go_on()

    async with _again_and_again(both, go_on):
        yield


@asynccontextmanager
async def stopped_once(url: str) -> AsyncIterator[None]:
    """The engine process is stopped for some seconds, as a debugger or a checkpoint does it."""
    (engine,) = engines_of(os.getpid())
    async with _once(lambda: os.kill(engine, signal.SIGSTOP), lambda: os.kill(engine, signal.SIGCONT)):
        yield


@asynccontextmanager
async def _once(begin: Callable[[], None], end: Callable[[], None]) -> AsyncIterator[None]:
    """Something goes on for some seconds in the middle of the load."""

    async def go_on() -> None:
        await asyncio.sleep(LONG_S)
        begin()
        await asyncio.sleep(LONG_S)
        end()

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        end()


@asynccontextmanager
async def neighbours(url: str) -> AsyncIterator[None]:
    """Two busy processes for each core."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * cores)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@asynccontextmanager
async def sleeping(url: str) -> AsyncIterator[None]:
    """The server is put to sleep and woken again, five times."""
    async with aiohttp.ClientSession() as session:

        async def ask(what: str) -> None:
            async with session.post(f"{url}/{what}") as response:
                await response.read()

        async def both() -> None:
            await asyncio.sleep(2 * EVERY_S)
            await ask("sleep")
            await asyncio.sleep(EVERY_S)
            await ask("wake")

        async with _again_and_again(both, lambda: ask("wake")):
            yield


class NoGroups(Exception):
    """This machine does not let us make a control group of processor time."""


@contextmanager
def with_quota(cores: float) -> Iterator[Callable[[], None]]:
    """Give what is begun now so much processor time, in a control group of its own.

    This process goes in, so that its children are there from their first instruction on; what is yielded takes it out
    again, once they have begun. Raises NoGroups."""
    parent = _own_group()
    folder = parent / f"splittime-doctor-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoGroups(f"{parent}: {error.strerror}") from None
    try:
        name = next((name for name in QUOTA if (folder / name).exists()), None)
        if name is None:
            raise NoGroups(f"{parent} has no quota of processor time")
        (folder / name).write_text(QUOTA[name].format(quota=round(100_000 * cores)))
        _move(os.getpid(), folder)
        yield lambda: _move(os.getpid(), parent)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            _move(int(pid), parent)
        folder.rmdir()


def _own_group() -> Path:
    """Returns the folder of this process's control group, as far as processor time is concerned."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, names, path in lines:
        if "cpu" in names.split(",") and (GROUPS / "cpu").is_dir():
            return GROUPS / "cpu" / path.lstrip("/")
    return GROUPS / next((path for _, names, path in lines if not names), "/").lstrip("/")


def _move(pid: int, folder: Path) -> None:
    with suppress(ProcessLookupError):
        (folder / "cgroup.procs").write_text(str(pid))


def engines_of(pid: int) -> list[int]:
    """The engine processes among the descendants of this process."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = []
    for child in parents:
        line = _ancestors(child, parents)
        with suppress(OSError):
            if pid in line and b"splittime.assemble.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _parent(path: Path) -> int:
    with suppress(OSError):
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) > 1 and pid not in found:
        found.add(pid)
    return found
