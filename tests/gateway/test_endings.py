"""Clients that leave, at any moment, and gateways that are told to stop: each request ends once, and accounts sum."""

import contextlib
import http.client
import json
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import until
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, upstream
from .test_relay import events


def send(gateway, model: str, **body) -> tuple[str, socket.socket]:
    """A request on a socket of its own; returns its id, and the socket to be read or left."""
    request_id, host = uuid.uuid4().hex, gateway.url.removeprefix("http://")
    told = json.dumps({"model": model, "messages": [], "max_tokens": 3, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: {request_id}\r\n"
    connection = socket.create_connection((host.split(":")[0], int(host.split(":")[1])))
    connection.sendall(f"{head}content-length: {len(told)}\r\n\r\n".encode() + told)
    return request_id, connection


@pytest.mark.timing
def test_a_client_that_leaves_frees_the_upstream_at_once(gateway, hostile):
    for model in ("slow", "endless", "stalling"):
        seen, asked = len(hostile.gone_s[model]), len(hostile.asked[model])
        request_id, connection = send(gateway, model, stream=True)
        while len(hostile.asked[model]) == asked:
            time.sleep(0.002)
        left_s = time.monotonic()
        connection.close()
        while len(hostile.gone_s[model]) == seen:
            assert time.monotonic() - left_s < 5
            time.sleep(0.002)
        assert hostile.gone_s[model][-1] - left_s < 0.25  # and no limit has passed
        account = account_from_json(gateway.account(request_id))
        account.verify()
        assert account.finish_reason == "abort"
        assert account.cancelled_ns is not None
        assert account.attempts[0].error == "cancelled"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    leavers=st.lists(
        st.tuples(
            st.sampled_from(["fine", "dying", "endless", "slow", "hangup", "away+fine", "dead+fine"]),
            st.booleans(),
            st.sampled_from([0.0, 0.001, 0.005, 0.02, 0.06]),
            st.sampled_from([0, 1, 200, 100_000]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_account_sums_whoever_leaves_when(gateway, leavers):
    """Each leaves after so long and so many bytes: before, within, or after its answer."""

    def leave(model: str, stream: bool, wait_s: float, num_bytes: int) -> str:
        request_id, connection = send(gateway, model, stream=stream, pause_s=0.004)
        time.sleep(wait_s)
        connection.settimeout(0.03)
        with connection, contextlib.suppress(TimeoutError):
            while num_bytes > 0 and (data := connection.recv(num_bytes)):
                num_bytes -= len(data)
        return request_id

    with ThreadPoolExecutor(len(leavers)) as pool:
        request_ids = list(pool.map(leave, *zip(*leavers, strict=True)))
    for request_id in request_ids:
        told = gateway.account(request_id)
        assert "choices" not in told  # one account each
        account = account_from_json(told)
        account.verify()
        assert sum(one.duration_ns for one in account.intervals) == account.end_ns - account.start_ns
        for attempt in account.attempts:
            assert account.start_ns <= attempt.begin_ns <= attempt.end_ns
    assert_nothing_is_left(gateway)


def assert_nothing_is_left(gateway):
    """No place, no token and no request is held by anybody once all are gone."""
    for _ in range(300):
        told = gateway.get("/stats")
        held = [one["requests"] + one["tokens"] for one in told["upstreams"]]
        if not any(held) and told["open_requests"] == 0 and told["queue"] == {"requests": 0, "tokens": 0}:
            return
        time.sleep(0.02)
    raise AssertionError(told)


def test_five_hundred_leave_at_once(gateway):
    connections = [send(gateway, "endless" if number % 2 else "slow", stream=True) for number in range(500)]
    for _, connection in connections:
        connection.close()
    assert_nothing_is_left(gateway)
    for request_id, _ in connections:
        account_from_json(gateway.account(request_id)).verify()


AT_ONCE = {"splittime.web.serving:STALL_MORE_S": 0.0}  # the connection of one that reads nothing is cut then


def test_a_slow_reader_is_dropped(hostile, tmp_path):
    """It reads nothing: the gateway stops reading the upstream, keeps none of it, and cuts the connection in time."""
    text = "slow_reader_s = 0.2\n" + upstream("torrent", hostile.url("torrent"))
    with gateway_of(tmp_path, text, AT_ONCE) as gateway:
        request_id, connection = send(gateway, "torrent", stream=True)
        account = account_from_json(gateway.account(request_id, tries=1000))
        account.verify()
        assert account.finish_reason == "abort"
        assert hostile.most_sent < 96 * 2**20  # of what the sockets between them hold
        connection.close()


def test_a_stop_lets_what_is_open_end(hostile, tmp_path):
    """SIGTERM: nobody new, the open answer is whole, and the exit code is 0 (`gateway_of`)."""
    hostile.hold.clear()
    with gateway_of(tmp_path, upstream("held", hostile.url("held"))) as gateway:
        before = len(hostile.asked["held"])
        _, connection = send(gateway, "held")
        until(lambda: len(hostile.asked["held"]) != before)
        gateway.stop()
        until(lambda: gateway.get("/stats")["is_draining"])
        status, _, body = gateway.ask("held")
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        hostile.hold.set()
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert json.loads(answer.read())["choices"]


def test_after_the_grace_time_a_stream_ends_with_an_error(hostile, tmp_path):
    with gateway_of(tmp_path, "grace_s = 0.1\n" + upstream("endless", hostile.url("endless"))) as gateway:
        _, connection = send(gateway, "endless", stream=True)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        gateway.stop()
        told = events(answer.read())
        assert json.loads(told[-1])["error"]["code"] == "draining"
