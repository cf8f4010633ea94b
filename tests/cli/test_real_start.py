"""`splittime serve` by the real script, from an empty cache: nothing unexpected is said, all ceilings are measured."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("splittime"))
LIMIT_S = 120


def test_drawn_weights_are_served_and_all_ceilings_are_kept(tmp_path):
    flags = ["--load-format", "dummy", "--kv-cache-memory-bytes", "8MiB", "--max-model-len", "64"]
    log = tmp_path / "stderr"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [SCRIPT, "serve", *flags, "--port", "0", "--json"],
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
    said = [line for line in log.read_text().splitlines() if "WARNING" in line or "rror" in line or "bug" in line]
    assert [line for line in said if "shutting down" not in line] == []


def measured(url):
    """Return what the server knows of its machine, as soon as it has measured it."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"{url}/ledger/facts", timeout=LIMIT_S) as response:
            machine = json.load(response)["machine"]
        if machine["measured_at_unix_ns"]:
            return machine
        time.sleep(0.1)
    raise AssertionError("the ceilings were never measured")
