"""`splittime up` with real processes, which are killed, put to sleep, replaced and ended."""

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.cluster.running import cluster_of, is_running, processes_with

from .conftest import FAST, ask, asking

TWO = "[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n"


@pytest.mark.timeout(400)
def test_a_cluster_lives_through_kills_and_leaves_nobody(tmp_path):
    with cluster_of(tmp_path, FAST + TWO, gateways=2) as cluster:
        status, answer = ask(cluster)  # before there is a replica
        assert status == 200, answer
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        first, second = (cluster.pid_of(name) for name in ("r1", "r2"))
        with asking(cluster) as answers:
            os.kill(cluster.controller_pid(), signal.SIGKILL)
            os.kill(first, signal.SIGKILL)
            cluster.until(lambda: cluster.of_phase("serving") == ["r2", "r3"])
        assert {status for status, _ in answers} == {200}, answers
        assert cluster.pid_of("r2") == second, "it went on without a controller"
        killed = cluster.pid_of("gateway-0")
        with asking(cluster, tries=3) as answers:  # as often as OpenAI's client
            os.kill(killed, signal.SIGKILL)
            cluster.until(lambda: len(answers) > 20 and cluster.pid_of("gateway-0") != killed)
        assert {status for status, _ in answers} == {200}, "the other one is the way in"
        assert_nobody_else_gets_the_port(tmp_path, cluster)
        shown = shell(tmp_path, "--status", "--json")
        assert [one["phase"] for one in json.loads(shown)["replicas"]] == ["serving", "serving"]
        pids = [cluster.pid_of(name) for name in ("r2", "r3", "gateway-0", "gateway-1")]
    assert not [pid for pid in pids if is_running(pid)]
    assert not processes_with(str(tmp_path))


def assert_nobody_else_gets_the_port(folder, cluster) -> None:
    """Another cluster of the same user, who might share it."""
    (folder / "other.toml").write_text(cluster.config.read_text())
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", "other.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"is in use" in done.stderr
    assert b"shared_port" in done.stderr


def shell(folder, *words: str) -> bytes:
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", "cluster.toml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True).stdout


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_a_replica_that_cannot_start_says_why(tmp_path):
    with cluster_of(tmp_path, "[serve]\nkv_cache_memory_bytes = 1\n[scale]\nspare = 0\n") as cluster:
        cluster.until(lambda: "r1 has ended, and said: " in (tmp_path / "words").read_text())
        said = (tmp_path / "words").read_text().partition("r1 has ended, and said: ")[2]
        (words,) = {one["words"] for one in cluster.status()["events"] if one["name"] == "r1" and one["words"]}
        assert "of 1 bytes holds 0 blocks" in words
        assert said.split()[:4] == words.split()[:4]


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_a_killed_up_takes_all_with_it(tmp_path):
    with cluster_of(tmp_path, FAST) as cluster:
        cluster.until(lambda: (cluster.folder / "replicas" / "r1.json").exists())
        pids = [cluster.pid_of(name) for name in ("r1", "gateway-0")] + [cluster.controller_pid()]
        cluster.kill()
        cluster.until(lambda: not [pid for pid in pids if is_running(pid)])


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_to_none_and_back_with_and_without_a_warm_pool(tmp_path):
    scale = "[scale]\nmin_replicas = 0\nspare = 0\nidle_s = 3\ndown_delay_s = 2\nwarm_pool = 1\n"
    with cluster_of(tmp_path, FAST + scale) as cluster:
        status, stream = ask(cluster, stream=True)
        assert status == 200
        assert b": queued" in stream, "told so while it waits"
        assert b"[DONE]" in stream
        (asleep,) = cluster.until(lambda: rests(cluster))
        assert ask(cluster)[0] == 200
        assert asleep in cluster.of_phase("serving"), "it was woken"
        cluster.apply("warm_pool = 1", "warm_pool = 0")
        cluster.until(lambda: cluster.status()["replicas"] == [])
        assert ask(cluster)[0] == 200


def rests(cluster) -> list[str]:
    """The replica that sleeps, where there is no other."""
    sleeping = cluster.of_phase("sleeping")
    return sleeping if len(sleeping) == len(cluster.status()["replicas"]) == 1 else []


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_another_revision_replaces_replicas_without_an_error(tmp_path):
    with cluster_of(tmp_path, FAST + TWO) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        before = cluster.status()["revision"]
        cluster.config.write_text(cluster.config.read_text().replace("max_num_seqs = 4", "max_num_seqs = 5"))
        with asking(cluster, 3, max_tokens=30, stream=True) as answers:
            shell(tmp_path, "--apply")
            cluster.until(lambda: is_rolled(cluster, before))
        assert {status for status, _ in answers} == {200}
        assert all(b"[DONE]" in body and b"error" not in body for _, body in answers)


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_one_that_leaves_hands_its_blocks_to_the_one_that_comes(tmp_path):
    """Another number of slots is another revision, of the same layout; each has one replica."""
    one = "[replica]\nshares_blocks = true\n[scale]\nmin_replicas = 1\nmax_replicas = 1\nspare = 0\n"
    prompt = "def f(x):\n    return x\n" * 20
    with cluster_of(tmp_path, FAST + one) as cluster:
        first = json.loads(ask(cluster, prompt=prompt)[1])
        cluster.apply("max_num_seqs = 4", "max_num_seqs = 5")
        cluster.until(lambda: cluster.of_phase("serving") == ["r2"] and len(cluster.status()["replicas"]) == 1)
        again = json.loads(ask(cluster, prompt=prompt)[1])
    assert cached(first) == 0
    assert cached(again) >= first["usage"]["prompt_tokens"] // 2
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def cached(answer) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def is_rolled(cluster, before: str) -> bool:
    replicas = cluster.status()["replicas"]
    return len(replicas) == 2 and all(one["phase"] == "serving" and one["revision"] != before for one in replicas)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("setting", "verdicts"),
    [("max_num_seqs = 5", {"promoted", "rolled_back"}), ("max_num_seqs = 4\nmax_model_len = 8", {"rolled_back"})],
    ids=["as_good", "refuses_all"],
)
def test_a_canary_decides_on_another_revision(tmp_path, setting, verdicts):
    """One that is as good may be rolled back too where a busy machine's noise leaves it undecided until `max_s`."""
    canary = "[canary]\nmin_requests = 20\nmargin = 0.9\nmax_s = 60\n"
    with cluster_of(tmp_path, FAST + canary + TWO) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        before = cluster.status()["revision"]
        with asking(cluster, 3, max_tokens=12, prompt="def f(x):\n" * 20):
            cluster.apply("max_num_seqs = 4", setting)
            found = cluster.until(lambda: {one["what"] for one in cluster.status()["events"]} & verdicts)
        assert (cluster.status()["revision"] == before) == (found == {"rolled_back"})
