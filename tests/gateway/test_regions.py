"""Regions: how far an upstream is, how long a request would wait there, and who gets it then."""

import random
import re
import socket
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import until
from splittime.core.errors import ConfigError
from splittime.diagnose.explain import explain
from splittime.gateway.config import AffinityConfig, BreakerConfig, UpstreamConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.forwarded import forwarded
from splittime.gateway.routing.affinity import PrefixAffinity
from splittime.gateway.upstream_connections import FirstByteWaits, RoundTrip, RoundTrips, min_rtt_ns
from splittime.gateway.upstreams import Regions, Router, Upstream
from splittime.ledger.account_json import account_from_json

from .conftest import gateway_of, upstream
from .test_chaos import metric
from .test_endings import send

MS, S = 10**6, 10**9
PLACES = {"near": ("here", 1), "near2": ("here", 1), "far": ("there", 80), "far2": ("there", 80)}


def routed_from(home: str | None = "here", affinity: PrefixAffinity | None = None) -> Router:
    made = []
    for name, (region, rtt_ms) in PLACES.items():
        config = UpstreamConfig(name=name, url="http://127.0.0.1:1", models=("m",), region=region)
        made.append(Upstream(config, BreakerConfig()))
        made[-1].round_trip.note(rtt_ms * MS)
    return Router(made, random.Random(3), affinity=affinity, regions=Regions(home, is_on=True))


def busy(one: Upstream, wait_ms: int) -> None:
    """A request waits there, and the one before had its first byte after so long: as long as this will have to."""
    one.waits.sent(100, 0)
    one.waits.sent(100, 0)
    one.waits.begun(100, wait_ms * MS)


# ---- how far


def test_a_shorter_way_counts_at_once_and_a_longer_one_slowly():
    trip = RoundTrip()
    assert trip.ns is None
    for ns in (800, 80, 160):
        trip.note(ns)
    assert trip.ns == 90
    for _ in range(60):
        trip.note(160)
    assert 150 < trip.ns <= 160


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_kernel_tells_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as used:
        server.accept()[0].close()
        ns = min_rtt_ns(used)
    assert ns is not None
    assert 0 <= ns < S
    assert min_rtt_ns(used) is None  # closed
    assert min_rtt_ns(None) is None


def test_only_addresses_of_the_config_are_kept():
    trips = RoundTrips()
    known = trips.of("a", 1)
    trips.note("b", 1, SimpleNamespace(getsockopt=lambda *_: bytes(152)))
    trips.note("a", 1, SimpleNamespace(getsockopt=lambda *_: bytes(148) + (7).to_bytes(4, sys.byteorder)))
    trips.note("a", 1, SimpleNamespace(getsockopt=lambda *_: bytes(148) + b"\xff" * 4))
    trips.note("a", 1, SimpleNamespace(getsockopt=lambda *_: bytes(104)))  # an older kernel
    assert known.ns == 7000
    assert trips.of("a", 1) is known
    assert trips.of("b", 1).ns is None


# ---- how long


