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


def test_that_the_index_does_not_answer_is_told_and_not_called_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    teller = install.Teller()
    teller.read("  Downloading aiohttp-3.12.1-cp311-cp311-manylinux.whl (1.9 MB)")
    teller.read("WARNING: Retrying (Retry(total=4)) after connection broken by 'NameResolutionError': /simple/attrs/")
    teller.say_again()
    told = [line.split("s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    retry = "pip: Retrying (Retry(total=4)) after connection broken by 'NameResolutionError': /simple/attrs/"
    assert told == ["downloading aiohttp, 1.9 MB", retry, retry]


def test_in_a_log_the_same_line_comes_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ten minutes thirteen times instead of 120; what is new is told after five seconds again."""
    now_s = 0.0
    monkeypatch.setattr(install.time, "monotonic", lambda: now_s)

    class Until:
        def __init__(self, end_s: float) -> None:
            self._end_s = end_s

        def wait(self, seconds: float) -> bool:
            nonlocal now_s
            now_s += seconds
            return now_s >= self._end_s

    teller = install.Teller()
    teller.say("compiling")
    teller.go_on(Until(600.0))  # type: ignore[arg-type]
    at_s = [int(line.split(" s ")[0]) for line in capsys.readouterr().out.splitlines()]
    assert at_s == [0, 5, 15, 35, *range(75, 600, 60)]
    teller.say("unpacking")
    teller.go_on(Until(now_s + 6.0))  # type: ignore[arg-type]
    assert [int(line.split(" s ")[0]) for line in capsys.readouterr().out.splitlines()] == [600, 605]


def test_a_failure_is_pips_own_in_its_words_and_in_its_exit_status(tmp_path: Path) -> None:
    program = [sys.executable, install.__file__, str(tmp_path / "log"), "--no-index", "no-such-package-of-ours"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "No matching distribution found for no-such-package-of-ours" in run.stdout
    assert "No matching distribution" in (tmp_path / "log").read_text()
