"""Equal requests at once: one asks the upstream, the others share what it gets, and each leaves as it likes."""

import asyncio
import http.client
import json
import time

import pytest

from patience import until
from splittime.ledger.account_json import account_from_json

from ..conftest import gateway_of
from ..hostile import WHOLE, whole
from ..in_process import PATIENT, Saying, asked, gateway_before
from ..test_endings import assert_nothing_is_left, send
from .conftest import config


def answer_of(connection) -> tuple[http.client.HTTPResponse, bytes]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer, answer.read()


def told(gateway, name: str) -> int:
    return gateway.get("/stats")["cache"]["results"].get(name, 0)


@pytest.fixture
def held(echoing):
    """Answers that wait are let go at the end of the test, whatever happens."""
    echoing.hold.clear()
    yield echoing
    echoing.hold.set()


def started(gateway, held, seed: int, followers: int, **body):
    """Returns (id, socket) of the leader and of each follower, all of them under way."""
    asked = held.numbers
    body = {"temperature": 0, "seed": seed, **body}
    leader = send(gateway, "m0", **body)
    until(lambda: held.numbers == asked + 1)
    before = told(gateway, "shared")
    others = [send(gateway, "m0", **body) for _ in range(followers)]
    until(lambda: told(gateway, "shared") == before + followers)
    return leader, others


def account(gateway, request_id):
    found = account_from_json(gateway.account(request_id))
    found.verify()
    assert sum(one.duration_ns for one in found.intervals) == found.end_ns - found.start_ns
    return found


