"""Hops before the prompt: from `splittime.trace` through the gateway to `explain`, and whose they are."""

import json
import urllib.error
import urllib.request

import pytest

import forked
from splittime.core.trace_context import MAX_TRACE_HOPS
from splittime.ledger.account_json import account_from_json
from splittime.wire.tracing import Tracer

from .conftest import gateway_of, until_written, upstream
from .test_limits import KEYS, TENANTS, bearer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def body_of(*hops: dict, **more) -> dict:
    told = [
        {"span_id": f"{i:016x}", "name": "x", "begin_ns": 0, "duration_ns": 9, **hop} for i, hop in enumerate(hops, 1)
    ]
    return {"trace_id": TRACE, "clock": "c", "hops": told, **more}


@pytest.fixture(scope="module")
def kept(hostile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hops")
    text = f'ledger_file = "{folder}/gateway.sqlite"\n' + upstream("fine", hostile.url("fine"))
    with gateway_of(folder, text) as gateway:
        gateway.file = folder / "gateway.sqlite"
        yield gateway


def explained(*args: str) -> str:
    return forked.run(["explain", *args], check=True).stdout


def test_a_whole_request_is_explained(kept):
    trace = Tracer()
    trace.to(kept.url)
    with trace("answer", "agent"):
        with trace("search", "retrieval"):
            pass
        with trace("ask", "request") as ask:
            kept.ask("fine", {"x-request-id": "whole", **trace.headers()})
    account = account_from_json(kept.account("whole"))
    assert (account.trace_id, account.parent_id) == ask.context
    assert trace.flush(10)
    assert trace.num_dropped == 0
    path = json.loads(explained("whole", "--url", kept.url, "--json"))["traces"][0]
    assert sum(section["duration_ns"] for section in path["sections"]) == path["length_ns"]
    assert {"upstream", "outside"} <= {section["what"] for section in path["sections"]}
    assert path["notes"] == []
    nested_ns = sum(one["duration_ns"] for one in path["sections"] if one["request_id"] == "whole")
    assert nested_ns == account.end_ns - account.start_ns
    words = explained("whole", "--url", kept.url)
    assert all(f"{name}" in words for name in ("answer: agent", "search: retrieval", "ask: request", "outside"))
    until_written(kept.file, "whole")
    of_file = explained("whole", "--ledger", str(kept.file))
    assert of_file.split("The whole answer")[1] == words.split("The whole answer")[1]


def test_a_request_without_hops_is_explained_as_before(kept):
    kept.ask("fine", {"x-request-id": "plain"})
    kept.ask("fine", {"x-request-id": "traced", "traceparent": f"00-{'12' * 16}-{SPAN}-01"})
    for name in ("plain", "traced"):
        kept.account(name)
        assert "The whole answer" not in explained(name, "--url", kept.url)
    assert kept.account("traced")["trace_id"] == "12" * 16


@pytest.mark.parametrize(
    "value", ["00-0-0-01", f"00-{'0' * 32}-{SPAN}-01", "x" * 5000, f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01"]
)
def test_a_traceparent_that_is_none_fails_no_request(kept, value):
    status, headers, _ = kept.ask("fine", {"traceparent": value})
    assert status == 200
    assert kept.account(headers["x-request-id"])["trace_id"] == ""


def test_what_is_posted_is_answered_and_read_back(kept):
    status, _, told = kept.ask("", path="/ledger/hops", raw=json.dumps(body_of({}, {"kind": "tool"})).encode())
    assert (status, json.loads(told)) == (200, {"trace_id": TRACE, "kept": 2, "known": 0})
    status, _, told = kept.ask("", path="/ledger/hops", raw=json.dumps(body_of({})).encode())
    assert json.loads(told)["known"] == 1
    found = kept.get(f"/ledger/hops/{TRACE}")["hops"]
    assert [(hop["kind"], hop["end_ns"], hop["tenant"]) for hop in found] == [("other", 9, ""), ("tool", 9, "")]
    with urllib.request.urlopen(f"{kept.url}/metrics", timeout=10) as response:
        assert b'splittime_gateway_hops_total{result="known"} 1.0' in response.read()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (body_of(), 400, "hops"),
        (body_of(*[{}] * (MAX_TRACE_HOPS + 1)), 400, f"more than {MAX_TRACE_HOPS}"),
        (body_of({"duration_ns": -1}), 400, "hops[0].duration_ns"),
        (body_of({"duration_ns": 10**15}), 400, "hops[0].duration_ns"),
        (body_of({"begin_ns": 0.5}), 400, "begin_ns"),
        (body_of({"kind": "chain"}), 400, "kind"),
        (body_of({"name": ""}), 400, "name"),
        (body_of({"name": "x" * 65}), 400, "name"),
        (body_of({"name": "\x1b[2J"}), 400, "hops[0].name"),
        (body_of({"span_id": "x"}), 400, "span_id"),
        (body_of({"parent_id": f"{1:016x}"}), 400, "lies in itself"),
        (body_of({"attributes": {"prompt": "x"}}), 400, "attributes"),
        (body_of({}, trace_id="T" * 32), 400, "trace_id"),
        (body_of({}, trace_id=TRACE + "\n"), 400, "trace_id"),
        (body_of({"name": "x\n"}), 400, "name"),
        (body_of({}, clock=""), 400, "clock"),
        (body_of({"duration_ns": 8}), 409, "another hop"),
        ({"trace_id": TRACE, "x": "x" * 300_000}, 413, "bytes"),
    ],
)
def test_what_is_no_hop_is_refused_with_its_name(kept, body, status, words):
    kept.ask("", path="/ledger/hops", raw=json.dumps(body_of({})).encode())
    answered, _, told = kept.ask("", path="/ledger/hops", raw=json.dumps(body).encode())
    assert (answered, words in json.loads(told)["error"]["message"]) == (status, True), told
    assert kept.ask("", path="/ledger/hops", raw=b"not json")[0] == 400


def test_a_trace_that_is_not_there(kept):
    for name in ("34" * 16, "short", "%2e%2e"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            kept.get(f"/ledger/hops/{name}")
        assert caught.value.code == 404


def test_a_tenant_sees_and_spoils_its_own_hops_alone(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("fine", hostile.url("fine")) + TENANTS, **KEYS) as gateway:

        def post(key: str, *hops: dict) -> int:
            told = json.dumps(body_of(*hops)).encode()
            return gateway.ask("", bearer(key), path="/ledger/hops", raw=told)[0]

        answered = [post("of-a", {"name": "mine"}), post("of-b", {"name": "other"}), post("of-nobody", {})]
        assert answered == [200, 200, 401]
        for key, names in (("of-a", ["mine"]), ("of-b", ["other"]), ("of-ops", ["mine", "other"])):
            assert sorted(hop["name"] for hop in gateway.get(f"/ledger/hops/{TRACE}", key)["hops"]) == names
        gateway.ask("fine", {**bearer("of-a"), "x-request-id": "one", "traceparent": f"00-{TRACE}-{1:016x}-01"})
        gateway.account("one", "of-a")
        for key in ("of-a", "of-ops"):
            path = json.loads(explained("one", "--url", gateway.url, "--api-key", key, "--json"))["traces"][0]
            assert [hop["name"] for hop in path["hops"]] == ["mine"]
