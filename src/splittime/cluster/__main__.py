"""The controller's process, as `splittime up` starts it: CONFIG, the cluster's folder, the process of `up`, and the
address of Ray."""

import asyncio
import signal
import sys
from pathlib import Path

from splittime.cluster.config import Cluster, read_cluster
from splittime.cluster.keeper import FleetKeeper
from splittime.cluster.places import LocalPlaces, ReplicaPlaces
from splittime.cluster.state import REPLICAS, taken_cluster
from splittime.core.this_process import end_when_gone, log_to_stderr


def main() -> None:
    path, folder, up, ray_address = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    end_when_gone(up)
    log_to_stderr()
    cluster = taken_cluster(folder) or read_cluster(path)
    asyncio.run(_keep(FleetKeeper(path, cluster, _places(cluster, up, ray_address))))


async def _keep(keeper: FleetKeeper) -> None:
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, keeper.end)
    await keeper.run()


def _places(cluster: Cluster, up: int, ray_address: str) -> ReplicaPlaces:
    if cluster.config.runner == "local":
        return LocalPlaces(cluster.folder / REPLICAS, up)
    from splittime.cluster.ray_places import RayPlaces

    return RayPlaces(cluster, ray_address)


if __name__ == "__main__":
    main()
