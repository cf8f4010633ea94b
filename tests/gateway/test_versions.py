"""Configs that change under a running gateway: whole, by SIGHUP, and as a canary that goes forward or back by itself;
with real processes and under load."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial

import pytest

import forked
from patience import until
from splittime.ledger.account_json import account_from_json

from .conftest import DEAD, gateway_of, upstream
from .test_chaos import kept, sums
from .test_limits import bearer

NAMES = ("ops", "a", "b", "c")
KEYS = {f"{name.upper()}_KEY": f"of-{name}" for name in NAMES}
TENANTS = "".join(
    f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}_KEY"\noperator = {json.dumps(name == "ops")}\n'
    for name in NAMES
)
CANARY = "[canary]\nmin_requests = 10\nmargin = 0.9\nmax_s = 20\n"


def text_of(hostile, way: str, more: str = CANARY) -> str:
    return 'ledger_file = "gateway.sqlite"\n' + upstream("one", hostile.url(way), "m") + TENANTS + more


def admin(gateway, path="config", key="of-ops", **body):
    """Returns status and answer of a change; without a body, of the question."""
    data = json.dumps(body).encode() if body or path != "config" else None
    asked = urllib.request.Request(f"{gateway.url}/admin/{path}", data, method="PATCH" if data else "GET")
    asked.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def shell(gateway, folder, *words: str):
    environment = {**os.environ, "SPLITTIME_API_KEY": "of-ops"}
    return forked.run(["gateway", *words, "--url", gateway.url], folder, environment, check=True)


def latest(gateway, what: str, limit_s: float = 30.0):
    """The latest change, which must come to be `what`."""
    deadline_s = time.monotonic() + limit_s
    while (last := admin(gateway)[1]["changes"][-1])["what"] != what:
        assert time.monotonic() < deadline_s, last
        time.sleep(0.05)
    return last


@contextmanager
def load(gateway, **body):
    """Everybody asks again and again, until the block ends; yields the statuses by tenant."""
    told, stopping = {name: [] for name in NAMES}, threading.Event()

    def ask(name: str) -> None:
        while not stopping.is_set():
            told[name].append(gateway.ask("m", bearer(f"of-{name}"), **body)[0])
            time.sleep(0.02)  # as people do; who never pauses measures the machine

    asking = [threading.Thread(target=ask, args=(name,)) for name in NAMES for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        yield told
    finally:
        stopping.set()
        for thread in asking:
            thread.join()


def version_of(account) -> int:
    return int(account.config_version.partition(":")[0])


def test_nothing_is_lost_in_swaps_under_load(hostile, tmp_path):
    with gateway_of(tmp_path, text_of(hostile, "fine"), **KEYS) as gateway:
        with load(gateway) as told:
            for number in range(7):
                new = text_of(hostile, ("fine", "second")[number % 2])
                assert number == 0 or admin(gateway, toml="port = 0\n" + new)[0] == 200
                enough = sum(map(len, told.values())) + 2 * len(NAMES) + 1  # one more than are under way
                until(lambda: sum(map(len, told.values())) >= enough)  # noqa: B023 -- it ends here
        assert {status for statuses in told.values() for status in statuses} == {200}
        assert gateway.get("/stats", "of-ops")["config"].startswith("7:")
    accounts = [one for found in kept(tmp_path / "gateway.sqlite").values() for one in found]
    assert len(accounts) == sum(len(statuses) for statuses in told.values())
    assert {version_of(one) for one in accounts} == set(range(1, 8))
    for one in accounts:
        sums(one)
        assert (one.finish_reason, one.routing.policy) == ("stop", one.config_version.partition(":")[2])


def test_a_request_ends_under_the_config_that_it_began_with_and_its_place_is_counted(hostile, tmp_path):
    """One place, taken by a request of the version before: who comes in by the next waits for it."""
    hostile.hold.clear()
    text = upstream("one", hostile.url("held"), "m", max_in_flight=1) + TENANTS
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        answers = []
        for number in range(2):
            thread = threading.Thread(target=lambda: answers.append(gateway.ask("m", bearer("of-a"))[0]))
            thread.start()
            answers.append(thread)
            while gateway.get("/stats", "of-ops")["open_requests"] <= number:
                time.sleep(0.01)
            if not number:
                status, told = admin(gateway, toml="port = 0\n" + text + "[queue]\nmax_requests = 5\n")
                assert (status, told["version"][:2]) == (200, "2:")
        (one,) = gateway.get("/stats", "of-ops")["upstreams"]
        assert (one["requests"], gateway.get("/stats", "of-ops")["queue"]["requests"]) == (1, 1)
        hostile.hold.set()
        for thread in [one for one in answers if isinstance(one, threading.Thread)]:
            thread.join(10)
        assert answers.count(200) == 2
        found = [account_from_json(one) for one in gateway.get("/ledger/requests", "of-ops")["accounts"]]
        assert sorted(version_of(one) for one in found) == [1, 2]


def test_sighup_reads_the_file_again_and_a_wrong_one_changes_nothing(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("one", hostile.url("broken"), "m")) as gateway:
        assert gateway.ask("m")[0] == 500
        status, error = admin(gateway, toml="port = 0\n")
        assert (status, error["code"]) == (403, "operator_only")  # nobody's
        file = tmp_path / "gateway.toml"
        file.write_text("port = 0\n" + upstream("one", hostile.url("fine"), "m"))
        gateway.process.send_signal(signal.SIGHUP)
        changed(gateway, "applied")
        assert gateway.ask("m")[0] == 200
        for wrong, why in (("port = \n", "cannot read"), ("port = 1\n" + upstream("x", DEAD), "port cannot change")):
            file.write_text(wrong)
            gateway.process.send_signal(signal.SIGHUP)
            assert why in changed(gateway, "refused")["why"]
            file.write_text("port = 0\n" + upstream("one", hostile.url("fine"), "m"))
            gateway.process.send_signal(signal.SIGHUP)
            changed(gateway, "applied")
        assert gateway.ask("m")[0] == 200


def changed(gateway, what: str):
    deadline_s = time.monotonic() + 10
    while (last := gateway.get("/admin/config")["changes"][-1])["what"] != what:
        assert time.monotonic() < deadline_s, last
        time.sleep(0.02)
    return last


def test_who_waits_in_a_canary_that_is_rolled_back_is_served(hostile, tmp_path):
    hostile.hold.clear()
    text = upstream("one", hostile.url("held"), "m", max_in_flight=1) + TENANTS
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        new = "port = 0\n" + text + "[queue]\nmax_requests = 5\n"
        (tried,) = admin(gateway, toml=new, canary=0.25)[1]["canary"]["tenants"]
        answers, asking = [], []
        for number, name in enumerate((next(one for one in NAMES if one != tried), tried), 1):
            ask = partial(gateway.ask, "m", bearer(f"of-{name}"))
            asking.append(threading.Thread(target=lambda ask=ask: answers.append(ask()[0])))
            asking[-1].start()
            while gateway.get("/stats", "of-ops")["open_requests"] < number:
                time.sleep(0.01)
        assert admin(gateway, "rollback")[1]["canary"] is None
        hostile.hold.set()
        for thread in asking:
            thread.join(10)
        assert answers == [200, 200]


# ---- the drill


@pytest.mark.parametrize("way", ["broken", "late"])
def test_a_canary_that_fails_or_is_slow_rolls_back_by_itself_and_others_never_notice(way, hostile, tmp_path):
    with gateway_of(tmp_path, text_of(hostile, "fine"), **KEYS) as gateway, load(gateway, stream=True) as told:
        time.sleep(0.5)  # something before it, to compare with
        status, answer = admin(gateway, toml="port = 0\n" + text_of(hostile, way), canary=0.25)
        assert status == 200
        (tried,) = answer["canary"]["tenants"]
        assert admin(gateway, toml="port = 0\n" + text_of(hostile, way))[1]["code"] == "canary_runs"
        why = latest(gateway, "rolled_back")["why"]  # in time at the latest, however busy this machine is
        assert "worse" in why or "not decided in time" in why
        others = {status for name, statuses in told.items() if name != tried for status in statuses}
        assert others == {200}
        count = len(told[tried])
        until(lambda: len(told[tried]) >= count + 6)  # two of which may have been under way
        assert told[tried][-1] == 200
        assert admin(gateway)[1]["canary"] is None
    accounts = [one for found in kept(tmp_path / "gateway.sqlite", 100_000).values() for one in found]
    assert len(accounts) == sum(len(statuses) for statuses in told.values())
    assert {one.tenant for one in accounts if version_of(one) == 2} == {tried}


@pytest.mark.timeout(300)
def test_a_canary_that_is_as_good_is_given_to_all_and_can_be_taken_back(hostile, tmp_path):
    text = text_of(hostile, "paced", CANARY.replace("0.9", "0.99").replace("20", "200"))
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        with load(gateway, real_tokens=2000) as told:
            new = text_of(hostile, "paced", CANARY + "[queue]\nmax_requests = 5\n")
            assert admin(gateway, toml="port = 0\n" + new, canary=0.5)[0] == 200
            latest(gateway, "promoted", 200)
        assert {status for statuses in told.values() for status in statuses} == {200}
        assert admin(gateway)[1]["version"].startswith("2:")
        first = admin(gateway, "rollback", "of-ops")[1]["version"]
        assert first.startswith("3:")
        (tmp_path / "new.toml").write_text("port = 0\n" + new)
        told = json.loads(shell(gateway, tmp_path, "apply", "new.toml", "--json").stdout)
        assert told["version"].startswith("4:")
        assert "rolled_back 3:" in shell(gateway, tmp_path, "status").stderr


def test_a_canary_in_whose_middle_the_gateway_is_killed_is_rolled_back_and_said_so(hostile, tmp_path):
    text, mark = text_of(hostile, "fine"), tmp_path / "gateway.sqlite.canary"
    new = "port = 0\n" + text_of(hostile, "second")
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        version = admin(gateway, toml=new, canary=0.25)[1]["canary"]["version"]
        gateway.kill()
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        told = admin(gateway)[1]
        assert [one["what"] for one in told["changes"]] == ["started", "rolled_back"]
        assert (told["canary"], told["changes"][-1]["version"]) == (None, version)
        assert "ended while this canary ran" in told["changes"][-1]["why"]
        assert "1 of 4 tenants" in told["changes"][-1]["why"]
        assert 'changes_total{result="rolled_back"} 1' in metrics_of(gateway)
        assert not mark.exists()
        assert admin(gateway, toml=new, canary=0.25)[0] == 200
        assert mark.exists()
        assert admin(gateway, "rollback")[0] == 200
        assert not mark.exists()
    mark.write_bytes(b"\xff" * 10)
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        assert admin(gateway)[1]["changes"][-1]["version"] == "?"
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        assert [one["what"] for one in admin(gateway)[1]["changes"]] == ["started"]


def test_a_canary_that_could_not_be_remembered_is_not_begun(hostile, tmp_path):
    (tmp_path / "gateway.sqlite.canary").mkdir()
    new = "port = 0\n" + text_of(hostile, "second")
    with gateway_of(tmp_path, text_of(hostile, "fine"), **KEYS) as gateway:
        status, error = admin(gateway, toml=new, canary=0.25)
        told = admin(gateway)[1]
        assert (status, error["param"], told["canary"]) == (400, "ledger_file", None)
        assert told["changes"][-1]["what"] == "refused"
        assert error["message"].startswith(f"{told['changes'][-1]['why']}. Name a file")  # and the way out
        assert 'changes_total{result="refused"} 1' in metrics_of(gateway)
        assert admin(gateway, toml=new)[1]["version"].startswith("2:")


def metrics_of(gateway) -> str:
    asked = urllib.request.Request(f"{gateway.url}/metrics", headers=bearer("of-ops"))
    with urllib.request.urlopen(asked, timeout=30) as response:
        return response.read().decode()


def test_who_may_change_a_config_and_what(hostile, tmp_path):
    text = text_of(hostile, "fine").replace('name = "b"', 'requests_per_minute = 2\nname = "b"')
    with gateway_of(tmp_path, text, **KEYS) as gateway:
        good = "port = 0\n" + text
        assert admin(gateway, key="of-a", toml=good)[0] == 403
        assert admin(gateway, key="of-a")[0] == 403
        assert admin(gateway, "rollback")[1]["code"] == "nothing_before"
        for wrong, code in (
            ("port = 1\n" + text, "needs_restart"),
            ("port =", "invalid_config"),
            (good.replace("OPS_KEY", "GONE"), "needs_own_file"),
        ):
            status, error = admin(gateway, toml=wrong)
            assert (status, error["code"]) == (400, code)
        assert admin(gateway, toml=good.replace('"c"', '"d"'), canary=0.5)[1]["code"] == "canary_tenants"
        assert admin(gateway, toml=good, canary=1)[0] == 400
        assert admin(gateway)[1]["version"].startswith("1:")
        # a tenant that is taken out is let in no more, and what another has used stays used
        assert [gateway.ask("m", bearer("of-b"))[0] for _ in range(3)] == [200, 200, 429]
        without_c = text.partition('[[tenant]]\nname = "c"')[0] + CANARY
        assert admin(gateway, toml="port = 0\n" + without_c)[0] == 200
        assert gateway.ask("m", bearer("of-c"))[0] == 401
        assert gateway.ask("m", bearer("of-b"))[0] == 429
