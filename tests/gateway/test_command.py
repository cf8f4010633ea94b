"""`splittime gateway` from a shell: what it says, and its exit codes."""

import json
import socket
import subprocess

import forked

from .conftest import upstream


def run(folder, text: str, *flags: str) -> subprocess.CompletedProcess:
    (folder / "gateway.toml").write_text(text)
    return forked.run(["gateway", "--config", "gateway.toml", *flags], folder)


def test_a_good_config_is_said_to_be_good(tmp_path):
    done = run(tmp_path, upstream("a", "http://127.0.0.1:8000", "m"), "--check", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["upstreams"] == [{"name": "a", "url": "http://127.0.0.1:8000", "models": ["m"]}]
    done = run(tmp_path, upstream("a", "http://127.0.0.1:8000", "m"), "--check")
    assert "the config is good" in done.stderr


def test_what_is_wrong_is_said_with_a_way_out(tmp_path):
    text = upstream("a", "http://127.0.0.1:8000", "m")
    for wrong, words in (
        ("[hedge]\nafter = 1\n" + text, ("error: hedge is not built", "hint:  take it out")),
        (text + "max_in_flight = -1\n", ("upstream[0].max_in_flight = -1 must be 0 to 65536", "hint:")),
        (text + 'key_env = "NOT_SET_ANYWHERE"\n', ("the environment has no NOT_SET_ANYWHERE", "hint:")),
    ):
        done = run(tmp_path, wrong)
        assert done.returncode == 2
        assert all(word in done.stderr for word in words), done.stderr


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, f"port = {port}\n" + upstream("a", "http://127.0.0.1:8000", "m"))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_a_ledger_file_that_cannot_be_is_said(tmp_path):
    done = run(tmp_path, 'port = 0\nledger_file = "no/where.sqlite"\n' + upstream("a", "http://127.0.0.1:8000", "m"))
    assert done.returncode == 2
    assert "no/where.sqlite" in done.stderr
