"""A Ray of several nodes, all on this machine: one of them can be killed, and the others stay."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.cluster.running import children_of, command_of, processes_with, say
from splittime.cluster.ray_places import OWN_RAY

PLACE = "place"  # a resource that each node has once


@contextmanager
def ray_of(nodes: int) -> Iterator[str]:
    """Gives the address of a Ray whose first node has no place for a replica, and so many others one each."""
    os.environ.update(OWN_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))  # before Ray is imported
    from ray.cluster_utils import Cluster

    say(f"starting a Ray of {nodes + 1} nodes")
    cluster = Cluster()
    try:
        _add(cluster, num_cpus=1, include_dashboard=False)
        for _ in range(nodes):
            _add(cluster, num_cpus=1, resources={PLACE: 1})
        yield cluster.address
    finally:
        cluster.shutdown()


def _add(cluster: Any, **told: Any) -> None:
    """Ray gives a node half a minute to start, which a busy machine may not have."""
    for is_last in (False, False, True):
        try:
            cluster.add_node(**told)
        except Exception as error:  # of no class of its own
            say(f"a node did not start: {error}")
            if is_last:
                raise
        else:
            return


def raylet_with_a_replica() -> int:
    """Returns the process of a node on which a replica runs."""
    for raylet in processes_with("raylet/raylet"):
        if any(b"ray::ReplicaActor" in command_of(pid) for pid in children_of(raylet)):
            return raylet
    raise LookupError("no node has a replica")
