"""Lesser answers while the queue is long: when the ladder is climbed and left, and what an answer says of it."""

import http.client
import json
import threading
import uuid

import pytest

from patience import until
from splittime.core.errors import ConfigError
from splittime.gateway.config import DegradationConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.degrade import Ladder, MarkedAnswer, lesser
from splittime.gateway.forwarded import forwarded
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, upstream
from .test_chaos import metric, sums
from .test_endings import send
from .test_relay import events

S = 10**9
SHORT = DegradationConfig(name="short", enter_wait_s=2, leave_wait_s=1, hold_s=5, max_tokens=8)
SMALL = DegradationConfig(name="small", enter_wait_s=4, leave_wait_s=2, hold_s=3, model="little")
SORRY = DegradationConfig(name="sorry", enter_wait_s=8, leave_wait_s=4, hold_s=1, answer="Later, please.")


def levels(waits: list[tuple[float, float]]) -> list[int]:
    """The level at each instant at which the queue's longest wait is this."""
    now = {"wait_s": 0.0}
    ladder = Ladder((SHORT, SMALL, SORRY), lambda at_ns: int(now["wait_s"] * S))
    found = []
    for at_s, now["wait_s"] in waits:
        found.append(ladder.observe(int(at_s * S)))
    return found


def test_a_stage_is_entered_at_once_and_left_when_it_has_been_calm():
    assert levels([(0, 0), (1, 1.9), (2, 2), (3, 1.5), (9, 1.5)]) == [0, 0, 1, 1, 1]  # between the bounds nothing moves
    assert levels([(0, 2), (1, 1), (5.9, 1), (6, 1)]) == [1, 1, 1, 0]
    assert levels([(0, 2), (1, 1), (5, 1.1), (6, 1), (10.9, 0), (11, 0)]) == [
        1,
        1,
        1,
        1,
        1,
        0,
    ]  # broken calm begins anew
    assert levels([(0, 8), (1, 4), (2, 4)]) == [3, 3, 2]
    assert levels([(0, 8), (1, 0), (2, 0), (5, 0), (10, 0)]) == [3, 3, 2, 1, 0]  # each is held for its own time
    assert levels([(0, 8), (1, 0), (30, 0)]) == [3, 3, 0]  # also where nobody came in between


def asked(path="/v1/chat/completions", **body):
    return forwarded(path, json.dumps({"model": "big", **body}).encode(), 100)


@pytest.mark.parametrize(
    ("body", "stages", "changed", "stage"),
    [
        ({}, [SHORT], {"max_tokens": 8}, "short"),
        ({"max_tokens": 9}, [SHORT], {"max_tokens": 8}, "short"),
        ({"max_tokens": 8}, [SHORT], {"max_tokens": 8}, ""),
        ({"max_tokens": -1}, [SHORT], {"max_tokens": 8}, "short"),
        ({"max_completion_tokens": 50}, [SHORT], {"max_completion_tokens": 8}, "short"),
        ({"max_tokens": 3}, [SHORT, SMALL], {"max_tokens": 3, "model": "little"}, "small"),
        ({"model": "little", "max_tokens": 30}, [SHORT, SMALL], {"max_tokens": 8, "model": "little"}, "short"),
    ],
)
def test_what_a_stage_makes_of_a_request(body, stages, changed, stage):
    made = lesser(asked(**body), stages, 100)
    assert json.loads(made.request.body) == {"model": "big", **body, **changed}
    assert made.stage == stage
    assert made.request.model == changed.get("model", "big")
    assert made.request.output_tokens == (8 if stage == "short" else changed["max_tokens"])


def test_a_mark_is_written_once_and_leaves_the_rest_as_it_is():
    told = {"stage": "short", "reason": "queue_wait"}
    mark = MarkedAnswer(told)
    assert json.loads(mark.in_body(b'{"id":"x"}')) == {"degraded": told, "id": "x"}
    assert mark.in_body(b'{"id":"x"}') == b'{"id":"x"}'
    stream = MarkedAnswer(told)
    assert stream.in_events(b": a comment\n\n") == b": a comment\n\n"
    first, second = events(stream.in_events(b'data: {"id":"x"}\n\ndata: {"id":"x"}\n\n'))
    assert json.loads(first) == {"degraded": told, "id": "x"}
    assert second == b'{"id":"x"}'
    assert MarkedAnswer({}).in_body(b'{"id":"x"}') == b'{"id":"x"}'
    assert MarkedAnswer(told).in_body(b"[1]") == b"[1]"