def test_the_wait_is_what_waits_over_how_fast_it_has_come_to_a_first_byte():
    waits = FirstByteWaits()
    assert waits.wait_ns(0) == 0
    for _ in range(4):
        waits.sent(50, 0)
    assert waits.wait_ns(0) is None
    waits.begun(50, S // 2)
    waits.begun(50, S)
    assert waits.wait_ns(S) == pytest.approx(S, rel=0.05)  # 100 tokens left, 100 a second
    waits.gone(50, S)
    assert waits.wait_ns(S) == pytest.approx(S / 2, rel=0.05)
    waits.begun(50, S)
    assert (waits.wait_ns(S), waits.tokens) == (0, 0)


def test_time_in_which_nothing_waited_is_not_counted():
    waits = FirstByteWaits()
    for begin_ns in (0, 100 * S, 200 * S):
        waits.sent(100, begin_ns)
        waits.begun(100, begin_ns + S)
    waits.sent(100, 300 * S)
    assert waits.wait_ns(300 * S) == pytest.approx(S, rel=0.05)


def test_an_upstream_that_hangs_has_a_longer_wait_with_every_second():
    waits = FirstByteWaits()
    waits.sent(10, 0)
    waits.sent(10, 0)
    waits.begun(10, S)
    seen = [waits.wait_ns(at * S) for at in (1, 2, 5, 20)]
    assert seen == sorted(seen)
    assert seen[-1] > 15 * S


@pytest.mark.parametrize("at_s", [900, 30_000, 200_000])
def test_however_long_it_hangs_a_wait_is_told_and_fits_into_records(at_s):
    waits = FirstByteWaits()
    waits.sent(1000, 0)
    waits.sent(1000, 0)
    waits.begun(1000, S)
    assert 0 < waits.wait_ns(at_s * S) <= 86_400 * S
    waits.gone(1000, at_s * S)
    waits.sent(10, at_s * S)
    waits.begun(10, (at_s + 1) * S)
    waits.sent(10, (at_s + 60) * S)
    assert waits.wait_ns((at_s + 60) * S) < 600 * S  # and what comes afterwards is believed again


def test_how_often_it_is_asked_changes_nothing():
    often, once = FirstByteWaits(), FirstByteWaits()
    for waits in (often, once):
        waits.sent(10, 0)
        waits.sent(10, 0)
        waits.begun(10, S)
    for at in range(2, 200):
        often.wait_ns(at * S)
    assert often.wait_ns(200 * S) == pytest.approx(once.wait_ns(200 * S), rel=1e-6)


@given(
    st.lists(st.tuples(st.sampled_from(["sent", "begun", "gone"]), st.integers(0, 9), st.integers(1, 99)), max_size=50)
)
def test_whatever_comes_it_counts_what_waits(events):
    waits, waiting, at_ns = FirstByteWaits(), [], 0
    for what, number, tokens in events:
        at_ns += number * 10 * MS
        if what == "sent":
            waits.sent(tokens, at_ns)
            waiting.append(tokens)
        elif waiting:
            getattr(waits, what)(waiting.pop(number % len(waiting)), at_ns)
        assert waits.tokens == sum(waiting)
        wait_ns = waits.wait_ns(at_ns)
        assert (wait_ns == 0) if not waiting else (wait_ns is None or wait_ns > 0)


# ---- who gets it


def names(router: Router, number: int = 40) -> set[str]:
    return {router.choose("m", 0).upstream.name for _ in range(number)}


def test_the_nearest_region_gets_it_and_load_decides_within_it():
    router = routed_from()
    assert names(router) == {"near", "near2"}
    router.upstreams[0].enter(10)
    assert names(router) == {"near2"}
    routed = router.choose("m", 0)
    assert [(one.upstream, one.rtt_ns, one.wait_ns) for one in routed.considered] == [
        ("near2", MS, 0),
        ("near", MS, 0),
        ("far", 80 * MS, 0),
        ("far2", 80 * MS, 0),
    ]


def test_a_farther_one_gets_it_when_the_wait_here_is_longer_than_the_way():
    router = routed_from()
    near, near2, *_ = router.upstreams
    busy(near, 300)
    assert {router.choose("m", 300 * MS).upstream.name for _ in range(20)} == {"near2"}
    busy(near2, 300)
    assert {router.choose("m", 300 * MS).upstream.name for _ in range(20)} == {"far", "far2"}
    told = router.choose("m", 300 * MS).considered
    assert [one.wait_ns for one in told if one.upstream.startswith("near")] == pytest.approx([300 * MS] * 2, rel=0.01)


def test_of_equal_ones_those_here_come_first():
    for home, expected in (("here", {"near", "near2"}), ("there", {"far", "far2"})):
        router = routed_from(home)
        for one in router.upstreams:
            one.round_trip.ns = 50 * MS if one.config.region == home else 46 * MS  # within a tenth
        assert names(router) == expected
    router = routed_from("here")
    for one in router.upstreams:
        one.round_trip.ns = 60 * MS if one.config.region == "here" else 46 * MS
    assert names(router) == {"far", "far2"}


def test_what_is_not_known_is_tried():
    router = routed_from("here")
    router.upstreams[0].round_trip.ns = router.upstreams[1].round_trip.ns = 5 * MS
    router.upstreams[2].round_trip.ns = None
    assert names(router) == {"far"}


def test_full_upstreams_are_not_looked_at():
    router = routed_from()
    for one in router.upstreams[:2]:
        for _ in range(one.limit):
            one.enter(1)
    assert names(router) == {"far", "far2"}


def test_affinity_stays_within_the_region():
    affinity = PrefixAffinity(AffinityConfig(slack_tokens=10**6))
    router = routed_from(affinity=affinity)
    asked = forwarded("/v1/completions", b'{"model": "m", "prompt": "' + b"x" * 2000 + b'"}', 16)
    prefix = affinity.seen(asked, "")
    affinity.note_sent(prefix, "far", None)
    routed = router.choose("m", 0, (), prefix)
    assert routed.upstream.config.region == "here"
    affinity.note_sent(prefix, "near2", None)
    router.upstreams[1].enter(1000)
    routed = router.choose("m", 0, (), prefix)
    assert (routed.upstream.name, routed.affinity.result) == ("near2", "hit")
    assert routed.considered[-1].rtt_ns == 80 * MS


def test_a_region_that_nobody_has_is_refused():
    text = '[[upstream]]\nname = "{}"\nurl = "http://127.0.0.1:1"\nmodels = ["m"]\n'
    a, b = text.format("a"), text.format("b")
    for told, param in (
        (a + 'region = "x"\n' + b, "upstream[1].region"),
        ('region = "y"\n' + a + 'region = "x"\n', "region"),
        ('region = "y"\n' + a, "region"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(tomllib.loads(told))
        assert caught.value.info.param == param
        assert caught.value.info.hint
    assert config_of(tomllib.loads('region = "x"\n' + a + 'region = "x"\n')).region == "x"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_a_request_measures_the_way_that_it_goes(hostile, tmp_path):
    text = 'region = "here"\n' + upstream("one", hostile.url("fine"), "m", region="here")
    text += upstream("two", "http://127.0.0.1:9", "m", region="there")
    with gateway_of(tmp_path, text) as gateway:
        for number in range(3):
            status, headers, _ = gateway.ask("m", {"x-request-id": f"r{number}"}, stream=number == 2)
            assert (status, headers["x-splittime-upstream"]) == (200, "one")
        account = account_from_json(gateway.account("r2"))
        first, second = account.attempts[0].considered
        assert (first.upstream, second.upstream) == ("one", "two")
        assert 0 <= first.rtt_ns < S
        assert (first.wait_ns, second.rtt_ns) == (0, None)
        assert "ms away, 0.000 ms to wait" in " ".join(explain(account).plain.split())
        told = {one["name"]: one for one in gateway.get("/stats")["upstreams"]}
        assert (told["one"]["region"], told["two"]["round_trip_ns"]) == ("here", None)
        assert told["one"]["round_trip_ns"] < S


def test_what_is_no_stream_tells_nothing_of_a_queue(hostile, tmp_path):
    with gateway_of(tmp_path, upstream("held", hostile.url("slow"))) as gateway:
        for is_stream, told in ((False, {"held": 0.0}), (True, {})):  # nothing: a stream waits
            asked = len(hostile.asked["slow"])
            request_id, connection = send(gateway, "held", stream=is_stream)
            until(lambda asked=asked: len(hostile.asked["slow"]) > asked)
            assert metric(gateway, "splittime_gateway_expected_wait_seconds") == told
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            assert account_from_json(gateway.account(request_id)).finish_reason == "abort"
        assert metric(gateway, "splittime_gateway_expected_wait_seconds") == {"held": 0.0}


def test_the_guides_examples_are_taken():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "gateway-affinity.md").read_text()
    affinity, regions = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    config = config_of(tomllib.loads(regions + affinity))
    assert [one.region for one in config.upstream] == ["fra", "iad"]
    assert config.affinity == AffinityConfig()
