"""Who gets the next request: those that may have none are nobody's hope, and what has no first byte counts."""

from time import monotonic_ns as now_ns

import pytest

from splittime.core.errors import Refused
from splittime.gateway.breaker import Breaker
from splittime.gateway.upstreams import LACKS_NS, Router, held_line

from .test_fair_queue import router_of

S = 10**9


def test_an_upstream_that_may_have_none_is_not_waited_for():
    router = router_of(0, 1)
    none, one = router.upstreams
    assert router.choose("m", 1).upstream is one
    assert router.choose("m", 1, [one.name]).upstream is one
    assert router.has_room_for("m", 1, [one.name])
    one.enter(1)
    assert router.choose("m", 1, [one.name]) is None
    assert not none.has_room


def test_of_upstreams_that_may_have_some_the_one_that_was_not_tried_is_waited_for():
    router = router_of(1, 1)
    tried, full = router.upstreams
    full.enter(1)
    assert router.choose("m", 1, [tried.name]) is None


def test_a_path_is_lacked_for_the_model_that_was_asked_for():
    (upstream,) = router_of(1).upstreams
    upstream.note_lacks("/v1/score", "m", 0)
    router = Router([upstream])  # of a config that was read again: what was said before counts
    assert router.left_out("m", "/v1/score", "m", "a", 1) == ["u0"]
    assert router.left_out("m", "/v1/score", "n", "a", 1) == router.left_out("m", "/v1/rerank", "m", "a", 1) == []


def test_a_pause_of_one_tenant_is_kept_by_another_config_and_over_when_it_is():
    paused, other = router_of(1, 1).upstreams
    paused.breaker.note_busy(0, 10.0, "a")
    router = Router([paused, other])
    assert router.left_out("m", "/v1/score", "m", "a", 1) == [paused.name]
    assert router.left_out("m", "/v1/score", "m", "b", 1) == router.left_out("m", "/", "m", "a", 10**10) == []
    router.require_one("m", "a", 1)
    other.breaker.note_busy(0, 5.0, "a")
    router.require_one("m", "b", 1)
    with pytest.raises(Refused) as caught:
        router.require_one("m", "a", 10**9)
    assert (caught.value.reason, caught.value.info.retry_after_s) == ("upstreams_busy", 4.0)


def test_where_all_others_were_tried_a_tenants_pause_is_kept_all_the_same():
    router = router_of(1, 1)
    paused, tried = router.upstreams
    paused.breaker.note_busy(0, 10.0, "a")
    avoided = [paused.name, tried.name]
    assert {router.choose("m", 1, avoided, tenant="a").upstream for _ in range(20)} == {tried}
    assert {router.choose("m", 1, avoided, tenant="b").upstream for _ in range(20)} == {paused, tried}
    assert {router.choose("m", 10 * S, avoided, tenant="a").upstream for _ in range(20)} == {paused, tried}
    assert router.choose("m", 1, tenant="a").upstream is tried
    tried.enter(1)
    assert router.choose("m", 1, avoided, tenant="a") is None


def test_nobody_is_looked_at_once_the_last_pause_or_lack_is_over(monkeypatch):
    router, looked = router_of(1, 1), []
    monkeypatch.setattr(Breaker, "pause_ns", lambda breaker, tenant, at_ns: looked.append(at_ns) or 0)

    def num_looked(at_ns: int) -> int:
        looked.clear()
        router.left_out("m", "/v1/score", "m", "a", at_ns)
        router.require_one("m", "a", at_ns)
        return len(looked)

    assert num_looked(0) == 0
    router.upstreams[0].breaker.note_busy(0, 30.0, "a")
    router.upstreams[0].breaker.note_busy(0, 10.0, "b")
    assert (num_looked(30 * S - 1), num_looked(30 * S)) == (4, 0)
    router.upstreams[1].breaker.note_busy(30 * S, 10.0)  # for all: it is not allowed then, whoever asks
    assert num_looked(31 * S) == 0
    router.upstreams[1].note_lacks("/v1/rerank", "m", 41 * S)
    assert (num_looked(41 * S + LACKS_NS - 1), num_looked(41 * S + LACKS_NS)) == (4, 0)


def test_requests_that_do_not_stream_are_work_before_a_first_byte():
    """What streams already counts less than a plain request in flight, though it has more tokens."""
    router = router_of(9, 9)
    streams, plain = router.upstreams
    streams.enter(1000)
    streams.waits.sent(1000, 0)
    streams.waits.begun(1000, 1)
    plain.enter(10)
    plain.in_flight.plain_tokens += 10
    assert all(router.choose("m", 2).upstream is streams for _ in range(20))


def test_whoever_waits_for_the_keeper_of_a_response_is_told_of_it_in_plain_words():
    router = router_of(1)
    told = router.nobody(held_line("u0"), now_ns()).info
    assert (told.message, told.code) == ("upstream 'u0', which keeps the response, does not answer", "no_upstream")
    assert router.nobody("m", now_ns()).info.message == "no upstream of 'm' answers"
    router.upstreams[0].breaker.note_busy(now_ns(), 10.0)
    assert router.nobody(held_line("u0"), now_ns()).info.message.endswith("keeps the response, asked for a pause")
