"""Servers of our own start, serve and end; one that runs has its knobs back, whatever ended the tune."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import until
from splittime.bench.event_loop import ENDING, sigterm_interrupts
from splittime.bench.own_server import as_typed
from splittime.core.errors import ConfigError, Conflict, EngineError
from splittime.tune import servers
from splittime.tune.notebook import MeasuredRun, Notebook
from splittime.tune.servers import OwnServers, RunningServer
from splittime.wire.target import Target, get_json

SICK = {"max_num_seqs": 1, "num_threads": 1}
LOAD = ["--rate", "40", "--input-tokens", "16", "--output-tokens", "30", "--duration", "2s", "--warm-up", "0s"]


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    with OwnServers(None, SICK).serving({}) as target:
        yield target


def knobs(server: Target) -> dict:
    return get_json(f"{server.base_url}/knobs", None)


def test_settings_are_typed_as_flags() -> None:
    own = OwnServers("MODEL", {"max_num_seqs": 1, "enable_prefix_caching": True, "api_key": None})
    assert own.flags({"max_num_seqs": 8, "enable_prefix_caching": False}) == [
        *("MODEL", "--max-num-seqs", "8", "--no-enable-prefix-caching")
    ]
    assert as_typed("names", ["a", "b"]) == ["--names", "a", "--names", "b"]
    with pytest.raises(ConfigError, match="not known yet"):
        own.flags({"num_blocks": 100})
    own.block_bytes = 1024
    assert own.flags({"num_blocks": 100})[-2:] == ["--kv-cache-memory-bytes", "102400"]


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineError, match="did not start") as caught, OwnServers("/nowhere", {}).serving({}):
        pass
    assert "/nowhere" in str(caught.value.info.hint)


def test_a_change_ends_with_what_it_was_made_for(server: Target) -> None:
    running = RunningServer(server)
    with pytest.raises(ZeroDivisionError), running.serving({"max_num_seqs": 7}):
        1 / (knobs(server)["max_num_seqs"] - 7)
    assert knobs(server) == running.before
    with pytest.raises(ConfigError, match="while a server runs"), running.serving({"num_threads": 2}):
        pass


BEFORE, CHANGE = {"max_num_seqs": 4}, {"max_num_seqs": 9}


def faked(monkeypatch: pytest.MonkeyPatch, on_patch: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns the knobs of a server that is not there. on_patch: is called with each PATCH."""
    now = dict(BEFORE)
    monkeypatch.setattr(servers, "get_json", lambda url, key: dict(now))
    monkeypatch.setattr(servers, "patch_json", lambda url, body, key: on_patch(body))
    return now


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("timed out")])
def test_a_change_whose_answer_never_came_is_undone(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_patch(body: dict[str, Any]) -> None:
        now.update(body)
        if body == CHANGE:
            raise error

    now = faked(monkeypatch, on_patch)
    with pytest.raises(type(error)), RunningServer(Target(url="http://nobody")).serving(CHANGE):
        pass
    assert now == BEFORE


def test_a_server_that_is_gone_may_still_have_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_patch(body: dict[str, Any]) -> None:
        if body == BEFORE:
            raise EngineError("cannot ask http://nobody/knobs")

    faked(monkeypatch, on_patch)
    with (
        pytest.raises(EngineError, match="its knobs may still be"),
        RunningServer(Target(url="http://nobody")).serving(CHANGE),
    ):
        pass


def test_what_somebody_else_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = faked(monkeypatch, lambda body: now.update(body))
    running = RunningServer(Target(url="http://nobody"))
    with pytest.raises(Conflict, match="left it at 9, it is 2") as caught, running.serving(CHANGE):
        now["max_num_seqs"] = 2
    assert "it was 4" in str(caught.value.info.hint)
    with pytest.raises(Conflict, match="left it at 4, it is 2"), running.serving(CHANGE):
        pass
    with pytest.raises(Conflict, match="left it at 4, it is 2"):
        running.apply(CHANGE)
    assert now == {"max_num_seqs": 2}


def test_what_is_applied_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = faked(monkeypatch, lambda body: now.update(body))
    RunningServer(Target(url="http://nobody")).apply(CHANGE)
    assert now == CHANGE


@pytest.mark.parametrize("sign", ENDING)
def test_a_second_signal_waits_until_the_knobs_are_back(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_patch(body: dict[str, Any]) -> None:
        if body == BEFORE:
            signal.raise_signal(sign)
        now.update(body)

    now = faked(monkeypatch, on_patch)
    with sigterm_interrupts():
        handlers = [signal.getsignal(one) for one in ENDING]
        with pytest.raises(KeyboardInterrupt), RunningServer(Target(url="http://nobody")).serving(CHANGE):
            pass
        assert [signal.getsignal(one) for one in ENDING] == handlers
    assert now == BEFORE


@pytest.mark.timeout(300)  # beside others a command may take a minute to begin, and each of its runs as long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tune_leaves_the_knobs_as_they_were(server: Target, tmp_path: Path, sign: int) -> None:
    before, path = knobs(server), tmp_path / "tune.jsonl"
    flags = ["--url", server.base_url, "--slo", "ttft_p99=1ms", "--knob", "max_num_seqs", "--notebook", str(path)]
    command = [sys.executable, "-m", "splittime.cli.main", "tune", *flags, *LOAD, "--output-tokens", "10"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is not None or knobs(server) != before, limit_s=240.0)
        process.send_signal(sign)
        assert "as before" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
    finally:
        process.kill()
    assert knobs(server) == before
    about = json.loads(path.read_bytes().splitlines()[0])["about"]
    lines = Notebook(path, about).lines
    assert any(isinstance(line, MeasuredRun) and line.changes == {} for line in lines)


def test_a_server_ends_with_the_tune_that_was_killed(tmp_path: Path) -> None:
    code = """import sys, time
from splittime.tune.servers import OwnServers
with OwnServers(None, {"num_threads": 1}).serving({}) as target:
    print(target.base_url, flush=True)
    time.sleep(600)"""
    tune = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert tune.stdout is not None
    url = tune.stdout.readline().strip()
    get_json(f"{url}/knobs", None)
    tune.kill()
    tune.wait()
    tune.stdout.close()

    def is_gone() -> bool:
        with contextlib.suppress(EngineError):
            get_json(f"{url}/knobs", None)
            return False
        return True

    until(is_gone)
