"""The controller's process on replicas that are small HTTP servers: what it decides is done, and found again."""

import asyncio
import json
import tomllib
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from patience import until_async
from splittime.cluster import keeper as keeper_module
from splittime.cluster.config import Cluster, cluster_config, launch_of
from splittime.cluster.keeper import FleetKeeper
from splittime.cluster.replica_process import ReplicaSeen
from splittime.cluster.state import REREAD, ClusterState, taken_cluster
from splittime.core.engine import EngineStats, Rest


class SmallReplicas:
    """As `ReplicaPlaces`: each replica is a path of one server, ready at once. stats: by name; what it answers."""

    def __init__(self) -> None:
        self.stats: dict[str, EngineStats] = {}
        self.dead: dict[str, str] = {}  # with their last words
        self.broken: set[str] = set()
        self.ended: list[str] = []
        self.asked: list[str] = []
        self.peers: dict[str, list[str]] = {}
        self.in_background: dict[str, bool] = {}
        self.address = ""
        self.num_refused = 0

    def start(self, name, launch, peers=(), *, in_background=False) -> None:
        self.in_background[name] = in_background
        self.peers[name] = [url.rpartition("/")[2] for url in peers]
        if self.num_refused:
            self.num_refused -= 1
            raise OSError("no process more")
        self.stats[name] = EngineStats(now_ns=0, blocks_total=64)

    def look(self):
        return {
            name: ReplicaSeen(name not in self.dead, f"{self.address}/{name}", self.dead.get(name, ""))
            for name in self.stats
        }

    def end(self, name) -> None:
        self.ended.append(name)
        self.stats.pop(name, None)

    def close(self) -> None:
        self.stats.clear()

    def busy(self, name, running: int) -> None:
        self.stats[name] = msgspec.structs.replace(self.stats[name], num_running=running)

    async def answer(self, request: web.Request) -> web.Response:
        name, what = request.match_info["name"], request.match_info["what"]
        if name not in self.stats:
            raise web.HTTPNotFound
        if request.method == "POST":
            self.asked.append(f"{name} {what}")
            rest = Rest("asleep", 2) if what == "sleep" else Rest()
            self.stats[name] = msgspec.structs.replace(self.stats[name], rest=rest)
        engine, is_ready = msgspec.to_builtins(self.stats[name]), name not in self.broken
        return web.json_response({"engine": engine, "server": {"is_engine_ready": is_ready}})


