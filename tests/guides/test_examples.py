"""The programs in `examples/` run, say what they promise, and stay short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT
from readers import Reader, Server

from benchmarks.server_process import free_port

pytestmark = pytest.mark.timeout(600)  # processes of its own, on a busy machine

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 40
SAYS = {
    "embed.py": ["48 tokens", "decode"],
    "why_slow.py": ["prompt tokens", "prefill", "%"],
    "load_and_compare.py": ["e2e_mean"],
    "diagnose_file.py": [" requests, "],
    "read_timing.py": ["this client waited", "prefill"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp("examples"))
    made = Server("splittime serve --ledger-file today.sqlite", reader.folder, reader.environment, free_port())
    yield made
    assert made.end() == 0


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in SAYS[name]), done.stdout
    return done.stdout


def test_in_your_own_process():
    run("embed.py")


def test_against_a_server(server: Server):
    """In the order in which each has something to read."""
    felt, accounted = run("read_timing.py", f"127.0.0.1:{server.port}").partition("waited ")[2].split(" ms; ")[:2]
    assert float(felt) > float(accounted.removeprefix("the server accounts for ").split()[0]) > 0
    assert "32 output tokens" in run("why_slow.py", f"http://127.0.0.1:{server.port}")
    compared = run("load_and_compare.py", f"http://127.0.0.1:{server.port}")
    assert {line.split()[1] for line in compared.splitlines()} <= {"BETTER", "WORSE", "EQUIVALENT", "INCONCLUSIVE"}
    assert "BETTER" not in compared.splitlines()[0]
    requests = run("diagnose_file.py", str(server.log.parent / "today.sqlite")).split()[0]
    assert int(requests) > 100


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_is_short_and_known(path: Path):
    assert len(path.read_text().splitlines()) < MAX_LINES
    assert path.name in SAYS
    assert f"`{path.name}`" in (ROOT / "examples" / "README.md").read_text()
