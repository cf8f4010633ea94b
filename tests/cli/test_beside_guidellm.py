"""The race beside guidellm without guidellm: when it is skipped, what it sends, and what it says of a difference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cpu_seconds import cpu_seconds_of_children
from benchmarks.scenarios import beside_guidellm
from benchmarks.scenarios.beside_guidellm_told import FIGURES, Timed, Told, differences, figures_of, medians
from splittime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def test_without_guidellm_it_is_skipped_in_words(tmp_path):
    command = [sys.executable, "-m", "benchmarks.scenarios.beside_guidellm", "--guidellm", str(tmp_path / "python")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith("skipped: there is no guidellm to run")
    assert "--guidellm" in done.stderr


def test_a_program_that_does_not_run_is_skipped_too(tmp_path):
    broken = tmp_path / "guidellm"
    broken.write_text("#!/bin/sh\nexit 1\n")
    assert "there is no guidellm to run" in beside_guidellm.why_not(broken)
    broken.chmod(0o755)
    assert "does not run" in beside_guidellm.why_not(broken)
    broken.write_text("#!/bin/sh\necho guidellm 1\n")
    assert beside_guidellm.why_not(broken) is None


def test_texts_have_exactly_so_many_tokens_and_differ():
    tokenizer = Tokenizer.load(beside_guidellm.PACKAGED)
    made = list(beside_guidellm.texts(20, 33, seed=1))
    assert {len(tokenizer.encode(text)) for text in made} == {33}
    assert len(set(made)) == 20
    assert made != list(beside_guidellm.texts(20, 33, seed=2))


def told(client_ms: float = 0.0, server_ms: float = 0.0) -> Told:
    """Ten requests; the tool sees them so much later, of which the server itself was so much slower."""
    requests = [Timed(100.0 * i, 100.0 * i, 100.0 * i + 20, 100.0 * i + 50, 100.0 * i + 50, 4) for i in range(10)]

    def later(by_ms: float) -> list[Timed]:
        return [one._replace(first=one.first + by_ms, last=one.last + by_ms, end=one.end + by_ms) for one in requests]

    return Told(later(client_ms + server_ms), later(server_ms), 33.0, 0.5, {}, tool_cpu_s=2.0, server_cpu_s=1.0)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (told(), "agree within the noise"),
        (told(client_ms=0.5), "agree within the noise"),
        (told(client_ms=5), "guidellm's is higher by 5.00 ms, 4.00 beyond the noise: the tool is later"),
        (told(server_ms=5), "guidellm's is higher by 5.00 ms, 4.00 beyond the noise: the server was slower"),
        (told(client_ms=-5), "splittime's is higher by 5.00 ms, 4.00 beyond the noise: the tool is later"),
    ],
)
def test_a_difference_is_named_and_whose_it_is(theirs, words):
    found = differences(medians([figures_of(theirs)]), medians([figures_of(told())]))
    assert set(found) == set(FIGURES)
    assert words in found["ttft"]["verdict"]
    assert words in beside_guidellm.sentence(("ttft", found["ttft"]))


def test_rounds_that_differ_among_themselves_are_noise():
    rounds = [figures_of(told(server_ms=ms)) for ms in (0, 3, 9)]
    found = differences(medians(rounds), medians([figures_of(told())]))
    assert "agree within the noise (9.00 ms)" in found["ttft"]["verdict"]


def test_cpu_seconds_by_request_are_shown():
    found = {tool: medians([figures_of(told())]) for tool in beside_guidellm.TOOLS}
    assert "guidellm 200.00 (200.00..200.00), its server 100.00" in beside_guidellm.cpu_sentence(found)


BURN = """
import os, sys
os.fork()
while sum(os.times()[:2]) < 0.3:
    pass
os.write(1, b"\\n")
sys.stdin.read()
"""


def test_cpu_seconds_are_of_living_children_and_theirs():
    child = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == child.stdout.readline() == b"\n"
        assert cpu_seconds_of_children(os.getpid()) >= 0.5
    finally:
        child.communicate(timeout=100)
