"""An sdist becomes a wheel, with a compiler and without; what pip installs of it names its kernels and serves."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from benchmarks.server_process import free_port
from splittime.kernels.native.library import LibraryMissing, library

ROOT = Path(__file__).parents[1]
LIMIT_S = 500
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check", "-q")
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(2 * LIMIT_S)]


def python(*words, **environment):
    environ = {
        name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH", "ST_BUILD_KERNELS")
    }
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environ | environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made in a copy of the tree, where nothing was built before."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", folder], cwd=tree, check=True, timeout=LIMIT_S)
    (made,) = folder.glob("*.tar.gz")
    return made


def installed(sdist, folder, **environment):
    """Returns the wheel's name, and the folder that it was installed into."""
    python("-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "-w", folder, sdist, **environment)
    (wheel,) = folder.glob("*.whl")
    python("-m", "pip", "install", *OFFLINE, "--target", folder / "site", wheel)
    return wheel.name, folder / "site"


def check(site, kernels):
    """The version, the check of the installation, and one completion of a server."""
    command, environment = site / "bin/splittime", {"PYTHONPATH": str(site)}
    where = python("-c", "import splittime; print(splittime.__file__)", **environment).stdout
    assert where.startswith(str(site))
    assert f"kernels: {kernels}" in python(command, "--version", **environment).stdout
    assert serve_one(command, environment)["usage"]["completion_tokens"] > 0
    told = subprocess.run(
        [sys.executable, command, "doctor", "--self", "--json"], env=os.environ | environment, capture_output=True
    )
    return {entry["name"]: entry for entry in json.loads(told.stdout)["checks"]}, told.returncode


def serve_one(command, environment):
    base = f"http://127.0.0.1:{free_port()}"
    server = subprocess.Popen(
        [sys.executable, command, "serve", "--port", base.rpartition(":")[2]], env=os.environ | environment
    )
    try:
        wait_for(f"{base}/ready", server)
        body = json.dumps({"prompt": "def read_json(path):", "max_tokens": 8}).encode()
        asked = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url, server):
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=60).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{url} is not there")


def has_kernels():
    try:
        return bool(library())
    except LibraryMissing:
        return False


@pytest.mark.skipif(not shutil.which("c++") or not has_kernels(), reason="needs a C++ compiler")
def test_with_a_compiler_the_kernels_are_there_and_every_python_of_the_platform_may_have_them(sdist, tmp_path):
    quick = tmp_path / "c++"
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # that it compiles is held here: optimised it takes minutes
    quick.chmod(0o755)
    name, site = installed(sdist, tmp_path, ST_BUILD_KERNELS="require", CXX=str(quick))
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    checks, code = check(site, "native, ")
    assert checks["kernels"]["verdict"] == checks["libraries"]["verdict"] == checks["model"]["verdict"] == "ok"
    assert code == any(entry["verdict"] == "bad" for entry in checks.values())


def test_without_a_compiler_it_computes_with_torch_and_says_why(sdist, tmp_path):
    name, site = installed(sdist, tmp_path, PATH=str(tmp_path))
    assert name.endswith("-py3-none-any.whl")
    checks, code = check(site, "torch CPU kernels, which are slower: the kernels were not built")
    assert checks["kernels"]["verdict"] == "bad"
    assert "ST_BUILD_KERNELS=require pip install" in checks["kernels"]["remedy"]
    assert code == 1
