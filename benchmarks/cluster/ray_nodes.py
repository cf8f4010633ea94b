"""A Ray of several nodes, all on this machine: one of them can be killed, and the others stay."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cluster.running import children_of, command_of, processes_with
from splittime.cluster.ray_head import OWN_RAY

PLACE = "place"  # a resource that each node has once


@contextmanager
def ray_of(nodes: int) -> Iterator[str]:
    """Gives the address of a Ray whose first node has no place for a replica, and so many others one each."""
    os.environ.update(OWN_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))  # before Ray is imported
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, resources={PLACE: 1})
        yield cluster.address
    finally:
        cluster.shutdown()


def raylet_with_a_replica() -> int:
    """Returns the process of a node on which a replica runs."""
    for raylet in processes_with("raylet/raylet"):
        if any(b"ray::ReplicaActor" in command_of(pid) for pid in children_of(raylet)):
            return raylet
    raise LookupError("no node has a replica")
