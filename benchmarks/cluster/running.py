"""A cluster in processes of its own, started by its command, for benchmarks and for tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.server_process import free_port

MODEL = "splittime-code"
NOTHING: dict[str, Any] = {"replicas": [], "events": [], "trial": None, "wanted": None}
T = TypeVar("T")


class RunningCluster:
    """config: its file. gateways: URLs of each. url: the way in, of the first or of all."""

    def __init__(self, config: Path, told: dict[str, Any], process: "subprocess.Popen[bytes]") -> None:
        self.config, self.folder, self.process = config, config.with_suffix(".run"), process
        self.gateways: list[str] = told["gateways"]
        self.url: str = told.get("shared", self.gateways[0])
        self.is_killed = False

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "status.json").read_text()))
        except OSError:
            return NOTHING

    def of_phase(self, phase: str) -> list[str]:
        return [one["name"] for one in self.status()["replicas"] if one["phase"] == phase]

    def until(self, what: Callable[[], T], limit_s: float = 150.0) -> T:
        """Returns what `what` returns as soon as that is true. Raises AssertionError where that takes too long, or the
        cluster has ended without being killed."""
        deadline_s = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < deadline_s, (self.status(), self.logs())
            assert self.is_killed or self.process.poll() is None, self.logs()
            time.sleep(0.05)
        return found

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.rglob("*.log")))

    def pid_of(self, name: str) -> int:
        """Returns the process of a gateway, or of a replica of this machine."""
        folder = self.folder if name.startswith("gateway") else self.folder / "replicas"
        return int(json.loads((folder / f"{name}.json").read_text())[0])

    def controller_pid(self) -> int:
        """Returns the process that is a child of ours by its command."""
        found = (pid for pid in children_of(self.process.pid) if b"\0splittime.cluster\0" in command_of(pid))
        return next(found)

    def kill(self) -> None:
        """As `kill -9`: nothing is told to anybody."""
        self.is_killed = True
        self.process.kill()

    def apply(self, old: str, new: str) -> None:
        """Change the file, and have it taken."""
        text = self.config.read_text()
        assert old in text
        self.config.write_text(text.replace(old, new))
        self.process.send_signal(signal.SIGHUP)


def say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raises SystemExit, which uvloop lets out where it keeps others, in what is within if it lasts longer: so what it
    started is ended. For the main thread."""

    def late(number: int, frame: object) -> None:
        raise SystemExit(f"it has lasted {seconds:.0f} s, the most that it may")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def cluster_of(folder: Path, text: str, gateways: int = 1) -> Iterator[RunningCluster]:
    """Start `splittime up` with this config, which has no `gateways` and no `[gateway]`; end it with Ctrl-C, which must
    end it well. Several gateways share a port."""
    config = folder / "cluster.toml"
    ports = f"port = {free_port(in_a_row=gateways)}\n"  # each gateway has one more than the one before
    if gateways > 1:
        ports += f"shared_port = {free_port()}\n"
    config.write_text(f"gateways = {gateways}\n{text}\n[gateway]\n{ports}[gateway.queue]\nmax_wait_s = 120.0\n")
    say("starting a cluster")
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", str(config), "--json"]
    with (folder / "words").open("wb") as words:
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # replicas start with their bytecode
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, cwd=folder, env=environment)
    assert process.stdout is not None
    try:
        told = process.stdout.readline()
        assert told, (folder / "words").read_text()
        cluster = RunningCluster(config, json.loads(told), process)
        yield cluster
        say("ending the cluster")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=150) == (-9 if cluster.is_killed else 0), (folder / "words").read_text()
    finally:
        process.kill()  # all that it started ends with it
        process.stdout.close()
        process.wait()


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _read(path).rpartition(b")")[2].split()
        if fields and int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def processes_with(text: str) -> list[int]:
    """Returns the other processes whose command has this text."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != os.getpid() and text.encode() in command_of(pid)]


def is_running(pid: int) -> bool:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return bool(fields) and fields[0] not in (b"Z", b"X")


def command_of(pid: int) -> bytes:
    return _read(Path(f"/proc/{pid}/cmdline"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
