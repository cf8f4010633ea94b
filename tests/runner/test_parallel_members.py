"""Who began: of several ranks that end, the error names the one for which the others did, and says what it said."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import tiny_checkpoint

from splittime.core.errors import ConfigError, EngineError
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.ranks import members as members_module
from splittime.runner.ranks.members import Members

PATIENCE_S = 60


@pytest.fixture
def members(monkeypatch):
    """Three other ranks that have arrived."""
    monkeypatch.setattr(members_module, "MODULE", "fake_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    made = Members(RunnerConfig(model_path="", tensor_parallel_size=4))
    made.meet()
    yield made
    made.end()


def tell(members, **orders):
    """By rank; and wait until one of them has ended."""
    told = threading.Event()
    members.watch(lambda error: told.set())
    members.send(json.dumps({name.removeprefix("rank"): order for name, order in orders.items()}).encode())
    assert told.wait(PATIENCE_S)
    return members.cause()


def test_the_one_that_was_killed_is_named_not_those_that_lost_it(members):
    error = tell(members, rank1="lost", rank2="die", rank3="lost")
    assert isinstance(error, EngineError)
    assert str(error) == f"rank 2 (process {members.pids[1]}) was killed by SIGKILL"
    with pytest.raises(EngineError, match="rank 2"):
        members.check()


def test_the_one_that_says_nothing_is_named(members, monkeypatch):
    """It neither ends nor is stopped; the others lose patience."""
    monkeypatch.setattr("splittime.runner.ranks.members.CAUSE_PATIENCE_S", 3)
    error = tell(members, rank1="lost", rank2="hold", rank3="lost")
    assert f"rank 2 (process {members.pids[1]})" in str(error)
    assert str(error).endswith("did not answer in time")


def test_it_may_have_been_the_first_rank(members):
    error = tell(members, rank1="lost", rank2="lost", rank3="lost")
    assert str(error) == "the other ranks waited for the first in vain"


def test_last_words_are_told(members):
    error = tell(members, rank1="hold", rank3="fail")
    assert str(error).splitlines() == [f"rank 3 (process {members.pids[2]}): KeyError: 'a'", "Traceback ..."]


def test_our_own_errors_stay_what_they_are(members):
    error = tell(members, rank2="refuse", rank1="lost")
    assert isinstance(error, ConfigError)
    assert (str(error), error.info.param) == ("not so", "dtype")


def test_the_one_that_is_stopped_is_named(members):
    members.check()
    os.kill(members.pids[2], signal.SIGSTOP)
    os.waitid(os.P_PID, members.pids[2], os.WSTOPPED | os.WNOWAIT)
    assert str(members.cause()) == f"rank 3 (process {members.pids[2]}) is stopped"


def test_their_end_leaves_nothing(members):
    pids, folder = members.pids, members.folder
    assert folder.stat().st_mode & 0o077 == 0
    members.end()
    members.end()
    assert not folder.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_cannot_even_start_ends_the_load(tmp_path, monkeypatch):
    tiny_checkpoint.write(tmp_path)
    monkeypatch.setattr(members_module, "MODULE", "no_such_module_at_all")
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) ended with exit status 1"):
        load_torch_runner(RunnerConfig(model_path=str(tmp_path), tensor_parallel_size=2, packed_cache="off"))
