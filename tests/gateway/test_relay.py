"""What a client gets, and what the account says of it, from upstreams that answer, fail, break off or never end."""

import http.client
import json
import time
import uuid

import pytest

from splittime.ledger.account_json import account_from_json


def events(body: bytes) -> list[bytes]:
    return [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]


def asked(gateway, model, **more):
    """Returns the answer and its account, which sums exactly."""
    request_id = uuid.uuid4().hex
    headers = {"x-request-id": request_id, **more.pop("headers", {})}
    status, answer_headers, body = gateway.ask(model, headers, **more)
    account = account_from_json(gateway.account(request_id))
    account.verify()
    assert sum(one.duration_ns for one in account.intervals) == account.end_ns - account.start_ns
    assert answer_headers["x-request-id"] == request_id
    return status, answer_headers, body, account


def stages(account) -> list[str]:
    return [one.stage.value for one in account.intervals]


def test_a_whole_answer_is_the_upstreams_own(gateway, hostile):
    status, _, body, account = asked(gateway, "fine")
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "tick"
    assert stages(account) == ["receive", "admit", "route", "upstream", "deliver"]
    assert (account.prompt_tokens, account.output_tokens, account.finish_reason) == (7, 3, "stop")
    (attempt,) = account.attempts
    assert (attempt.upstream, attempt.status, attempt.error, attempt.knows_tokens) == ("fine", 200, "", True)
    assert account.start_ns < attempt.begin_ns < attempt.first_byte_ns <= attempt.end_ns


def test_a_stream_comes_piece_by_piece(gateway):
    _, headers, body, account = asked(gateway, "fine", stream=True)
    assert headers["content-type"] == "text/event-stream"
    assert len(events(body)) == 5  # without the usage, which nobody asked for
    assert events(body)[-1] == b"[DONE]"
    assert account.attempts[0].num_events == 5
    assert (account.finish_reason, account.output_tokens) == ("stop", 3)


def test_a_piece_is_given_before_the_next_is_there(gateway):
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"))
    body = {"model": "fine", "messages": [], "stream": True, "pause_s": 0.2}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    first = connection.getresponse().read1()
    assert (b"data: {" in first, b"[DONE]" in first) == (True, False)
    connection.close()


def test_what_the_upstream_is_asked(gateway, hostile):
    asked(gateway, "fine", headers={"authorization": "Bearer secret", "traceparent": "00-1-2-01", "cookie": "a=b"})
    headers, body = hostile.asked["fine"][-1]
    assert not {"authorization", "cookie"} & headers.keys()  # a client's key is the gateway's business
    assert headers["traceparent"] == "00-1-2-01"
    assert 0 < int(headers["x-request-deadline-ms"]) <= 20_000
    assert json.loads(body)["model"] == "fine"


def test_a_deadline_is_passed_on_and_kept(gateway, hostile):
    status, _, body, account = asked(gateway, "slow", headers={"x-request-deadline-ms": "150"})
    assert account.end_ns - account.start_ns > 0.14e9
    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
    assert account.finish_reason == "deadline"
    assert 100 < int(hostile.asked["slow"][-1][0]["x-request-deadline-ms"]) <= 150


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("dead", 502, "upstream_unreachable"),
        ("slow", 504, "upstream_first_byte_timeout"),
        ("halfopen", 504, "upstream_first_byte_timeout"),
        ("hangup", 502, "upstream_broke_off"),
        ("garbage", 502, "upstream_broke_off"),
        ("lying", 502, "upstream_died"),
        ("redirect", 502, "upstream_bad_answer"),
    ],
)
def test_a_failure_before_the_answer_is_an_error(gateway, model, status, code):
    for stream in (False, True):
        told, _, body, account = asked(gateway, model, stream=stream)
        assert (told, json.loads(body)["error"]["code"]) == (status, code)
        assert (account.finish_reason, account.error.code, account.attempts[-1].error) == ("error", code, code)
        assert stages(account)[-2:] == ["upstream", "deliver"]