@asynccontextmanager
async def small_replicas():
    replicas, app = SmallReplicas(), web.Application()
    app.router.add_route("*", "/{name}/{what}", replicas.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    replicas.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield replicas
    await runner.cleanup()


@asynccontextmanager
async def kept(folder, replicas, **table):
    """A keeper that runs; it is cut off at the end, as if it were killed."""
    config = cluster_config({"serve": {"max_num_seqs": 4}, "folder": str(folder), **table})
    path = folder / "cluster.toml"
    keeper = FleetKeeper(path, Cluster(config, launch_of(config), folder), replicas)
    running = asyncio.create_task(keeper.run())
    yield keeper
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def listed(folder) -> list[str]:
    try:
        return [one["name"] for one in tomllib.loads((folder / "gateway-0.toml").read_text())["upstream"]]
    except OSError:
        return []


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(keeper_module, "TICK_S", 0.02)


SCALE = {"min_replicas": 1, "max_replicas": 3, "spare": 0, "up_delay_s": 0.0, "down_delay_s": 1.0}


@asynccontextmanager
async def fleet(tmp_path, **table):
    async with small_replicas() as replicas, kept(tmp_path, replicas, **table) as keeper:
        yield replicas, keeper


async def test_replicas_follow_the_load_and_drain_before_they_end(tmp_path):
    async with fleet(tmp_path, scale=SCALE) as (replicas, _):
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.busy("r1", 8)  # twice max_num_seqs
        await until_async(lambda: listed(tmp_path) == ["r1", "r2", "r3"])
        replicas.busy("r1", 1)
        replicas.busy("r2", 1)
        await until_async(lambda: len(listed(tmp_path)) == 1)
        (going,) = {"r1", "r2"} - set(listed(tmp_path))
        await asyncio.sleep(1.5)
        assert replicas.ended == ["r3"], "it had nothing to do, and the other has a request"
        replicas.busy(going, 0)
        await until_async(lambda: replicas.ended == ["r3", going])


async def test_a_lost_replica_is_replaced(tmp_path):
    async with fleet(tmp_path, scale=SCALE) as (replicas, _):
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.dead["r1"] = "one\n\ntwo\nthree\nfour\n"
        await until_async(lambda: listed(tmp_path) == ["r2"])
        assert replicas.ended == ["r1"]
        events = json.loads((tmp_path / "status.json").read_text())["events"]
        assert [(one["what"], one["name"]) for one in events] == [("start", "r1"), ("stop", "r1"), ("start", "r2")]
        assert [one["words"] for one in events] == ["", "two\nthree\nfour", ""]
        assert replicas.in_background == {"r1": False, "r2": False}


@pytest.mark.parametrize(("shares", "peers"), [(True, ["r1"]), (False, [])])
async def test_one_that_starts_is_told_of_those_that_serve_where_they_share(tmp_path, shares, peers):
    async with fleet(tmp_path, scale={**SCALE, "max_replicas": 2}, replica={"shares_blocks": shares}) as (replicas, _):
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.busy("r1", 5)
        await until_async(lambda: listed(tmp_path) == ["r1", "r2"])
        assert replicas.peers == {"r1": [], "r2": peers}


async def test_the_warm_pool_sleeps_and_is_woken(tmp_path):
    async with fleet(tmp_path, scale={**SCALE, "warm_pool": 1, "max_replicas": 2}) as (replicas, _):
        await until_async(lambda: replicas.asked == ["r2 sleep"])
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.busy("r1", 5)
        await until_async(lambda: listed(tmp_path)[:2] == ["r1", "r2"])
        assert "r2 wake" in replicas.asked
        assert replicas.in_background == {"r1": False, "r2": True}


async def test_another_controller_goes_on_where_one_was_killed(tmp_path):
    async with small_replicas() as replicas:
        async with kept(tmp_path, replicas, scale=SCALE):
            await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.start("r9", None)  # started, and not written down
        (tmp_path / "gateway-0.toml").unlink()
        async with kept(tmp_path, replicas, scale=SCALE) as keeper:
            await until_async(lambda: replicas.ended == ["r9"] and listed(tmp_path) == ["r1"])
            assert keeper.state.num_started == 1
            replicas.busy("r1", 8)
            await until_async(lambda: listed(tmp_path) == ["r1", "r2", "r3"])
            replicas.busy("r1", 0)
        async with kept(tmp_path, replicas, scale={**SCALE, "down_delay_s": 100.0}):
            await asyncio.sleep(0.5)
            assert len(listed(tmp_path)) == 3, "they were needed a moment ago"


async def test_another_revision_takes_the_place_of_the_first_and_a_bad_file_changes_nothing(tmp_path):
    async with fleet(tmp_path, scale=SCALE) as (replicas, keeper):
        await until_async(lambda: listed(tmp_path) == ["r1"])
        path = tmp_path / "cluster.toml"
        top = f'folder = "{tmp_path}"\n'
        scale = "[scale]\nmin_replicas = 1\nmax_replicas = 3\nspare = 0\n"
        path.write_text("folder = 1\n")
        (tmp_path / REREAD).touch()
        await until_async(lambda: "refused" in (tmp_path / "status.json").read_text())
        path.write_text(f"gateways = 2\n{top}")
        (tmp_path / REREAD).touch()
        await until_async(lambda: "cannot change while the cluster" in (tmp_path / "status.json").read_text())
        path.write_text(f"{top}[gateway]\nport = 8101\n")
        (tmp_path / REREAD).touch()
        await until_async(lambda: "[gateway]: port cannot change" in (tmp_path / "status.json").read_text())
        path.write_text(f'{top}[replica]\nkey_env = "NOT_THERE"\n')
        (tmp_path / REREAD).touch()
        await until_async(lambda: "the environment has no NOT_THERE" in (tmp_path / "status.json").read_text())
        assert list(replicas.stats) == ["r1"]
        path.write_text(f"{top}[serve]\nmax_num_seqs = 5\n{scale}")
        (tmp_path / REREAD).touch()
        await until_async(lambda: list(replicas.stats) == ["r2"] and listed(tmp_path) == ["r2"])
        assert keeper.state.replicas["r2"].revision == keeper.state.revision
        assert replicas.in_background == {"r1": False, "r2": True}
        assert list(keeper.state.launches) == [keeper.state.revision]
        path.write_text(f"{top}[serve]\nmax_num_seqs = 6\n{scale}")  # and nobody has applied it
        taken = taken_cluster(tmp_path)
        assert (taken.config.serve, taken.config.scale.spare) == ({"max_num_seqs": 5}, 0)
        assert taken.launch.max_num_seqs == 5


async def test_an_order_that_fails_is_told_and_what_it_was_to_start_is_lost(tmp_path):
    async def body(replicas, keeper) -> None:
        await until_async(lambda: listed(tmp_path) == ["r2"])
        events = json.loads((tmp_path / "status.json").read_text())["events"]
        told = [("failed", ""), ("stop", "r1"), ("start", "r2")]
        assert [(one["what"], one["name"]) for one in events] == told
        assert events[0]["why"] == "start: no process more"
        assert len(asyncio.all_tasks()) < 30, "a tick leaves none behind"

    async with small_replicas() as replicas:
        replicas.num_refused = 1
        async with kept(tmp_path, replicas, scale=SCALE) as keeper:
            await body(replicas, keeper)


async def test_one_whose_engine_is_gone_or_that_was_put_to_sleep_is_not_asked_until_it_serves(tmp_path):
    async with fleet(tmp_path, scale={**SCALE, "max_replicas": 1}) as (replicas, _):
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.broken.add("r1")
        await until_async(lambda: listed(tmp_path) == ["none-yet"])
        replicas.broken.clear()
        await until_async(lambda: listed(tmp_path) == ["r1"])
        replicas.stats["r1"] = msgspec.structs.replace(replicas.stats["r1"], rest=Rest("asleep", 2))
        await until_async(lambda: replicas.asked == ["r1 wake"])
        await until_async(lambda: listed(tmp_path) == ["r1"])


def test_names_go_on_behind_those_of_a_cluster_that_was_killed(tmp_path):
    config = cluster_config({})
    cluster = Cluster(config, launch_of(config), tmp_path)
    assert ClusterState.begun(cluster).num_started == 0
    (tmp_path / "replicas").mkdir()
    for name in ("r9", "r10", "rx"):
        (tmp_path / "replicas" / f"{name}.json").touch()
    assert ClusterState.begun(cluster).num_started == 10
