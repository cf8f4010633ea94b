"""How much a key may use: open requests, requests and tokens of a minute, before they are used and after."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import Refused, RequestError
from splittime.ledger.account import LIMITS_OF_A_KEY
from splittime.web.tenants import ASSUMED_OUTPUT_TOKENS, MINUTE_NS, Bucket, Quota, QuotaUse, Tenant


def quota(**limits: int) -> Quota:
    return Quota(Tenant(name="t", **limits))


def come(used: Quota, now_ns: int) -> QuotaUse:
    used.check(now_ns)
    return used.enter(now_ns)


def test_the_limits_of_a_key_are_known_to_its_accounts() -> None:
    """A refusal for one of them is no want of room (`ClosedAccount.is_turned_away`)."""
    limits = [name for name, kind in Tenant.__annotations__.items() if kind == int | None]
    assert sorted(limits) == sorted(LIMITS_OF_A_KEY)


def test_open_requests_are_bounded() -> None:
    used = quota(max_open_requests=2)
    come(used, 1)
    body = come(used, 1)
    with pytest.raises(Refused) as caught:
        come(used, 1)
    assert caught.value.facts["reason"] == "max_open_requests"
    assert (caught.value.facts["queued"], caught.value.info.limit, caught.value.info.status) == (2, 2, 429)
    body.leave(0, 1)
    come(used, 1)


def test_a_minute_holds_a_minutes_requests_and_fills_evenly() -> None:
    used, now_ns = quota(requests_per_minute=6), 5
    for _ in range(6):
        come(used, now_ns)
    with pytest.raises(Refused, match="requests_per_minute") as caught:
        come(used, now_ns)
    assert caught.value.info.retry_after_s == pytest.approx(10.0)
    come(used, now_ns + MINUTE_NS // 6)
    with pytest.raises(Refused):
        come(used, now_ns + MINUTE_NS // 6)
    for _ in range(6):  # a long rest gives no more than a minute's
        come(used, now_ns + 10 * MINUTE_NS)
    with pytest.raises(Refused):
        come(used, now_ns + 10 * MINUTE_NS)


def test_tokens_used_beyond_the_limit_are_waited_for() -> None:
    used = quota(tokens_per_minute=600)
    come(used, 1)
    used.use_tokens(1200, 1)
    with pytest.raises(Refused, match="tokens_per_minute") as caught:
        come(used, 1)
    assert caught.value.info.retry_after_s == pytest.approx(60.1)
    with pytest.raises(Refused):
        come(used, 1 + MINUTE_NS)
    come(used, 1 + MINUTE_NS + MINUTE_NS // 600)


def test_a_refused_request_uses_nothing() -> None:
    used = quota(max_open_requests=1, requests_per_minute=2)
    body = come(used, 1)
    for _ in range(9):
        with pytest.raises(Refused, match="max_open_requests"):
            come(used, 1)
    body.leave(0, 1)
    come(used, 1)


@given(st.lists(st.tuples(st.integers(0, MINUTE_NS // 4), st.integers(1, 5)), max_size=60), st.integers(1, 50))
def test_a_bucket_never_gives_more_than_a_minutes_worth_and_what_came_in_since(steps, per_minute) -> None:
    bucket, now_ns, given_out = Bucket(per_minute), 1, 0
    for delta_ns, amount in steps:
        now_ns += delta_ns
        if not bucket.wait_s(amount, now_ns):
            bucket.take(amount, now_ns)
            given_out += amount
        assert given_out <= per_minute + (now_ns - 1) * per_minute / MINUTE_NS + 1e-6
        assert bucket.level <= per_minute


@pytest.mark.parametrize("limit", ["max_open_requests", "requests_per_minute"])
def test_a_body_counts_as_its_answers(limit: str) -> None:
    used = quota(**{limit: 4})
    come(used, 1)
    body = used.enter(1)
    body.count_as(3, 1)
    assert (used.num_open, used.used_requests) == (4, 4)
    with pytest.raises(Refused, match=limit) as caught:
        come(used, 1)
    assert caught.value.info.retry_after_s > 0
    body.leave(0, 1)
    assert used.num_open == 1


@pytest.mark.parametrize("limit", ["max_open_requests", "requests_per_minute"])
def test_a_body_of_more_answers_than_there_can_ever_be_is_refused_for_good(limit: str) -> None:
    used = quota(**{limit: 2})
    body = used.enter(1)
    with pytest.raises(RequestError) as caught:
        body.count_as(128, 1)
    told = caught.value.info
    assert (told.status, told.code, told.value, told.limit) == (400, "too_many_choices", 128, 2)
    assert limit in told.message
    assert "at most 2" in (told.hint or "")
    body.leave(0, 1)
    assert used.num_open == 0


def test_a_body_that_has_room_later_is_told_to_come_again_and_takes_nothing() -> None:
    used = quota(max_open_requests=4, requests_per_minute=100)
    used.enter(1, 2)
    body = used.enter(1)
    with pytest.raises(Refused, match="max_open_requests") as caught:
        body.count_as(3, 1)
    assert caught.value.info.status == 429
    assert (used.num_open, used.used_requests, body.requests) == (3, 3, 1)


def test_tokens_are_reserved_before_and_settled_after() -> None:
    used = quota(tokens_per_minute=1000)
    first, second = used.enter(1), used.enter(1)
    first.reserve(600, 1)
    with pytest.raises(Refused, match="tokens_per_minute") as caught:
        second.reserve(600, 1)
    assert caught.value.info.retry_after_s == pytest.approx(12.0)  # 200 of 1000 a minute
    first.leave(100, 1)
    second.reserve(600, 1)
    second.leave(900, 1)
    assert used.used_tokens == 1000
    with pytest.raises(Refused):
        come(used, 1)


def test_many_at_once_use_no_more_than_a_minutes_tokens() -> None:
    """Without a reservation each would see a bucket of which nobody has taken."""
    used, admitted = quota(tokens_per_minute=10_000), 0
    for _ in range(100):
        try:
            used.enter(1).reserve(100 + used.expect(900), 1)
            admitted += 1
        except Refused:
            pass
    assert admitted == 10


def test_what_needs_more_than_a_minutes_tokens_waits_until_none_are_used() -> None:
    used = quota(tokens_per_minute=100)
    used.enter(1).reserve(5000, 1)
    with pytest.raises(Refused):
        used.enter(1).reserve(1, 1)
    other = quota(tokens_per_minute=100)
    other.enter(1).reserve(1, 1)
    with pytest.raises(Refused):
        other.enter(1).reserve(5000, 1)


def test_an_answer_is_expected_to_become_as_long_as_the_longest_of_the_latest() -> None:
    used = quota()
    assert (used.expect(5), used.expect(10**6)) == (5, ASSUMED_OUTPUT_TOKENS)
    used.learn_output(3000)
    assert used.expect(10**6) == 3000
    used.learn_output(10)
    assert used.expect(10**6) == 2700
    for _ in range(100):
        used.learn_output(10)
    assert used.expect(10**6) == 10


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2000), st.integers(0, MINUTE_NS // 8)), max_size=40))
def test_in_the_long_run_a_key_uses_what_its_minutes_allow(bodies) -> None:
    """Whatever is reserved and used: who is let in finds that all before has been paid."""
    per_minute, used, now_ns, longest = 600, quota(tokens_per_minute=600), 1, 0
    for reserved, spent, delta_ns in bodies:
        now_ns += delta_ns
        body = used.enter(now_ns)
        try:
            used.check(now_ns)
            body.reserve(reserved, now_ns)
        except Refused:
            body.leave(0, now_ns)
            continue
        body.leave(spent, now_ns)
        longest = max(longest, spent)
        assert used.used_tokens <= per_minute + (now_ns - 1) * per_minute / MINUTE_NS + longest


@pytest.mark.parametrize("limit", ["max_open_requests", "requests_per_minute"])
def test_a_body_may_ask_for_as_many_answers_as_the_limit_and_for_not_one_more(limit: str) -> None:
    body = come(quota(**{limit: 3}), 1)
    body.count_as(3, 1)
    with pytest.raises(RequestError, match="asks for 4 answers") as caught:
        body.count_as(4, 1)
    assert (caught.value.info.status, caught.value.info.limit) == (400, 3)