@pytest.mark.parametrize(("model", "status", "reason"), [("broken", 500, "error"), ("strict", 400, "refused")])
def test_what_an_upstream_says_of_a_failure_is_told(gateway, hostile, model, status, reason):
    before = len(hostile.asked[model])
    told, _, body, account = asked(gateway, model)
    assert (told, list(json.loads(body))) == (status, ["error"])
    assert (account.finish_reason, account.error.code) == (reason, f"upstream_{status}")
    assert len(hostile.asked[model]) == before + 1  # neither is tried again


def test_a_pause_that_an_upstream_asks_for_is_told(gateway):
    status, headers, _, account = asked(gateway, "busy")
    assert (status, headers["retry-after"]) == (429, "7")
    assert account.is_turned_away


@pytest.mark.parametrize("name", ["dead", "away", "hangup", "garbage", "busy", "broken", "lying"])
def test_another_upstream_is_tried_before_the_first_byte(gateway, name):
    both = []
    while not any(len(account.attempts) == 2 for *_, account in both):
        assert len(both) < 60  # each time a coin says who is first
        both.append(asked(gateway, f"{name}+fine", stream=True))
    assert all(status == 200 and events(body)[-1] == b"[DONE]" for status, _, body, _ in both)
    tried = [[attempt.upstream for attempt in account.attempts] for *_, account in both]
    assert [f"{name}2", f"fine-after-{name}"] in tried
    retried = next(account for *_, account in both if len(account.attempts) == 2)
    assert stages(retried).count("upstream") == 2
    assert ("route", "retry_pause") in [(one.stage, one.cause) for one in retried.intervals]


def test_nothing_is_tried_again_after_its_first_byte(gateway):
    for _ in range(6):
        *_, account = asked(gateway, "dying+fine", stream=True)
        assert len(account.attempts) == 1


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("dying", "upstream_died"),
        ("polite", "upstream_died"),
        ("stalling", "upstream_stalled"),
        ("endless", "upstream_total_timeout"),
    ],
)
def test_a_stream_that_breaks_off_says_so(gateway, model, code):
    status, _, body, account = asked(gateway, model, stream=True)
    told = events(body)
    assert status == 200
    assert b"tick" in told[0]  # what came before stays
    assert json.loads(told[-1])["error"]["code"] == code
    assert b"[DONE]" not in told
    assert account.error.code == code
    assert account.finish_reason == ("deadline" if model == "endless" else "error")


def test_an_answer_that_is_whole_has_ended(gateway, hostile):
    """What an upstream does with its connection afterwards is no part of the request, and no connection is kept."""
    before = len(hostile.gone_s["lingering"])
    begin_s = time.monotonic()
    _, _, body, account = asked(gateway, "lingering", stream=True)
    assert events(body)[-1] == b"[DONE]"
    assert (account.finish_reason, account.cancelled_ns, account.attempts[0].error) == ("stop", None, "")
    assert account.end_ns - account.start_ns < 0.5e9
    while len(hostile.gone_s["lingering"]) == before:
        assert time.monotonic() - begin_s < 5
        time.sleep(0.01)


def test_an_account_that_cannot_be_is_not_nested(gateway):
    *_, account = asked(gateway, "claiming")
    assert "longer than the gateway's" in account.attempts[0].nested_fault
    assert account.attempts[0].nested == ()
    assert "network" not in stages(account)


def test_bodies_that_are_none(gateway):
    for raw, code in (
        (b"{", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'{"model":1}', "invalid_type"),
        (b'{"model":"a","model":"fine"}', "duplicate_field"),
        (b'{"model":"nobody"}', "model_not_found"),
    ):
        status, _, body = gateway.ask("", raw=raw)
        assert status in (400, 404)
        assert json.loads(body)["error"]["code"] == code


def test_no_client_names_an_upstream(gateway, hostile):
    """A base URL in the body, a header or the path goes nowhere."""
    before = len(hostile.asked["second"])
    elsewhere = hostile.url("second")
    status, *_ = gateway.ask("fine", {"x-upstream-url": elsewhere, "host": "evil.example"})
    assert status == 403  # by that name nobody may call it
    status, *_ = gateway.ask("fine", {"x-portkey-custom-host": elsewhere}, api_base=elsewhere, base_url=elsewhere)
    assert status == 200
    assert len(hostile.asked["second"]) == before