@pytest.mark.parametrize(
    ("stages", "param"),
    [
        ([{"max_tokens": 1, "model": "m"}], "degradation[0]"),
        ([{}], "degradation[0]"),
        ([{"max_tokens": 0}], "degradation[0].max_tokens"),
        ([{"model": "nobody"}], "degradation[0].model"),
        ([{"max_tokens": 1, "leave_wait_s": 2}], "degradation[0].leave_wait_s"),
        ([{"max_tokens": 1}, {"answer": "a"}], "degradation[1].enter_wait_s"),
        ([{"max_tokens": 1}, {"max_tokens": 1, "name": "s0", "enter_wait_s": 3}], "degradation[1].name"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_refused(stages, param):
    told = [{"name": f"s{i}", "enter_wait_s": 2, "leave_wait_s": 1, **one} for i, one in enumerate(stages)]
    one = {"name": "a", "url": "http://127.0.0.1:1", "models": ["m"]}
    with pytest.raises(ConfigError) as caught:
        config_of({"upstream": [one], "degradation": told})
    assert caught.value.info.param == param


LADDER = "".join(
    f'[[degradation]]\nname = "{name}"\nenter_wait_s = {enter}\nleave_wait_s = 0.05\nhold_s = 0.3\n{action}\n'
    for name, enter, action in (("small", 0.15, 'model = "little"'), ("sorry", 1.2, 'answer = "Later, please."'))
)


def answer_of(gateway, **body):
    request_id = uuid.uuid4().hex
    status, headers, told = gateway.ask("held", {"x-request-id": request_id}, **body)
    account = account_from_json(gateway.account(request_id))
    sums(account)
    return status, headers.get("x-splittime-degraded"), told, account


def test_under_a_long_queue_answers_are_lesser_and_say_so(hostile, tmp_path):
    """The first waits for a place: who comes later has the smaller model, then a template, then all is as before."""
    hostile.hold.clear()
    text = LADDER + upstream("held", hostile.url("held"), max_in_flight=1) + upstream("little", hostile.url("fine"))
    with gateway_of(tmp_path, text) as gateway:
        waiting = [threading.Thread(target=gateway.ask, args=("held",)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: gateway.get("/stats")["degradation"] == ["small"])
        for stream in (False, True):
            status, header, told, account = answer_of(gateway, stream=stream)
            first = json.loads(events(told)[0] if stream else told)
            assert (status, header) == (200, "stage=small; reason=queue_wait")
            assert first["degraded"] == {"stage": "small", "reason": "queue_wait"}
            assert json.loads(hostile.asked["fine"][-1][1])["model"] == "little"
            assert (account.degraded, account.model, account.attempts[0].upstream) == ("small", "little", "little")
        until(lambda: gateway.get("/stats")["degradation"] == ["small", "sorry"])
        for stream in (False, True):
            status, header, told, account = answer_of(gateway, stream=stream)
            first = json.loads(events(told)[0] if stream else told)["choices"][0]
            assert (status, header) == (200, "stage=sorry; reason=queue_wait")
            assert first["delta" if stream else "message"]["content"] == "Later, please."
            assert (account.degraded, account.finish_reason, account.attempts) == ("sorry", "stop", ())
            assert not stream or events(told)[-1] == b"[DONE]"
        assert metric(gateway, "splittime_gateway_degraded_total") == {"small": 2, "sorry": 2}
        hostile.hold.set()
        for thread in waiting:
            thread.join()
        until(lambda: gateway.get("/stats")["degradation"] == [])
        status, header, told, account = answer_of(gateway)
        assert (status, header, account.degraded, account.model) == (200, None, "", "held")
        assert "degraded" not in json.loads(told)


# ---- a sign of life


def begin_stream(gateway, model: str):
    """Returns the id of a stream, and its answer, whose head may be there or not."""
    request_id, connection = send(gateway, model, stream=True)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return request_id, answer


def test_a_stream_that_waits_is_told_so(hostile, tmp_path):
    hostile.hold.clear()
    text = "[queue]\nsign_of_life_s = 0.05\nmax_wait_s = 20.0\n"
    text += upstream("held", hostile.url("held"), "held", "fine", max_in_flight=1)
    text += upstream("strict", hostile.url("strict"), max_in_flight=1)
    with gateway_of(tmp_path, text) as gateway:
        holding = threading.Thread(target=gateway.ask, args=("held",))
        holding.start()
        until(lambda: gateway.get("/stats")["upstreams"][0]["requests"] == 1)
        request_id, answer = begin_stream(gateway, "fine")
        comments = [answer.readline() for _ in range(4)]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [line[:9] for line in comments] == [b": queued;", b"\n", b": queued;", b"\n"]
        hostile.hold.set()
        holding.join()
        told = events(answer.read())  # the held one answers no stream: an error, as the head has been told
        assert json.loads(told[-1])["error"]["code"] == "upstream_200"
        account = account_from_json(gateway.account(request_id))
        sums(account)
        assert ("admit", "upstream_slots") in [(one.stage, one.cause) for one in account.intervals]
        status, *_ = gateway.ask("strict", stream=True)  # who need not wait is answered as ever
        assert status == 400


@pytest.mark.parametrize("wait_s", [0.3, 20.0])
def test_who_has_been_told_to_wait_has_one_head_and_one_end(hostile, tmp_path, wait_s):
    """Then its turn comes, or its time is up."""
    text = f"[queue]\nsign_of_life_s = 0.05\nmax_wait_s = {wait_s}\n"
    text += upstream("mixed", hostile.url("pausing"), max_in_flight=1)
    with gateway_of(tmp_path, text) as gateway:
        first_id, first = begin_stream(gateway, "mixed")
        second_id, second = begin_stream(gateway, "mixed")
        assert events(first.read())[-1] == b"[DONE]"
        body = second.read()
        assert b": queued;" in body
        assert b"HTTP/1.1" not in body
        if wait_s > 1:
            assert events(body)[-1] == b"[DONE]"
            assert len(events(body)) == 5  # the usage was asked for by the gateway alone
        else:
            assert [json.loads(one)["error"]["code"] for one in events(body)] == ["queue_timeout"]
        for request_id in (first_id, second_id):
            sums(account_from_json(gateway.account(request_id)))