TOLD = {"stream": True, "halts": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("body", [{"waits": True}, TOLD])
def test_one_asks_and_all_are_answered(caching, held, body):
    leader, others = started(caching, held, 1000 + len(body), 5, **body)
    asked = held.numbers
    held.hold.set()
    first, data = answer_of(leader[1])
    assert first.headers["x-cache"] == "miss"
    for request_id, connection in others:
        answer, same = answer_of(connection)
        assert (answer.status, same) == (200, data)
        assert (answer.headers["x-cache"], answer.headers["x-request-id"]) == ("shared", request_id)
        assert answer.headers["x-splittime-upstream"] == "echo"
        found = account(caching, request_id)
        assert (found.finish_reason, found.output_tokens, found.attempts) == ("stop", 3, ())
        shared = [one for one in found.intervals if one.cause == "same_request"]
        assert shared[0].stage == "cache"
        assert found.intervals[-1].stage == "deliver"
    assert account(caching, leader[0]).attempts[0].status == 200
    assert held.numbers == asked
    assert_nothing_is_left(caching)


TOLD = {"stream": True, "halts": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("body", [{"waits": True}, TOLD])
def test_the_leader_leaves_and_the_others_stay(caching, held, body):
    leader, others = started(caching, held, 1100 + len(body), 2, **body)
    asked = held.numbers
    leader[1].close()
    time.sleep(0.1)  # the gateway has seen it by then
    assert held.open["echo"] == 1
    held.hold.set()
    for request_id, connection in others:
        answer, data = answer_of(connection)
        assert (answer.status, b"answer" in data or b"[DONE]" in data) == (200, True)
        assert account(caching, request_id).finish_reason == "stop"
    found = account(caching, leader[0])
    assert found.finish_reason == "abort"
    assert found.cancelled_ns is not None
    assert found.attempts[0].error == ""
    assert held.numbers == asked
    until(lambda: caching.get("/stats")["cache"]["under_way"] == 0)
    assert_nothing_is_left(caching)


TOLD = {"stream": True, "halts": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("body", [{"waits": True}, TOLD])
def test_when_all_have_left_the_upstream_is_cancelled(caching, held, body):
    leader, others = started(caching, held, 1200 + len(body), 2, **body)
    leader[1].close()
    time.sleep(0.05)
    for _, connection in others:
        connection.close()
    assert_nothing_is_left(caching)
    for request_id, _ in (leader, *others):
        assert account(caching, request_id).finish_reason == "abort"
    assert account(caching, leader[0]).attempts[0].error == "cancelled"
    assert caching.get("/stats")["cache"]["under_way"] == 0


def test_a_follower_that_leaves_ends_nobody(caching, held):
    leader, others = started(caching, held, 1300, 3, stream=True, halts=True)
    others[1][1].close()
    assert account(caching, others[1][0]).finish_reason == "abort"
    held.hold.set()
    assert b"[DONE]" in answer_of(leader[1])[1]
    assert b"[DONE]" in answer_of(others[0][1])[1]
    assert b"[DONE]" in answer_of(others[2][1])[1]
    assert account(caching, leader[0]).cancelled_ns is None


def test_who_comes_late_has_the_beginning_too(caching, held):
    leader, others = started(caching, held, 1400, 1, stream=True, halts=True)
    first = answer_of_head(leader[1])
    assert b"ans" in first.read1()
    late = send(caching, "m0", temperature=0, seed=1400, stream=True, halts=True)
    until(lambda: told(caching, "shared") > 1)
    held.hold.set()
    bodies = [answer_of(connection)[1] for _, connection in (*others, late)]
    assert bodies[0] == bodies[1]
    assert b'"ans"' in bodies[1]


def answer_of_head(connection) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer


@pytest.mark.parametrize(("act", "status"), [("fails", 500), ("dies", 200)])
def test_a_failure_is_everybodys(caching, held, act, status):
    """They would have asked the same upstream the same; nobody asks it again for them."""
    leader, others = started(caching, held, 1500 + status, 2, act=act, stream=True, halts=True, waits=act == "fails")
    asked = held.numbers
    held.hold.set()
    bodies = []
    for request_id, connection in (leader, *others):
        answer, data = answer_of(connection)
        bodies.append(data)
        assert answer.status == status
        assert b"error" in data
        assert account(caching, request_id).finish_reason in ("error", "refused")
    assert len(set(bodies)) == 1
    assert held.numbers == asked


def test_a_followers_deadline_is_its_own(caching, held):
    leader, _ = started(caching, held, 1600, 0, waits=True)
    body = {"temperature": 0, "seed": 1600, "waits": True}
    status, headers, data = caching.ask("m0", {"x-request-deadline-ms": "100"}, messages=[], **body)
    assert (status, json.loads(data)["error"]["code"]) == (504, "deadline_exceeded")
    assert headers["x-cache"] == "shared"
    held.hold.set()
    assert answer_of(leader[1])[0].status == 200


def test_a_request_with_a_deadline_leads_nobody(caching, held):
    asked = held.numbers
    body = {"temperature": 0, "seed": 1700, "waits": True}
    status, *_ = caching.ask("m0", {"x-request-deadline-ms": "100"}, messages=[], **body)
    assert status == 504
    assert caching.get("/stats")["cache"]["under_way"] == 0
    assert held.numbers == asked + 1


@pytest.mark.parametrize("header", ["x-request-deadline-ms", "x-llm-d-slo-ttft-ms"])
async def test_who_is_refused_for_a_bound_of_time_of_its_own_leads_nobody(header):
    late = whole(429, {"error": {"message": "late", "code": "slo_ttft", "reason": "slo_ttft"}})
    answers = [[b"", b"", b"", b"", late], [whole(200, WHOLE)]]
    one = Saying(lambda body: answers.pop(0))
    async with gateway_before({"one": one}, PATIENT + '[[cache_route]]\nmodel = "m"\n') as (app, _):
        first = asyncio.create_task(asked(app, {header: "5000"}, temperature=0))
        while not one.asked:
            await asyncio.sleep(0)
        second = await asked(app, temperature=0)
        assert (second.status, second.headers[b"x-cache"]) == (200, b"miss")
        assert (await first).status == 429


def test_no_store_shares_nothing(caching, held):
    leader, _ = started(caching, held, 1800, 0, waits=True)
    asked, before = held.numbers, told(caching, "shared")
    held.hold.set()
    body = {"temperature": 0, "seed": 1800, "waits": True}
    caching.ask("m0", {"cache-control": "no-store"}, messages=[], **body)
    assert (held.numbers, told(caching, "shared")) == (asked + 1, before)
    answer_of(leader[1])


def test_what_is_too_long_to_share_ends_with_an_error(caching, held):
    leader, others = started(caching, held, 1900, 1, stream=True, halts=True, says="y" * 5000)
    held.hold.set()
    assert b"[DONE]" in answer_of(leader[1])[1]
    _, data = answer_of(others[0][1])
    assert b"shared_answer_too_long" in data
    assert b"[DONE]" not in data
    assert account(caching, others[0][0]).error.code == "shared_answer_too_long"


def test_a_stop_ends_followers_as_leaders(echoing, tmp_path, held):
    with gateway_of(tmp_path, "grace_s = 0.1\n" + config(echoing, "")) as gateway:
        leader, others = started(gateway, held, 1, 1, stream=True, halts=True)
        gateway.stop()
        for _, connection in (leader, *others):
            assert b"draining" in answer_of(connection)[1]


def test_what_is_purged_while_it_is_under_way_is_not_kept(caching, held):
    leader, _ = started(caching, held, 2000, 0, waits=True)
    assert caching.ask("", path="/cache/purge", raw=b"{}")[0] == 200
    held.hold.set()
    answer_of(leader[1])
    time.sleep(0.05)
    _, headers, _ = caching.ask("m0", temperature=0, seed=2000, waits=True, messages=[])
    assert headers["x-cache"] == "miss"
