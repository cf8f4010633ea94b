"""What `cluster.toml` may say, what follows from it, and how what is wrong with it is told."""

import os
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.cluster import ray_places
from splittime.cluster.config import Cluster, cluster_config, folder_of, launch_of, read_cluster
from splittime.cluster.gateways import ManagedGateways
from splittime.cluster.places import key_of
from splittime.cluster.ray_places import OWN_RAY, RayHead, check_ray
from splittime.cluster.replica_process import ProcessMark
from splittime.cluster.state import (
    FIRST_FAILURES,
    MAX_ATTEMPTS,
    ListedReplica,
    digest_of,
    gateway_config,
    operator_key,
    toml_of,
)
from splittime.core.errors import ConfigError, EngineError
from splittime.gateway.config_file import config_of


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_whole(text)
    assert caught.value.info.hint, "a way out"
    return caught.value


def read_whole(text: str) -> None:
    config = cluster_config(tomllib.loads(text))
    gateway_config(config, launch_of(config), 0, ())


@pytest.mark.parametrize(
    ("text", "param", "value", "limit"),
    [
        ("gateways = 0", "gateways", 0, [1, 16]),
        ("[scale]\nmax_replicas = 0", "scale.max_replicas", 0, [1, 10000]),
        ("[scale]\nmin_replicas = 5", "scale.min_replicas", 5, 4),
        ("[scale]\ntarget = 1.5", "scale.target", 1.5, [0.01, 1]),
        ("[replica]\nsleep_level = 3", "replica.sleep_level", 3, [1, 2]),
        ("[replica]\non_network = true", "replica.on_network", True, None),
        ('[replica]\non_network = true\nkey_env = "K"', "replica.on_network", True, None),
        ('ray_address = "x:1"', "ray_address", "x:1", None),
        ("[canary]\nmargin = 2.0", "canary.margin", 2.0, [0.001, 0.999]),
        ("[serve]\nmax_num_seqs = 0", "max_num_seqs", 0, [1, 65536]),
        ("[serve]\nport = 1", "serve.port", None, None),
        ('[serve]\napi_key = "x"', "serve.api_key", None, None),
        ('[serve]\nkv_peers = ["http://127.0.0.1:1"]', "serve.kv_peers", None, None),
        ('[serve]\nkv_peer_key = "x"', "serve.kv_peer_key", None, None),
        ("[serve]\nkv_export = true", "serve.kv_export", None, None),
        ("[gateway]\nport = 70000", "gateway.port", 70000, [0, 65535]),
        ("[gateway]\nport = 0", "gateway.port", 0, [1, 65535]),
        ("[gateway]\nshared_port = 0", "gateway.shared_port", 0, [1, 65535]),
        ('[gateway]\nhost = "0.0.0.0"', "gateway.host", "0.0.0.0", None),
        ("[[gateway.upstream]]\nname = 'a'", "gateway.upstream", None, None),
        ("[scale]\nmin_replica = 1", "scale.min_replica", None, None),
        ("scal = 1", "scal", None, None),
        ('runner = "kubernetes"', "config", None, None),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(text, param, value, limit):
    info = refused(text).info
    assert (info.param, info.value, info.limit) == (param, value, limit)


@pytest.mark.parametrize(
    "told",
    [
        {"serve": {"enable_lora": True}},
        {"serve": {"tensor_parallel_size": 2}},
        {"serve": {"load_format": "dummy"}},
        {"serve": {"speculative_config": '{"method": "self"}'}},
        {"serve": {"kernels": "torch"}},
        {"replica": {"shares_blocks": True, "gpus": 1}, "runner": "ray"},
    ],
)
def test_replicas_that_could_not_share_blocks_are_not_started(told):
    with pytest.raises(ConfigError, match="shares_blocks does not go with") as caught:
        launch_of(cluster_config({"replica": {"shares_blocks": True}, **told}))
    assert (caught.value.info.param, caught.value.info.value) == ("replica.shares_blocks", True)
    launch_of(cluster_config({**told, "replica": {"shares_blocks": False}}))


def test_an_unknown_key_is_refused_with_the_nearest():
    assert refused("[scale]\nmin_replica = 1").info.hint == "did you mean min_replicas?"
    assert "did you mean" in refused("[serve]\nmax_num_seq = 1").info.hint


def test_a_launch_has_the_flags_and_names_of_its_settings(tmp_path):
    told = {"serve": {"max_num_seqs": 7, "enable_prefix_caching": False}}
    launch = launch_of(cluster_config(told))
    assert launch.flags == ("--max-num-seqs", "7", "--no-enable-prefix-caching")
    assert launch.models == ("splittime-code",)
    assert launch.max_num_seqs == 7
    named = launch_of(cluster_config({"serve": {"served_model_name": ["a", "b"]}}))
    assert named.models == ("a", "b")
    assert named.revision != launch.revision
    assert launch.revision == launch_of(cluster_config(told)).revision
    shared = launch_of(cluster_config({"replica": {"shares_blocks": True}}))
    assert shared.flags == ("--kv-export",)
    path = tmp_path / "mine.toml"
    path.write_text("")
    assert read_cluster(path).folder == tmp_path / "mine.run"
    with pytest.raises(ConfigError, match="cannot read"):
        read_cluster(tmp_path / "none.toml")


def test_the_folder_is_found_though_the_file_is_wrong(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'folder = "{tmp_path}/there"\nno_such_key = 1\n')
    assert folder_of(path) == tmp_path / "there"
    path.write_text("folder = ")
    assert folder_of(path) == tmp_path / "mine.run"


def config_and_launch(**table):
    config = cluster_config(table)
    return config, launch_of(config)


def test_a_gateway_without_replicas_lets_requests_wait():
    config, launch = config_and_launch(serve={"max_num_seqs": 4})
    made, text = gateway_config(config, launch, 0, ())
    assert [(one.max_in_flight, one.models) for one in made.upstream] == [(0, ("splittime-code",))]
    assert made.queue.sign_of_life_s == 1.0
    assert (made.retries.max_attempts, made.retries.spare) == (MAX_ATTEMPTS, 8 + FIRST_FAILURES)
    assert digest_of(config_of(tomllib.loads(text))) == digest_of(made)


def test_what_the_user_says_of_the_gateway_is_kept():
    told = {"queue": {"max_requests": 7}, "retries": {"spare": 2}, "port": 9000}
    config, launch = config_and_launch(gateway=told, replica={"key_env": "K"})
    listed = [
        ListedReplica("r1", "http://127.0.0.1:1", launch, True),
        ListedReplica("r2", "http://127.0.0.1:2", launch, False),
    ]
    made, text = gateway_config(config, launch, 1, listed)
    assert (made.queue.max_requests, made.retries.spare, made.port) == (7, 2, 9001)
    assert [(one.name, one.resume, one.key_env, one.kind) for one in made.upstream] == [
        ("r1", True, "K", "splittime"),
        ("r2", False, "K", "splittime"),
    ]
    assert digest_of(config_of(tomllib.loads(text))) == digest_of(made)


def test_how_long_replicas_are_waited_for_is_a_matter_of_config():
    """Nothing in `cluster.toml` could raise `first_byte_s`, so no answer could take longer than a minute."""
    times = {"connect_s": 2.0, "first_byte_s": 120.0, "whole_answer_s": 1800.0, "between_s": 30.0, "total_s": 3600.0}
    config, launch = config_and_launch(times=times)
    (one,) = gateway_config(config, launch, 0, [ListedReplica("r", "http://127.0.0.1:1", launch, True)])[0].upstream
    assert {name: getattr(one, name) for name in times} == times
    plain, _ = config_and_launch()
    (one,) = gateway_config(plain, launch, 0, [ListedReplica("r", "http://127.0.0.1:1", launch, True)])[0].upstream
    assert (one.first_byte_s, one.whole_answer_s) == (60.0, None)
    assert launch_of(config).revision == launch_of(plain).revision  # no replica is started anew for it
    with pytest.raises(ConfigError) as caught:
        cluster_config({"times": {"total_s": 0}})
    assert (caught.value.info.param, caught.value.info.limit) == ("times.total_s", [0.001, 86400])


def test_gateways_share_a_port_beside_their_own(tmp_path):
    def managed(told: str) -> ManagedGateways:
        config = cluster_config(tomllib.loads(told))
        return ManagedGateways(Cluster(config, launch_of(config), tmp_path))

    gateways = managed('gateways = 2\n[gateway]\nhost = "::1"\nshared_port = 8000\n')
    assert gateways.urls == ["http://[::1]:8100", "http://[::1]:8101"]
    assert gateways.shared_url == "http://[::1]:8000"
    assert managed("gateways = 2").shared_url is None
    with pytest.raises(ConfigError) as caught:
        managed("gateways = 2\n[gateway]\nshared_port = 8101\n")
    assert (caught.value.info.param, caught.value.info.value) == ("gateway.shared_port", 8101)


def test_two_gateways_write_no_file_of_each_other():
    told = {
        "ledger_file": "x/l.sqlite",
        "budget_file": "b.sqlite",
        "audit": {"file": "a.jsonl"},
        "cache": {"file": "c.sqlite"},
    }
    config, launch = config_and_launch(gateway=told, gateways=2)
    first, second = (gateway_config(config, launch, number, ())[0] for number in range(2))
    assert (first.ledger_file, first.audit.file, first.cache.file) == ("x/l.sqlite", "a.jsonl", "c.sqlite")
    assert (second.ledger_file, second.audit.file, second.cache.file) == ("x/l-1.sqlite", "a-1.jsonl", "c-1.sqlite")
    assert first.budget_file == second.budget_file == "b.sqlite", "budgets are of both together"
    assert config.gateway == told, "as it was"


def test_the_controller_needs_a_key_where_gateways_ask_for_one(monkeypatch, tmp_path):
    tenant = {"name": "ops", "operator": True}
    hashed, launch = config_and_launch(gateway={"tenant": [{**tenant, "sha256": "ab" * 32}]})
    with pytest.raises(ConfigError, match="no operator's key"):
        operator_key(gateway_config(hashed, launch, 0, ())[0])
    monkeypatch.setenv("OPS", "secret")
    named, _ = config_and_launch(gateway={"tenant": [{**tenant, "key_env": "OPS"}]})
    assert operator_key(gateway_config(named, launch, 0, ())[0]) == "secret"
    (tmp_path / "key").write_text("filed\n")
    filed, _ = config_and_launch(gateway={"tenant": [{**tenant, "key_file": str(tmp_path / "key")}]})
    assert operator_key(gateway_config(filed, launch, 0, ())[0]) == "filed"


def test_a_replicas_key_must_be_there(monkeypatch):
    _, launch = config_and_launch(replica={"key_env": "REPLICA_KEY"})
    monkeypatch.delenv("REPLICA_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment has no REPLICA_KEY"):
        key_of(launch)


TEXTS = st.text(max_size=4)
PLAIN = st.booleans() | st.integers(-(2**60), 2**60) | TEXTS | st.floats(-1e9, 1e9)
VALUES = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXTS, PLAIN | st.lists(PLAIN, max_size=2), max_size=2)


@given(st.dictionaries(TEXTS, VALUES, max_size=3))
@settings(deadline=None, max_examples=60)
def test_toml_says_what_it_was_made_of(table):
    assert tomllib.loads(toml_of(table)) == table


def test_a_date_is_no_value_of_a_gateway():
    with pytest.raises(ConfigError, match="no value"):
        toml_of(tomllib.loads("day = 1979-05-27"))


def test_without_ray_its_runner_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        check_ray()
    assert "pip install" in caught.value.info.hint


RAY = """import time
from pathlib import Path
from types import SimpleNamespace
def init(address, **told):
    assert address == "local", "else it would take one that runs here already, whoever's that is"
    been = Path(__file__).with_name("been")
    print("a word")
    tries = len(been.read_text()) if been.exists() else 0
    been.write_text("x" * (tries + 1))
    if tries == 0:
        raise SystemExit("too slow")
    if tries == 1:
        time.sleep(60)
    return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"})
def shutdown():
    Path(__file__).with_name("shut").touch()
"""


def test_a_ray_that_was_too_slow_is_started_again_and_ended_well(monkeypatch, tmp_path):
    """What stands for Ray here fails as it does on a busy machine: it gives up, or waits for itself."""
    head, said, been = ray_that_is(RAY, monkeypatch, tmp_path), [], tmp_path / "been"

    def is_hurried() -> bool:  # asked at each look: the second has had its time as soon as it hangs
        hangs = been.exists() and been.read_text() == "xx" and sum("started again" in line for line in said) == 1
        monkeypatch.setattr(ray_places, "TRY_S", 0.0 if hangs else 60.0)
        return False

    assert head.start(said.append, is_hurried) == "127.0.0.1:1"
    head.check()
    assert been.read_text() == "xxx"
    assert "Ray did not start, and is started again: too slow" in said
    head.end(lambda: False)
    assert (tmp_path / "shut").exists()
    with pytest.raises(EngineError, match="Ray has ended"):
        head.check()


def ray_that_is(text: str, monkeypatch, folder) -> RayHead:
    (folder / "ray.py").write_text(text)
    for name in (*OWN_RAY, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return RayHead(folder)


def test_a_ray_that_ends_again_and_again_cannot_start(monkeypatch, tmp_path):
    said = []
    with pytest.raises(EngineError, match="it ended 3 times: no room in /dev/shm"):
        ray_that_is("raise SystemExit('no room in /dev/shm')", monkeypatch, tmp_path).start(said.append, lambda: False)
    assert said.count("Ray did not start, and is started again: no room in /dev/shm") == 2


def test_a_ray_that_does_not_end_is_killed_for_who_is_in_a_hurry(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_places, "RAY_END_S", 1e9)
    head = ray_that_is(
        RAY.replace('Path(__file__).with_name("shut").touch()', "time.sleep(600)"), monkeypatch, tmp_path
    )
    (tmp_path / "been").write_text("xx")
    head.start(print, lambda: False)
    head.end(lambda: True)
    with pytest.raises(EngineError, match="Ray has ended"):
        head.check()


def test_an_actor_that_nobody_asks_ends_with_its_server_and_its_files(tmp_path):
    alone = """import sys, time
from splittime.cluster import ray_places
ray_places.ALONE_S = 0.5
actor = ray_places.ReplicaActor("r1", ("--num-threads", "1"), None, False)
print(actor._process._process.pid, flush=True)
time.sleep(60)
sys.exit(1)"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ProcessMark.of(int(done.stdout)) is None
    assert list(tmp_path.glob("splittime-*")) == []


def test_the_command_says_what_is_wrong(tmp_path):
    (tmp_path / "c.toml").write_text("[scale]\nmax_replicas = 0\n")
    command = [sys.executable, "-m", "splittime.cli.main", "up", "--config", "c.toml"]
    told = subprocess.run([*command, "--check"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    assert "scale.max_replicas = 0" in told.stderr
