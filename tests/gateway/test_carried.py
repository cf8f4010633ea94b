"""What a change of the config keeps: requests in flight at an address, breakers, limits that were used."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import Refused
from splittime.gateway.config import BreakerConfig, UpstreamConfig
from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.service import GatewayService, upstreams_of
from splittime.gateway.upstreams import Router, Upstream
from splittime.gateway.verdict import GOOD, AnswerVerdict, Whose
from splittime.ledger.store import Ledger
from splittime.web.tenants import MINUTE_NS, Quota, Tenant

NOW_NS = 10**12


class Version:
    """A gateway's version, as far as one that follows looks at it."""

    def __init__(self, *made: Upstream, before: "Version | None" = None) -> None:
        self.router = Router(upstreams_of(before, made))
        self.versions = self
        self.living = [self, *(before.living if before is not None else [])]

    def __getitem__(self, number: int) -> Upstream:
        return self.router.upstreams[number]


def made(name="a", url="http://127.0.0.1:1", failures=2, key="k", **told) -> Upstream:
    return Upstream(UpstreamConfig(name=name, url=url, models=("m",), **told), BreakerConfig(failures=failures), key)


CHANGES = [
    {"max_in_flight": 4},
    {"first_byte_s": 5.0},
    {"key": "other"},
    {"failures": 9},
    {"name": "renamed"},
    {"queue_wait_s": 1.0},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_is_in_flight_at_an_address_is_counted_whatever_else_changes(change):
    before = Version(made())
    for _ in range(28):
        before[0].enter(10)
    after = Version(made(**change), before=before)
    assert (after[0].requests, after[0].tokens) == (28, 280)
    assert after[0].has_room == ("max_in_flight" not in change)
    for _ in range(28):
        before[0].leave(10)
    assert (after[0].requests, after[0].tokens, after[0].has_room) == (0, 0, True)
    assert after[0].config.name == change.get("name", "a")


def test_another_address_begins_anew_and_a_name_keeps_its_own():
    before = Version(made(), made("b"))
    before[0].enter(1)
    before[1].enter(2)
    moved = Version(made(url="http://127.0.0.1:2"), made("b", max_in_flight=3), made("c"), before=before)
    assert [one.tokens for one in moved.router.upstreams] == [0, 2, 1]  # what was a's is of that address: c has it


def test_a_second_name_for_an_address_that_keeps_its_first_counts_for_itself():
    before = Version(made())
    before[0].enter(5)
    both = Version(made(), made("twin"), before=before)
    assert [one.tokens for one in both.router.upstreams] == [5, 0]


def test_what_was_away_in_between_is_counted_when_it_comes_back():
    first = Version(made())
    first[0].enter(10)
    between = Version(made("b", "http://127.0.0.1:2"), before=first)
    again = Version(made(max_in_flight=1), before=between)
    assert (again[0].requests, again[0].has_room) == (1, False)


@pytest.mark.parametrize("change", [{"max_in_flight": 4}, {"failures": 3}, {"name": "renamed"}], ids=str)
def test_an_open_breaker_stays_open_unless_its_key_is_another(change):
    before = Version(made())
    before[0].breaker.note_failure(NOW_NS)
    before[0].breaker.note_failure(NOW_NS)
    before[0].note_lacks("/v1/rerank", "m", NOW_NS)
    before[0].breaker.note_busy(NOW_NS, 1.0, "a")
    after = Version(made(**change), before=before)
    assert not after[0].breaker.allows(NOW_NS)
    assert after[0].lacks("/v1/rerank", "m", NOW_NS)
    assert after[0].breaker.pause_ns("a", NOW_NS) == 10**9
    assert after[0].breaker.config.failures == change.get("failures", 2)
    mended = Version(made(key="mended"), before=after)
    assert mended[0].breaker.allows(NOW_NS)
    assert mended.router.left_out("m", "/v1/rerank", "m", "a", NOW_NS) == []


@pytest.mark.parametrize("change", [{}, {"max_in_flight": 4}, {"name": "renamed"}], ids=str)
@pytest.mark.parametrize("whose", [Whose.BUSY, Whose.PATH])
def test_what_an_attempt_of_before_hears_of_its_upstream_counts_after(whose, change):
    before = Version(made())
    after = Version(made(**change), before=before)
    assert after.router.left_out("m", "/v1/rerank", "m", "a", NOW_NS) == []
    before[0].hear(AnswerVerdict(whose, "told", pause_s=1.0), "/v1/rerank", "m", NOW_NS, "a")
    assert after.router.left_out("m", "/v1/rerank", "m", "a", NOW_NS) == [after[0].name]


def test_all_upstreams_of_all_versions_share_until_when_anybody_is_left_out():
    told = {"name": "u", "url": "http://127.0.0.1:1", "models": ["m"]}
    services: list[GatewayService] = []
    for names, failures in ("ab", 2), ("abc", 2), ("cd", 3):
        config = config_of({"upstream": [{**told, "name": name} for name in names], "breaker": {"failures": failures}})
        before = services[-1] if services else None
        services.append(GatewayService(config, secrets_of(config), Ledger(), before=before))
    shared = {one.breaker.left_out for service in services for one in service.router.upstreams}
    assert shared == {services[0].left_out}


def test_a_key_that_is_refused_is_known_until_an_answer_or_another_key():
    before = Version(made())
    refused = AnswerVerdict(Whose.KEY, "upstream_401")
    before[0].hear(refused, "/v1/rerank", "m", NOW_NS)
    after = Version(made(failures=3), before=before)
    assert (after[0].failing, after[0].is_key_refused) == ("upstream_401", True)
    mended = Version(made(key="mended"), before=after)
    assert (mended[0].failing, mended[0].is_key_refused) == ("", False)
    after[0].hear(GOOD, "/v1/rerank", "m", NOW_NS)
    assert (after[0].failing, after[0].is_key_refused) == ("", False)


def test_equal_configs_share_one_upstream():
    before = Version(made())
    assert Version(made(), before=before)[0] is before[0]


def refused(quota: Quota, at_ns: int) -> str:
    try:
        quota.check(at_ns)
    except Refused as caught:
        return caught.reason
    return ""


def test_limits_that_change_forget_nothing_that_was_used():
    at_ns, quota = time.monotonic_ns(), Quota(Tenant(name="t", max_open_requests=9, tokens_per_minute=100))
    use = quota.enter(at_ns)
    quota.use_tokens(80, at_ns)
    quota.change(Tenant(name="t", max_open_requests=1, tokens_per_minute=100))
    assert refused(quota, at_ns) == "max_open_requests"
    use.leave(0, at_ns)
    assert refused(quota, at_ns) == ""
    quota.change(Tenant(name="t", tokens_per_minute=80))
    assert refused(quota, at_ns) == "tokens_per_minute"
    quota.change(Tenant(name="t", tokens_per_minute=90))
    assert refused(quota, at_ns) == ""
    quota.change(Tenant(name="t", requests_per_minute=1))
    quota.enter(at_ns)
    assert refused(quota, at_ns) == "requests_per_minute"


@given(st.lists(st.tuples(st.sampled_from(["use", "change"]), st.integers(1, 200)), max_size=20))
def test_changes_give_no_tokens(steps):
    """However often its limit changes, a key gets no more than the latest limit leaves of what it used."""
    at_ns, used, limit = time.monotonic_ns(), 0, 100
    quota = Quota(Tenant(name="t", tokens_per_minute=limit))
    for what, number in steps:
        if what == "use":
            quota.use_tokens(number, at_ns)
            used += number
        else:
            limit = number
            quota.change(Tenant(name="t", tokens_per_minute=limit))
        assert (refused(quota, at_ns) == "") == (used < limit)
    assert refused(quota, at_ns + 10**6 * MINUTE_NS) == ""
