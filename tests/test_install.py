"""`make setup` shows progress: what a person is told of pip's lines, and what is left of its exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

import install

SAID = """\
Obtaining file:///somewhere/splittime
  Preparing editable metadata (pyproject.toml): started
Collecting triton==3.7.1
  Downloading triton-3.7.1-cp313-cp313-manylinux_2_27_x86_64.whl (197.7 MB)
Collecting six
  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)
Building wheels for collected packages: splittime
  Building editable for splittime (pyproject.toml): started
Installing collected packages: triton, six, splittime
"""


def test_a_line_for_each_large_download_and_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    teller = install.Teller()
    for line in SAID.splitlines(keepends=True):
        teller.read(line)
    told = [line.split("s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told == ["downloading triton, 197.7 MB", "compiling the CPU kernels", "unpacking, packages: 3"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting huggingface-hub>=0.25", "looking at huggingface-hub"),
        ("Processing /of/mine/torch-2.13.0-cp313-cp313-linux_x86_64.whl (from x)", "looking at torch"),
    ],
)
def test_a_silence_says_what_it_is_spent_on(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    teller = install.Teller()
    teller.read(line)
    assert not capsys.readouterr().out
    teller.say_again()
    assert words in capsys.readouterr().out


def test_a_failure_is_pips_own_in_its_words_and_in_its_exit_status(tmp_path: Path) -> None:
    program = [sys.executable, install.__file__, str(tmp_path / "log"), "--no-index", "no-such-package-of-ours"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "No matching distribution found for no-such-package-of-ours" in run.stdout
    assert "No matching distribution" in (tmp_path / "log").read_text()
