"""What the controller sees: replicas by their processes and gauges, gateways by their own certificates."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import time

import aiohttp
import pytest
from aiohttp import web

from splittime.cli import up as cli_up
from splittime.cluster.config import Cluster, cluster_config, launch_of
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.observed import ReplicaGauges, ReplicaWatch, gauges_of
from splittime.cluster.places import KEPT_LOGS, LocalPlaces
from splittime.cluster.replica_process import ProcessMark, ReplicaProcess, ReplicaSeen, write_mark
from splittime.cluster.state import LOST_S, ManagedReplica, ReplicaPhase
from splittime.cluster.up import UpCluster
from splittime.core.engine import EngineStats, Rest


def test_places_know_nothing_of_a_strange_name_and_keep_the_last_logs(tmp_path):
    for number in range(KEPT_LOGS + 3):
        (tmp_path / f"r{number}.json").write_text("[1, 1]")
        (tmp_path / f"r{number}.log").touch()
        os.utime(tmp_path / f"r{number}.log", (number, number))
    places = LocalPlaces(tmp_path, os.getpid())
    places.end("strange")
    places.close()
    assert places.look() == {}
    assert {path.name for path in tmp_path.iterdir()} == {f"r{number}.log" for number in range(3, KEPT_LOGS + 3)}


def event(at_unix_s: float, name: str, **more: str) -> dict[str, object]:
    return {"at_unix_s": at_unix_s, "what": "lost", "name": name, "revision": "a", "why": "it has ended", **more}


def test_each_replicas_last_words_are_told_once(tmp_path):
    """Though several end in one tick, the wall clock is set back, and an earlier version kept no words."""
    config, said = cluster_config({}), []
    up = UpCluster(tmp_path / "c.toml", Cluster(config, launch_of(config), tmp_path), said.append)
    events = [event(2.0, "r1", words="no room"), event(2.0, "r2", words="no card"), event(2.0, "r3")]
    for more in ([], [event(1.0, "r4", words="no key")], []):
        events += more
        (tmp_path / "status.json").write_text(json.dumps({"events": events, "replicas": []}))
        up._tell_replicas()
    told = [f"{name} has ended, and said: no {what}" for name, what in (("r1", "room"), ("r2", "card"), ("r4", "key"))]
    assert [line for line in said if "said" in line] == told


def test_what_a_replica_said_does_not_steer_the_terminal(capsys):
    events = [event(1.0, "r1", words="bad \x1b[2J\x9b2Jmodel"), event(1.0, "r2")]
    cli_up._show({"wanted": 1, "replicas": [], "gateways": [], "trial": None, "events": events}, as_json=False)
    cli_up._say("bad \x1b[2J\x9b2Jmodel")
    told = capsys.readouterr().err
    assert "It said: bad" in told
    assert "\x1b" not in told
    assert "\x9b" not in told


def test_a_gateway_is_trusted_by_its_own_certificate_whatever_its_name(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    for name in ("own", "other"):
        files = ["-out", str(tmp_path / f"{name}.pem"), "-keyout", str(tmp_path / f"{name}.key")]
        make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=example.com", "-days", "9"]
        subprocess.run([*make, *files], check=True, capture_output=True, timeout=120)

    async def seen(shown: str) -> int | None:
        app = web.Application()
        answer = {"queue": {"tokens": 7, "requests": 1}, "config": "1:abc"}

        async def stats(request: web.Request) -> web.Response:
            return web.json_response(answer)

        app.router.add_get("/stats", stats)
        runner = web.AppRunner(app)
        await runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(tmp_path / f"{shown}.pem", tmp_path / f"{shown}.key")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        files = {"ssl_certfile": str(tmp_path / "own.pem"), "ssl_keyfile": str(tmp_path / "own.key")}
        config = cluster_config({"gateway": {"port": runner.addresses[0][1], **files}})
        write_mark(tmp_path / "gateway-0.json", os.getpid())
        gateways = ManagedGateways(Cluster(config, launch_of(config), tmp_path))
        async with aiohttp.ClientSession() as session:
            await gateways.look(session)
        await runner.cleanup()
        assert gateways.seen[0].is_alive
        return gateways.seen[0].gauges and gateways.seen[0].gauges.held_tokens

    assert asyncio.run(seen("own")) == 7
    assert asyncio.run(seen("other")) is None


GAUGES = ReplicaGauges(10, 100, True)


def test_a_replica_is_lost_when_it_is_gone_silent_or_too_slow():
    replica = ManagedReplica("r", ReplicaPhase.STARTING, since_unix_s=0.0)
    assert ReplicaWatch(replica, start_s=5, at_s=0).is_lost(0), "it was to be ready long ago"
    replica = ManagedReplica("r", ReplicaPhase.SERVING, since_unix_s=0.0)
    watch = ReplicaWatch(replica, start_s=5, at_s=0)
    watch.note(ReplicaSeen(True, "http://x"), GAUGES, 1)
    assert not watch.is_lost(1 + LOST_S)
    watch.note(ReplicaSeen(True, "http://x"), None, 2)
    assert watch.is_lost(1.1 + LOST_S)
    watch.note(ReplicaSeen(True, "http://x"), GAUGES, 20)
    assert not watch.is_lost(20)
    watch.note(ReplicaSeen(False, "http://x"), None, 20)
    assert watch.is_lost(20)
    watch.note(None, None, 20)
    assert watch.is_lost(20)


def test_a_waking_may_last_as_long_as_a_start():
    replica = ManagedReplica("r", ReplicaPhase.WAKING, since_unix_s=time.time() - 300)
    assert not ReplicaWatch(replica, start_s=600, at_s=0).is_lost(0)
    assert ReplicaWatch(replica, start_s=200, at_s=0).is_lost(0)


def test_what_drains_has_something_to_do_while_a_gateway_may_send_it_more():
    watch = ReplicaWatch(ManagedReplica("r", ReplicaPhase.DRAINING, 0.0), 5, 0)
    watch.note(ReplicaSeen(True, "http://x"), ReplicaGauges(0, 100, True), 0)
    assert watch.as_fleet("r1", 0, is_listed=True).tokens == 1
    assert watch.as_fleet("r1", 0, is_listed=False).tokens == 0


def test_a_replica_is_as_full_as_the_fuller_of_its_bounds():
    launch = launch_of(cluster_config({"serve": {"max_num_seqs": 4, "block_size": 16}}))
    stats = EngineStats(now_ns=0, blocks_total=100, blocks_used=50, num_running=1)
    assert gauges_of(stats, launch) == ReplicaGauges(800, 1600, True)
    full = EngineStats(now_ns=0, blocks_total=100, blocks_used=1, num_running=4, num_waiting=2)
    assert gauges_of(full, launch) == ReplicaGauges(2400, 1600, True)
    waiting = EngineStats(now_ns=0, blocks_total=100, waiting_prompt_tokens=3200, num_waiting=1)
    assert gauges_of(waiting, launch).tokens == 3200
    stated = launch_of(cluster_config({"serve": {"max_num_seqs": 4}, "replica": {"capacity_tokens": 400}}))
    assert gauges_of(stats, stated) == ReplicaGauges(800, 400, True)
    assert gauges_of(EngineStats(now_ns=0, rest=Rest("asleep", 2)), launch) == ReplicaGauges(0, 0, False)


def test_a_process_id_that_was_given_to_another_is_not_taken_for_the_first(tmp_path):
    mark = ProcessMark.of(os.getpid())
    assert mark.is_alive
    assert not mark._replace(began=mark.began - 1).is_alive
    (tmp_path / "r1.json").write_text(json.dumps(mark._replace(began=1)))
    assert ReplicaProcess.names(tmp_path) == ["r1"]
    process = ReplicaProcess(tmp_path, "r1")
    assert not process.look().is_alive
    process.end()  # which would end this process
    (tmp_path / "r1.out").write_text('{"url": "http://127.0.0.1:1"')
    assert process.look().url is None, "it is not all written"
    (tmp_path / "r1.out").write_text('{"url": "http://127.0.0.1:1"}\n')
    assert process.look().url == "http://127.0.0.1:1"
