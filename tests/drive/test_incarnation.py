"""One engine process: what it is given, how it leaves or is made to, and what is said of its death."""

import logging
import sys
import time
from pathlib import Path

import pytest
import zmq.asyncio

from splittime.core.errors import ConfigError, EngineError
from splittime.drive import process
from splittime.drive.messages import Fatal
from splittime.drive.process import Incarnation, cause_of_death, failure

ECHO = "import sys; line = sys.stdin.readline(); open(sys.argv[1], 'w').write(line + '|'.join(sys.argv[2:]))"
DEAF = "import time; print('up', flush=True); time.sleep(600)"
LEAVES = "import sys; sys.stdin.readline(); sys.stdin.read(); sys.exit(7)"


def test_it_is_told_its_settings_in_a_line_and_where_its_sockets_are(tmp_path: Path) -> None:
    told = tmp_path / "told"
    begin_ns = time.monotonic_ns()
    born = Incarnation([sys.executable, "-c", ECHO, str(told)], b'{"a": 1}')
    assert born.process.wait(60) == 0
    line, endpoints = told.read_text().splitlines()
    assert line == '{"a": 1}'
    assert endpoints == f"ipc://{born.folder}/to-engine|ipc://{born.folder}/from-engine"
    assert begin_ns <= born.started_ns <= time.monotonic_ns()
    born.close()
    assert not Path(born.folder).exists()


@pytest.mark.parametrize(("script", "status", "patience_s"), [(LEAVES, 7, 60.0), (DEAF, -9, 0.1)])
async def test_one_that_leaves_is_waited_for_and_one_that_does_not_is_killed(
    script: str, status: int, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", patience_s)
    born = Incarnation([sys.executable, "-c", script], b"{}")
    context = zmq.asyncio.Context()
    born.connect(context)
    await born.end()
    assert born.process.returncode == status
    assert born.push.closed
    assert born.pull.closed
    assert not Path(born.folder).exists()
    context.term()


@pytest.mark.parametrize(
    ("status", "words", "said"),
    [
        (-9, None, "killed by signal 9"),
        (3, None, "exit status 3, no last words"),
        (0, None, "exit status 0, no last words"),
        (1, Fatal("the runner broke"), "the runner broke"),
        (-9, Fatal("no memory", "Traceback\n  here\n"), "no memory"),
    ],
)
def test_its_last_words_are_the_cause_and_their_trace_is_logged(
    status: int, words: Fatal | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "splittime.engine"):
        assert cause_of_death(status, words) == said
    assert [record.message for record in caplog.records] == (["Traceback\n  here"] if words and words.trace else [])


def test_the_settings_own_error_is_what_it_failed_of() -> None:
    refused = ConfigError("no such model", param="model")
    found = failure("why", Fatal("words", error=refused.info))
    assert isinstance(found, ConfigError)
    assert found.info == refused.info
    for words in (None, Fatal("words")):
        found = failure("why", words)
        assert type(found) is EngineError
        assert str(found) == "why"
