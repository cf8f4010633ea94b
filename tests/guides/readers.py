"""Runs a page's blocks as its reader would: in one folder, one after the other, beside the servers that it starts.

Some words of a block are changed first (`REWRITTEN`): ports, since 8000 may be taken, and lengths of runs, since a test
has no minutes to spend. What is simulated and planned is a ledger with known costs: steps that were measured on a busy
processor fit no model, and the commands refuse them.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from pages import ROOT, Block

from benchmarks.server_process import free_port

WORD = re.compile(r"[a-z_]{3,}")
MOST_OTHER_WORDS = 0.4  # of what a page shows of an answer: those of its text, which another model writes
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=--port )\d+")
REWRITTEN = (
    (re.compile(r"--duration \d+s"), "--duration 2s"),
    (re.compile(r"today\.sqlite(?! --check)"), "known.sqlite"),
    (re.compile(r"(splittime quality .*)--tokens \d+"), r"\1--tokens 1000 --length short"),
    (re.compile(r"--minutes \d+"), "--tokens 2048 --step-tokens 1024"),
    (re.compile(r"^(splittime tune .*)", re.MULTILINE), r"\1 --minutes 1"),  # nothing begins after it
    (re.compile(r"--calibrate text.txt"), "--calibrate text.txt --samples 8 --length 64"),
    (re.compile(r"splittime explain"), "splittime explain --url http://127.0.0.1:8000"),
    (re.compile(r"splittime doctor$", re.MULTILINE), "splittime doctor http://127.0.0.1:8000"),
    (
        re.compile(r"--low 1 --high 64"),
        "--low 4 --high 8 --max-runs 2 --warm-up 0s --input-tokens 32 --output-tokens 8",
    ),
)
CACHE = Path(tempfile.gettempdir()) / f"splittime-docs-{os.getuid()}"
"""What a start measures once (threads, ceilings) is kept for the next one, as on a reader's machine."""
SHARED = ("splittime serve", "splittime serve --port 8000")
START_S, BLOCK_S, END_S = 150, 200, 100
SHIM = """#!/bin/sh
exec {python} -c 'import sys; sys.argv[0] = "splittime"; from splittime.cli.entry import main; main()' "$@"
"""


class Server:
    """A `splittime serve` that runs until `end`."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str], port: int) -> None:
        self.port, self.log = port, folder / f"server-{port}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=folder,
                env=environment | {"SPLITTIME_PORT": str(port)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait(command)

    def _wait(self, command: str) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=60).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.end()
        raise AssertionError(f"{command}: not ready\n{self.log.read_text()}")

    def end(self) -> int:
        """Returns the exit code after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


class Reader:
    """One page's reader. `servers` by the port that the page names; the shared one is there from the beginning."""

    def __init__(self, folder: Path, shared: "Server | None" = None) -> None:
        self.folder, self.shared = folder, shared
        self.servers: dict[int, Server] = {}
        shims = folder / ".bin"
        shims.mkdir()
        (shims / "splittime").write_text(SHIM.format(python=sys.executable))
        (shims / "splittime").chmod(0o755)
        path = f"{shims}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SPLITTIME_")}
        self.environment = clean | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(CACHE)}

    def read(self, block: Block) -> None:
        """Runs the block. Raises `AssertionError` unless it ends as the page says."""
        if not block.is_server:
            self._run(block)
        elif block.text.strip() not in SHARED or self.shared is None:
            self._serve(block)

    def end(self) -> None:
        codes = {server.log.name: server.end() for server in self.servers.values()}
        self.servers.clear()
        assert set(codes.values()) <= {0}, codes

    def _serve(self, block: Block) -> None:
        named = PORT.search(block.text)
        port = int(named[0]) if named else 8000
        if port in self.servers:
            assert self.servers.pop(port).end() == 0
        mine = free_port()
        command = PORT.sub(str(mine), block.text.strip())
        self.servers[port] = Server(command, self.folder, self.environment, mine)

    def _port(self, named: re.Match[str]) -> str:
        shared = {8000: self.shared} if self.shared else {}
        return str((shared | self.servers)[int(named[0])].port)

    def _run(self, block: Block) -> None:
        text = block.text
        for pattern, instead in REWRITTEN:
            text = pattern.sub(instead, text)
        text = PORT.sub(self._port, text)
        command = (
            [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        )
        run = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = run.communicate(timeout=BLOCK_S)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            raise
        said = f"{block}: exit code {run.returncode}\n{out[-2000:]}\n{errors[-2000:]}"
        assert run.returncode in block.exits, said
        assert not re.search(r"^(error|Error|Usage):", errors, re.MULTILINE), said
        shown = set(WORD.findall(block.printed))
        others = shown - set(WORD.findall(out + errors))
        assert len(others) <= len(shown) * MOST_OTHER_WORDS, f"{said}\nthe page shows besides: {others}"
