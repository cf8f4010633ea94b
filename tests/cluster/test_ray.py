"""Replicas as actors of Ray, where that is installed: `pip install 'splittime[cluster]'`."""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.cluster.running import cluster_of, processes_with

from .conftest import FAST, ask, asking

pytest.importorskip("ray")
LISTENS = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # as the kernel has it


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_replicas_are_actors_that_may_die_and_nothing_is_open_to_others(tmp_path):
    text = f'runner = "ray"\n{FAST}[replica]\ncpus = 0.2\n[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n'
    with cluster_of(tmp_path, text) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        assert open_to_all() == []
        worker = processes_with("ray::ReplicaActor")[0]
        with asking(cluster) as answers:
            os.kill(worker, signal.SIGKILL)
            cluster.until(lambda: "r3" in cluster.of_phase("serving"))
            os.kill(cluster.controller_pid(), signal.SIGKILL)
            named = cluster.of_phase("serving")
        assert {status for status, _ in answers} == {200}
        cluster.until(lambda: ask(cluster)[0] == 200 and cluster.of_phase("serving") == named)
    assert not processes_with("ray::ReplicaActor")
    assert not processes_with("gcs_server")


def open_to_all() -> list[str]:
    """The addresses at which a process of Ray's listens for others than this machine."""
    sockets = {name for pid in processes_with("ray") for name in open_files(pid)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets]
    assert listening, "it listens somewhere"
    return [row[1] for row in listening if row[1].partition(":")[0] not in LOOPBACK]


def open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
