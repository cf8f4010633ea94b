"""What `make setup` runs: pip, told in a few lines. All that pip says goes into a log; a line tells of each phase and
of each large download, and whenever nothing was said for five seconds a line names the package that pip is busy with,
so that nobody takes work for a hang. In a log the same line comes again after twice the time, up to a minute.

    python install.py LOG PIP_ARGUMENT...

exits as pip does; after a failure the log's last lines are shown. This file needs nothing but Python: nothing else is
there yet.
"""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

NOW = re.compile(r"\s*(?:Collecting|Processing) (?:\S*/)?([A-Za-z0-9_.]+(?:-[A-Za-z][A-Za-z0-9_.]*)*)")
LARGE = re.compile(r"\s*Downloading ([A-Za-z0-9_.]+)-\d\S* \((\d+\.\d MB)\)")
BUILDING = re.compile(r"\s*Building (?:editable|wheel) for splittime \(pyproject.toml\): started")
TROUBLE = re.compile(r"\s*WARNING: (Retrying .*)")
UNPACKING = re.compile(r"Installing collected packages: (.*)")
SILENCE_S, MOST_SILENCE_S = 5.0, 60.0
LINE_ABOVE = "\033[F\033[K"
LINES_AFTER_A_FAILURE = 40


class Teller:
    """Prints with the seconds since the start, and again when it was silent for long."""

    def __init__(self) -> None:
        self._begin_s = self._said_s = time.monotonic()
        self._now = self._said = ""
        self._silence_s = SILENCE_S
        self._lock = threading.Lock()

    def say(self, words: str) -> None:
        """On a terminal, words that are said again stand where they stood."""
        with self._lock:
            over = LINE_ABOVE if words == self._said and sys.stdout.isatty() else ""
            again = words == self._said and not over
            self._silence_s = min(2 * self._silence_s, MOST_SILENCE_S) if again else SILENCE_S
            self._now, self._said, self._said_s = words, words, time.monotonic()
            print(f"{over}{self._said_s - self._begin_s:4.0f} s  {words}", flush=True)

    def read(self, line: str) -> None:
        """A line of pip's: most are worth no word of their own, but say what a silence would be spent on."""
        if trouble := TROUBLE.match(line):
            self.say(f"pip: {trouble[1]}")
        elif download := LARGE.match(line):
            self.say(f"downloading {download[1]}, {download[2]}")
        elif BUILDING.match(line):
            self.say("compiling the CPU kernels")
        elif packages := UNPACKING.match(line):
            self.say(f"unpacking, packages: {packages[1].count(',') + 1}")
        elif package := NOW.match(line):
            self._now = f"looking at {package[1]}"

    def go_on(self, over: threading.Event) -> None:
        while not over.wait(SILENCE_S / 5):
            if time.monotonic() - self._said_s >= self._silence_s:
                self.say_again()

    def say_again(self) -> None:
        self.say(self._now)


def install(log: Path, arguments: list[str]) -> int:
    """Returns pip's exit status."""
    teller, over = Teller(), threading.Event()
    teller.say("reading what is needed")
    threading.Thread(target=teller.go_on, args=(over,), daemon=True).start()
    command = [sys.executable, "-u", "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with log.open("w", buffering=1) as kept, subprocess.Popen(command, **pipes) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            text = line.decode(errors="replace")
            kept.write(text)
            teller.read(text)
    over.set()
    teller.say("pip failed" if pip.returncode else "installed")
    return pip.returncode


def main() -> int:
    log = Path(sys.argv[1])
    status = install(log, sys.argv[2:])
    if status:
        print(*log.read_text().splitlines()[-LINES_AFTER_A_FAILURE:], f"All that pip said: {log}", sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
