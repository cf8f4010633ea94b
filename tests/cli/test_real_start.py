"""The real script, from an empty cache: every command is there, every setting of `serve` can be given, nothing
unexpected is said, and all ceilings are measured."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import typer

from splittime.cli.main import app

SCRIPT = str(Path(sys.executable).with_name("splittime"))
LIMIT_S = 120
DRAWN = ["--load-format", "dummy", "--kv-cache-memory-bytes", "8MiB", "--max-model-len", "64"]
EXPECTED = re.compile(
    r"splittime [\d.]+: starting the engine for .*|loading .*|.* shutting down: 0 requests open"
    r"|starting .*, [\d,]+ s"  # what a start on a busy machine is at, now and then
)


def run(tmp_path, *words):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=environment, timeout=LIMIT_S)


@pytest.mark.parametrize("command", typer.main.get_command(app).list_commands(None))
def test_every_command_is_there(tmp_path, command):
    done = run(tmp_path, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"splittime {command}" in done.stdout


def every_setting(tmp_path):
    """Return the flags that give each setting which has one its default."""
    shown = json.loads(run(tmp_path, "config", "show", "--json").stdout)["settings"]
    told = {one["name"].replace("_", "-"): one["value"] for one in shown if one["value"] not in (None, "", [])}
    assert len(told) > 40
    flags = []
    for name, value in told.items():
        words = [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", _word(value)]
        flags += words if name not in ("port", "load-format") else []
    return flags


def _word(value):
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.timeout(600)  # it measures between other work: a busy machine leaves it little
@pytest.mark.parametrize("start", ["drawn weights", "packaged model", "every setting"])
def test_it_starts_says_nothing_unexpected_and_keeps_all_ceilings(tmp_path, start):
    flags = {"drawn weights": lambda: DRAWN, "packaged model": list, "every setting": lambda: every_setting(tmp_path)}
    log = tmp_path / "stderr"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [SCRIPT, "serve", *flags[start](), "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        )
    try:
        line = server.stdout.readline()
        assert line, log.read_text()
        machine = measured(json.loads(line)["url"])
    finally:
        server.terminate()
        server.wait(LIMIT_S)
    assert machine["operations_per_s"] > 0
    assert machine["read_bytes_per_s"] > 0
    assert [line for line in log.read_text().splitlines() if not EXPECTED.fullmatch(line)] == []


def measured(url):
    """Return what the server knows of its machine, as soon as it has measured it."""
    until_s = time.monotonic() + 4 * LIMIT_S
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"{url}/ledger/facts", timeout=LIMIT_S) as response:
            machine = json.load(response)["machine"]
        if machine["measured_at_unix_ns"]:
            return machine
        time.sleep(0.1)
    raise AssertionError("the ceilings were never measured")
