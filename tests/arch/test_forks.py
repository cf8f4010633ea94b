"""Tests in several processes: each is run once and told, and one that takes its process with it has failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DYING = """
import os, signal, warnings
def test_before(): warnings.warn("told by a worker")
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(tmp_path): print("said"), (tmp_path / "x").touch()
"""
FAILING = "import pytest\ndef test_fails(): print('heard'); assert 0\n@pytest.mark.skip\ndef test_skipped(): pass"


def told(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "forks", "-p", "lanes", *words]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "counted"), [((), "2 failed, 3 passed, 1 skipped"), (("-x", "c.py", "b.py"), "1 failed")]
)
def test_every_test_is_told_once(tmp_path: Path, options: tuple[str, ...], counted: str) -> None:
    for name, text in {"a.py": DYING, "b.py": "def test_passes(): pass", "c.py": FAILING}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ended = told(tmp_path, "--forks", "2", *(options or ("a.py", "b.py", "c.py")))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert counted in ended.stdout
    assert ("the process that ran it ended: signal SIGKILL" in ended.stdout) is (not options)
    assert "heard" in ended.stdout
    assert "said" not in ended.stdout
    assert ("UserWarning: told by a worker" in ended.stdout) is (not options)


@pytest.mark.parametrize("forks", ["1", "2"])
def test_what_a_file_leaves_in_the_environment_ends_with_it(tmp_path: Path, forks: str) -> None:
    leaves = "import os\ndef test_leaves(): os.environ['LEFT'] = '1'\ndef test_keeps(): assert 'LEFT' in os.environ"
    (tmp_path / "a.py").write_text(leaves, encoding="utf-8")
    (tmp_path / "b.py").write_text("import os\ndef test_has_none(): assert 'LEFT' not in os.environ", encoding="utf-8")
    ended = told(tmp_path, "--forks", forks, "a.py", "b.py")
    assert "3 passed" in ended.stdout, ended.stdout + ended.stderr
