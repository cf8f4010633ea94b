"""Who may ask, how much, and how quickly a refusal comes, with the gateway in a process of its own."""

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from patience import until
from splittime.ledger.account_json import account_from_json
from splittime.ledger.stages import Stage

from .conftest import DEAD, gateway_of, upstream
from .test_chaos import metric
from .test_endings import send

KEYS = {"OPS_KEY": "of-ops", "A_KEY": "of-a", "B_KEY": "of-b"}
TENANTS = "".join(
    f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}_KEY"\n{more}\n'
    for name, more in (("ops", "operator = true"), ("a", "max_open_requests = 2"), ("b", "requests_per_minute = 1"))
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(hostile, tmp_path_factory):
    text = "max_body_bytes = 5000\n" + upstream("fine", hostile.url("fine"), key_env="UP_KEY")
    text += upstream("slow", hostile.url("slow")) + TENANTS
    with gateway_of(tmp_path_factory.mktemp("keyed"), text, UP_KEY="of-upstream", **KEYS) as gateway:
        yield gateway


def test_a_key_is_asked_for_and_never_passed_on(keyed, hostile):
    for headers in ({}, bearer("of-nobody"), bearer("of-upstream")):
        assert keyed.ask("fine", headers)[0] == 401
    assert keyed.ask("fine", bearer("of-a"))[0] == 200
    assert hostile.asked["fine"][-1][0]["authorization"] == "Bearer of-upstream"


