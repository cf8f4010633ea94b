"""Replicas as actors of Ray, where that is installed: `pip install 'splittime[cluster]'`."""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.cluster.running import cluster_of, processes_with

from .conftest import FAST, ask, asking

pytest.importorskip("ray")
LISTENS, ANY = "0A", {"00000000", "00000000000000000000000000000000"}


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_replicas_are_actors_that_may_die_and_nothing_is_open_to_others(tmp_path):
    text = f'runner = "ray"\n{FAST}[replica]\ncpus = 0.2\n[scale]\nmin_replicas = 2\nmax_replicas = 2\nspare = 0\n'
    before = open_to_all()
    with cluster_of(tmp_path, text) as cluster:
        cluster.until(lambda: len(cluster.of_phase("serving")) == 2)
        assert open_to_all() <= before
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


def open_to_all() -> set[int]:
    """The ports on which some process of this machine listens for others than itself."""
    found = set()
    for family in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]]
        for address, state in ((row[1], row[3]) for row in rows):
            host, port = address.split(":")
            if state == LISTENS and host in ANY:
                found.add(int(port, 16))
    return found
