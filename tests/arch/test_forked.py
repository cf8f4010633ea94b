"""A forked command is as one that was started: its words, folder, environment, signals and end."""

import os
import signal
import subprocess
import time

import pytest

import forked


def test_it_says_and_ends_as_the_command_does(tmp_path):
    (tmp_path / "splittime.toml").write_text("max_num_seqs = 3\n")
    shown = forked.run(["config", "show"], tmp_path, {**os.environ, "SPLITTIME_PORT": "9"})
    told = {line.split()[0]: line.split()[1] for line in shown.stdout.splitlines()}
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (told["max_num_seqs"], told["port"]) == ("3", "9")
    assert "SPLITTIME_PORT" not in os.environ
    wrong = forked.run(["nosuch"], tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "nosuch" in wrong.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_and_its_end_is_told(tmp_path, number):
    config = tmp_path / "gateway.toml"
    config.write_text('port = 0\n[[upstream]]\nname = "a"\nurl = "http://127.0.0.1:9"\nmodels = ["a"]\n')
    with (tmp_path / "words").open("wb") as words:
        command = forked.Command(
            ["gateway", "--config", "gateway.toml", "--json"], None, tmp_path, None, words.fileno()
        )
    assert command.stdout.readline().startswith(b'{"gateway"')
    assert command.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(0.01)
    command.send_signal(number)
    assert command.wait(60) == command.poll() == (0 if number == signal.SIGTERM else -9)
    command.kill()  # of one that has ended: nothing
    command.stdout.close()


def test_one_that_does_not_end_is_ended(tmp_path):
    begin_s = time.monotonic()
    done = forked.run(["bench", "mock-server", "--port", "0"], tmp_path, timeout=1.0)
    assert done.returncode == -9
    assert time.monotonic() - begin_s < 60