def test_a_tenant_sees_its_own_accounts_alone(keyed):
    keyed.ask("fine", {**bearer("of-a"), "x-request-id": "of-a-1"})
    assert keyed.account("of-a-1", "of-a")["tenant"] == "a"
    assert keyed.account("of-a-1", "of-ops")["tenant"] == "a"
    for key, path, status in (
        ("of-b", "/ledger/requests/of-a-1", 404),
        ("of-a", "/metrics", 403),
        ("of-a", "/stats", 403),
        ("of-a", "/ledger/facts", 403),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            keyed.get(path, key)
        assert caught.value.code == status
    assert all(one["tenant"] == "a" for one in keyed.get("/ledger/requests", "of-a")["accounts"])
    facts = json.dumps(keyed.get("/ledger/facts", "of-ops"))
    assert "of-upstream" not in facts


def test_limits_of_a_tenant(keyed):
    held = [send_keyed(keyed, "slow", "of-a") for _ in range(2)]
    until(lambda: keyed.get("/stats", "of-ops")["open_requests"] >= 2)
    status, headers, body = keyed.ask("fine", bearer("of-a"))
    assert (status, json.loads(body)["error"]["code"]) == (429, "max_open_requests")
    assert int(headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    assert keyed.ask("fine", bearer("of-b"))[0] == 200
    assert json.loads(keyed.ask("fine", bearer("of-b"))[2])["error"]["code"] == "requests_per_minute"


def send_keyed(gateway, model: str, key: str) -> socket.socket:
    host = gateway.url.removeprefix("http://")
    told = json.dumps({"model": model, "messages": []}).encode()
    connection = socket.create_connection((host.split(":")[0], int(host.split(":")[1])))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    connection.sendall(f"{head}content-length: {len(told)}\r\n\r\n".encode() + told)
    return connection


def test_the_security_floor_is_the_servers(keyed):
    assert keyed.ask("fine", bearer("of-a"), filling="x" * 6000)[0] == 413
    assert keyed.ask("fine", {**bearer("of-a"), "host": "evil.example"})[0] == 403
    assert keyed.ask("fine", {**bearer("of-a"), "origin": "https://evil.example"})[0] == 403
    assert keyed.ask("fine", {**bearer("of-a"), "content-encoding": "gzip"})[0] == 415
    assert keyed.get("/health") == {"status": "ok"}
    status, _, body = keyed.ask("fine", bearer("of-ops"), path="/models")
    assert (status, json.loads(body)["error"]["hint"]) == (404, "the base URL of an OpenAI client ends with /v1")
    status, _, body = keyed.ask("fine", bearer("of-a"), path="/api/chat")
    assert (status, "Ollama's API is not passed on" in json.loads(body)["error"]["hint"]) == (404, True)


def scraped(gateway) -> str:
    asked = urllib.request.Request(f"{gateway.url}/metrics", headers=bearer("of-ops"))
    with urllib.request.urlopen(asked, timeout=10) as response:
        return response.read().decode()


def test_metrics_tell_attempts_and_stages(keyed):
    for name, is_stream in (("whole", False), ("stream", True)):
        keyed.ask("fine", bearer("of-a") | {"x-request-id": name}, stream=is_stream)
        keyed.account(name, "of-ops")
    text = scraped(keyed)
    assert 'splittime_gateway_attempts_total{result="answered",upstream="fine"}' in text
    assert 'splittime_stage_seconds_count{stage="upstream",cause=""}' in text
    (firsts,) = re.findall(r'splittime_gateway_first_byte_seconds_count\{upstream="fine"\} (\S+)', text)
    assert float(firsts) == 1  # of the stream: of a whole answer the first byte is the end
    assert "splittime_gateway_invalid_accounts_total 0.0" in text
    assert 'splittime_gateway_refusals_total{reason="max_open_requests",upstream=""}' in text


def test_what_an_upstream_refuses_by_no_clients_fault_is_counted(hostile, tmp_path):
    text = "[retries]\nmax_attempts = 1\n[breaker]\nfailures = 1000\n" + upstream("refusing", hostile.url("refusing"))
    with gateway_of(tmp_path, text) as gateway:
        asked = [*((status, stream) for status in (400, 401, 403, 404, 500) for stream in (False, True)), (429, False)]
        for status, stream in asked:
            told = 502 if status in (401, 403) else status  # of the gateway's key no client is told
            assert gateway.ask("refusing", stream=stream, status=status)[0] == told
        until(lambda: sum(metric(gateway, "splittime_gateway_requests_total").values()) == len(asked))
        assert metric(gateway, "splittime_gateway_refusals_total") == {'upstream_429",upstream="refusing': 1}
        found = {
            name.split('"')[0]: count for name, count in metric(gateway, "splittime_gateway_verdicts_total").items()
        }
        print(found)
        results = metric(gateway, "splittime_gateway_attempts_total")
        assert {name.split('"')[0]: count for name, count in results.items()} == {
            "answered": 4,  # 400 and 404
            **{f"upstream_{status}": 2 for status in (401, 403, 500)},
            "upstream_429": 1,
        }
        until(lambda: gateway.get("/dashboard/data")["now"]["refusals"].get("upstream_429 at refusing") == 1)


# ---- upstreams


def test_a_proxy_of_the_environment_is_not_used(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("fine", hostile.url("fine")), HTTP_PROXY=DEAD, http_proxy=DEAD) as gateway:
        assert gateway.ask("fine")[0] == 200


def test_a_breaker_opens_closes_and_says_503_at_once(hostile, tmp_path):
    text = "[breaker]\nfailures = 2\nopen_s = 0.3\n[retries]\nmax_attempts = 1\n"
    text += upstream("dead", DEAD) + upstream("strict", hostile.url("strict")) + upstream("busy", hostile.url("busy"))
    with gateway_of(tmp_path, text) as gateway:
        assert [gateway.ask("dead")[0] for _ in range(2)] == [502, 502]
        status, headers, body = gateway.ask("dead", {"x-request-id": "refused"})
        assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (503, "no_upstream", "1")
        account = account_from_json(gateway.account("refused"))
        assert (account.finish_reason, account.attempts) == ("refused", ())
        waited = [one for one in account.intervals if one.cause is not None or one.stage is Stage.UPSTREAM]
        assert waited == []  # neither for a place nor before another attempt
        time.sleep(0.4)
        assert gateway.ask("dead")[0] == 503  # the gateway itself has looked, and nobody's request
        assert [gateway.ask("strict")[0] for _ in range(6)] == [400] * 6  # 4xx never opens it
        status, headers, _ = gateway.ask("busy")
        assert (status, headers["retry-after"]) == (429, "7")
        before = len(hostile.asked["busy"])
        status, headers, body = gateway.ask("busy")
        assert (status, json.loads(body)["error"]["code"]) == (429, "upstreams_busy")
        assert 5 <= int(headers["retry-after"]) <= 7
        assert len(hostile.asked["busy"]) == before


def test_retries_are_a_tenth_at_most(hostile, tmp_path):
    text = "[breaker]\nfailures = 1000\n[retries]\nspare = 0\npause_s = 0.0\nmax_attempts = 5\n"
    text += upstream("one", hostile.url("away"), "m") + upstream("two", hostile.url("away"), "m")
    with gateway_of(tmp_path, text) as gateway:
        before = len(hostile.asked["away"])
        assert [gateway.ask("m")[0] for _ in range(50)] == [503] * 50
        assert len(hostile.asked["away"]) - before == 56  # the first to fail finds nothing against the other
        assert gateway.get("/stats")["retries"] == 6


def test_a_cap_a_queue_and_quick_refusals(hostile, tmp_path):
    """Three at the upstream, four in the queue, everybody else refused within milliseconds."""
    hostile.hold.clear()
    text = "[queue]\nmax_requests = 4\nshed_from = 1.0\n" + upstream("held", hostile.url("held"), max_in_flight=3)
    with gateway_of(tmp_path, text) as gateway:
        answers = []
        asking = [threading.Thread(target=lambda: answers.append(gateway.ask("held"))) for _ in range(7)]
        for thread in asking:
            thread.start()
        until(lambda: gateway.get("/stats")["queue"]["requests"] >= 4)
        lasted_s = []
        for _ in range(30):
            begin_s = time.monotonic()
            status, headers, body = gateway.ask("held")
            lasted_s.append(time.monotonic() - begin_s)
            assert (status, json.loads(body)["error"]["reason"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
        assert sorted(lasted_s)[15] < 0.1  # and max_wait_s is 30
        assert hostile.open["held"] == 3
        hostile.hold.set()
        for thread in asking:
            thread.join()
        assert [status for status, *_ in answers] == [200] * 7
        assert hostile.most_open["held"] == 3
        waits = [
            stage["cause"] == "upstream_slots"
            for account in gateway.get("/ledger/requests")["accounts"]
            for stage in account["stages"]
        ]
        assert sum(waits) == 4


@pytest.mark.timing
def test_shares_of_tokens_are_the_weights_whatever_is_asked(hostile, tmp_path):
    """All ask for more than they get, in requests of different lengths; what they are served is 1 to 2 to 5."""
    weights, lengths = {"ops": 1.0, "a": 2.0, "b": 5.0}, {"ops": 400, "a": 100, "b": 200}
    text = upstream("paced", hostile.url("paced"), max_in_flight=3)
    for name, weight in weights.items():
        text += f'[[tenant]]\nname = "{name}"\nkey_env = "{name.upper()}_KEY"\nweight = {weight}\n'
        text += "operator = true\n" * (name == "ops")
    text += "[queue]\nshed_from = 1.0\n"  # nobody is refused
    until_s = time.monotonic() + 4

    def ask(gateway, tenant):
        while time.monotonic() < until_s:
            real = lengths[tenant]  # one tenant is charged ten times that at first, and must not pay it
            most, key = real * (10 if tenant == "ops" else 1), KEYS[f"{tenant.upper()}_KEY"]
            assert gateway.ask("paced", bearer(key), max_tokens=most, real_tokens=real)[0] == 200

    with gateway_of(tmp_path, text, **KEYS) as gateway:
        asking = [threading.Thread(target=ask, args=(gateway, tenant)) for tenant in weights for _ in range(12)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        accounts = gateway.get("/ledger/requests?limit=10000", "of-ops")["accounts"]
    begin_ns, end_ns = accounts[0]["end_ns"], accounts[-1]["end_ns"]
    served = dict.fromkeys(weights, 0)
    for account in accounts:
        if begin_ns + 0.1 * (end_ns - begin_ns) < account["end_ns"] < begin_ns + 0.8 * (end_ns - begin_ns):
            served[account["tenant"]] += account["prompt_tokens"] + account["output_tokens"]
    for tenant, weight in weights.items():
        assert served[tenant] / sum(served.values()) == pytest.approx(weight / 8, rel=0.12), served


def test_who_waits_and_leaves_takes_no_place(hostile, tmp_path):
    hostile.hold.clear()
    with gateway_of(tmp_path, upstream("held", hostile.url("held"), max_in_flight=1)) as gateway:
        before = len(hostile.asked["held"])
        connections = [send(gateway, "held") for _ in range(5)]
        until(lambda: gateway.get("/stats")["queue"]["requests"] >= 4)
        for _, connection in connections[1:]:
            connection.close()
        until(lambda: not gateway.get("/stats")["queue"]["requests"])
        hostile.hold.set()
        gateway.account(connections[0][0])
        assert len(hostile.asked["held"]) == before + 1
        connections[0][1].close()
