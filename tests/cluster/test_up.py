"""`splittime up` with real processes, which are killed, put to sleep, replaced and ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import FAST, asking, cluster_of, processes_with


def test_a_cluster_lives_through_kills_and_leaves_nobody(tmp_path):
    text = FAST + "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"
    with cluster_of(tmp_path, text) as cluster:
        held = cluster.ask()  # before there is a replica
        assert held[0] == 200, held
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        first, second = (cluster.pid_of(name) for name in ("r1", "r2"))
        with asking(cluster) as answers:
            os.kill(cluster.controller_pid(), signal.SIGKILL)
            os.kill(first, signal.SIGKILL)
            cluster.until(lambda: cluster.of_phase("serving") == ["r2", "r3"])
        assert {status for status, _ in answers} == {200}, answers
        assert cluster.pid_of("r2") == second, "it went on without a controller"
        os.kill(cluster.pid_of("gateway-0"), signal.SIGKILL)
        cluster.until(lambda: answers_now(cluster))
        shown = shell(tmp_path, "--status", "--json")
        assert [one["phase"] for one in json.loads(shown)["replicas"]] == ["serving", "serving"]
        pids = [cluster.pid_of(name) for name in ("r2", "r3", "gateway-0")]
    assert not [pid for pid in pids if is_running(pid)]
    assert not processes_with(str(tmp_path))


def answers_now(cluster) -> bool:
    try:
        return cluster.ask()[0] == 200
    except OSError:
        return False


def shell(folder, *words: str) -> bytes:
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", "cluster.toml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True).stdout


def test_a_killed_up_takes_all_with_it(tmp_path):
    text = FAST + "[scale]\nmin_replicas = 1\nmax_replicas = 1\nspare = 0\n"
    with cluster_of(tmp_path, text) as cluster:
        cluster.until(lambda: (cluster.folder / "replicas" / "r1.json").exists())
        pids = [cluster.pid_of(name) for name in ("r1", "gateway-0")] + [cluster.controller_pid()]
        cluster.kill()
        cluster.until(lambda: not [pid for pid in pids if is_running(pid)], 30)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_to_none_and_back_with_and_without_a_warm_pool(tmp_path):
    scale = "[scale]\nmin_replicas = 0\nspare = 0\nidle_s = 3\ndown_delay_s = 2\n"
    text = FAST + scale + "warm_pool = 1\n"
    with cluster_of(tmp_path, text) as cluster:
        status, stream = cluster.ask(stream=True)
        assert status == 200
        assert b": queued" in stream, "told so while it waits"
        assert b"[DONE]" in stream
        cluster.until(lambda: cluster.of_phase("sleeping") == ["r1"])
        begin_s = time.monotonic()
        assert cluster.ask()[0] == 200
        woken_s = time.monotonic() - begin_s
        assert cluster.of_phase("serving") == ["r1"], "it was woken"
        assert woken_s < 30
        (tmp_path / "cluster.toml").write_text(
            (tmp_path / "cluster.toml").read_text().replace("warm_pool = 1", "warm_pool = 0")
        )
        shell(tmp_path, "--apply")
        cluster.until(lambda: cluster.status()["replicas"] == [])
        assert cluster.ask()[0] == 200


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_another_revision_replaces_replicas_without_an_error(tmp_path):
    text = FAST + "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"
    with cluster_of(tmp_path, text) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        before = cluster.status()["revision"]
        config = tmp_path / "cluster.toml"
        config.write_text(config.read_text().replace("max_num_seqs = 4", "max_num_seqs = 5"))
        with asking(cluster, 3, max_tokens=30, stream=True) as answers:
            shell(tmp_path, "--apply")
            cluster.until(lambda: is_rolled(cluster, before))
            config.write_text("max_num_seqs = [\n")
            cluster.process.send_signal(signal.SIGHUP)
            cluster.until(lambda: cluster.status()["events"][-1]["what"] == "refused")
        assert {status for status, _ in answers} == {200}
        assert all(b"[DONE]" in body and b"error" not in body for _, body in answers)


def is_rolled(cluster, before: str) -> bool:
    replicas = cluster.status()["replicas"]
    return len(replicas) == 2 and all(one["phase"] == "serving" and one["revision"] != before for one in replicas)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("setting", "verdict"), [("max_num_seqs = 5", "promoted"), ("bad", "rolled_back")])
def test_a_canary_decides_on_another_revision(tmp_path, setting, verdict):
    canary = "[canary]\nmin_requests = 20\nmargin = 0.9\nmax_s = 60\n"
    scale = "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"
    with cluster_of(tmp_path, FAST + canary + scale) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        before = cluster.status()["revision"]
        config = tmp_path / "cluster.toml"
        bad = "max_num_seqs = 4\nmax_model_len = 8"  # all requests are refused
        config.write_text(config.read_text().replace("max_num_seqs = 4", bad if setting == "bad" else setting))
        with asking(cluster, 3, max_tokens=12):
            shell(tmp_path, "--apply")
            cluster.until(lambda: verdict in [one["what"] for one in cluster.status()["events"]])
            assert (cluster.status()["revision"] == before) == (verdict == "rolled_back")
