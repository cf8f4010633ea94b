"""A cluster in processes of its own, started by its command."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

MODEL = "splittime-code"
FAST = "[serve]\nmax_num_seqs = 4\nkv_cache_memory_bytes = 4194304\nnum_threads = 1\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RunningCluster:
    """url: of its first gateway."""

    def __init__(self, folder: Path, url: str, process: subprocess.Popen) -> None:
        self.folder, self.url, self.process = folder / "cluster.run", url, process
        self.is_killed = False

    def kill(self) -> None:
        """As `kill -9`: nothing is told to anybody."""
        self.is_killed = True
        self.process.kill()

    def status(self) -> dict:
        try:
            return json.loads((self.folder / "status.json").read_text())
        except OSError:
            return {"replicas": [], "events": [], "trial": None}

    def of_phase(self, phase: str) -> list[str]:
        return [one["name"] for one in self.status()["replicas"] if one["phase"] == phase]

    def until(self, what, limit_s: float = 150.0):
        """Returns what `what` returns as soon as that is true."""
        deadline_s = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < deadline_s, (self.status(), self.logs())
            time.sleep(0.05)
        return found

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.rglob("*.log")))

    def pid_of(self, name: str) -> int:
        """The process of a replica or a gateway."""
        folder = self.folder if name.startswith("gateway") else self.folder / "replicas"
        return json.loads((folder / f"{name}.json").read_text())[0]

    def controller_pid(self) -> int:
        """Found by its parent and its command."""
        for pid in children_of(self.process.pid):
            if b"splittime.cluster" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no controller")

    def ask(self, timeout_s: float = 60.0, **body):
        """Returns status and body."""
        told = {"model": MODEL, "prompt": "def f(", "max_tokens": 4, "temperature": 0, **body}
        asked = urllib.request.Request(self.url + "/v1/completions", json.dumps(told).encode())
        asked.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def processes_with(text: str) -> list[int]:
    """The processes whose command line or environment's folder has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


@contextmanager
def cluster_of(folder: Path, text: str, **environment):
    """Start `splittime up` with this config, whose top-level keys come first; ends it with Ctrl-C."""
    config = folder / "cluster.toml"
    config.write_text(text + f"[gateway]\nport = {free_port()}\n")
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", str(config), "--json"]
    with (folder / "words").open("wb") as words:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=words, env={**os.environ, **environment}, cwd=folder
        )
        try:
            told = process.stdout.readline()
            assert told, (folder / "words").read_text()
            cluster = RunningCluster(folder, json.loads(told)["gateways"][0], process)
            yield cluster
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == (-9 if cluster.is_killed else 0), (folder / "words").read_text()
        finally:
            process.kill()  # all that it started ends with it
            process.stdout.close()
            process.wait()


@contextmanager
def asking(cluster: RunningCluster, number: int = 2, **body):
    """So many clients ask again and again, until the block ends; yields the answers."""
    answers, stopping = [], threading.Event()

    def ask() -> None:
        while not stopping.is_set():
            try:
                answers.append(cluster.ask(**body))
            except (OSError, urllib.error.URLError) as error:
                answers.append((0, repr(error).encode()))
            time.sleep(0.02)

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
