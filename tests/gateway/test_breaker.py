"""The breaker and the retry budget, under a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.gateway.breaker import Breaker, RetryBudget
from splittime.gateway.config import BreakerConfig, RetryConfig

S = 10**9


def opened(*, has_checker: bool = False) -> Breaker:
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.has_checker = has_checker
    for at_s in (0, 1, 2):
        assert breaker.allows(at_s * S)
        breaker.begin(at_s)
        breaker.note_failure(at_s * S)
        breaker.leave(at_s)
    return breaker


def test_a_pause_for_one_tenant_leaves_the_try_of_an_open_one_to_another():
    breaker = opened()
    for tenant, is_allowed in (("a", True), ("b", False)):
        breaker.begin(tenant)
        breaker.note_busy(12 * S, 5.0, tenant)
        breaker.leave(tenant)
        assert breaker.allows(12 * S) is is_allowed


def test_failures_in_a_row_open_it_and_one_request_tries():
    breaker = opened()
    assert breaker.is_open
    assert not breaker.allows(12 * S - 1)
    assert breaker.wait_ns(3 * S) == 9 * S
    assert breaker.allows(12 * S)
    breaker.begin("first")
    assert not breaker.allows(12 * S)  # the one that tries is alone
    breaker.note_failure(13 * S)
    breaker.leave("first")
    assert not breaker.allows(23 * S - 1)
    breaker.begin("second")
    breaker.note_success()
    assert breaker.allows(23 * S)
    assert not breaker.is_open


def test_a_success_between_keeps_it_closed():
    breaker = Breaker(BreakerConfig(failures=2, open_s=10))
    for _ in range(10):
        breaker.note_failure(0)
        breaker.note_success()
    assert breaker.allows(0)


def test_a_long_answer_that_tries_keeps_nobody_waiting():
    breaker = opened()
    assert breaker.allows(12 * S)
    breaker.begin("first")
    assert not breaker.allows(12 * S)
    breaker.note_begun()
    assert breaker.allows(12 * S)
    assert not breaker.is_open
    breaker.begin("second")
    breaker.note_failure(13 * S)  # one is enough
    assert not breaker.allows(13 * S)


def test_one_that_tried_and_said_nothing_lets_another_try():
    breaker = opened()
    breaker.begin("first")
    breaker.leave("first")
    assert breaker.allows(12 * S)


@pytest.mark.parametrize("end", ["failure", "busy", "nothing"])
def test_only_the_one_that_tries_lets_another_try(end):
    """Older requests, and those of others who are not kept out, end meanwhile in whatever way."""
    breaker = opened()
    breaker.begin("first")
    breaker.begin("later")
    for one in ("older", "later"):
        if end == "failure":
            breaker.note_failure(13 * S)
        elif end == "busy":
            breaker.note_busy(13 * S, 1.0, "a")
        breaker.leave(one)
        assert not breaker.allows(99 * S)
    breaker.leave("first")
    assert breaker.allows(99 * S)


def test_a_busy_upstream_is_left_alone_and_not_open():
    breaker = Breaker(BreakerConfig(failures=1, max_backoff_s=60))
    breaker.note_busy(0, 7.0)
    assert not breaker.allows(7 * S - 1)
    assert breaker.allows(7 * S)
    assert not breaker.is_open
    breaker.note_busy(0, 10**9)
    assert breaker.allows(60 * S)
    breaker.note_busy(100 * S, None)
    assert not breaker.allows(100 * S)
    assert breaker.allows(101 * S)


def test_a_pause_is_not_cut_short_by_a_later_shorter_one():
    breaker = Breaker(BreakerConfig())
    breaker.note_busy(0, 30.0)
    breaker.note_busy(S, 1.0)
    assert breaker.is_busy(30 * S - 1)
    breaker.note_busy(2 * S, 40.0)
    assert breaker.is_busy(42 * S - 1)
    assert not breaker.is_busy(42 * S)


def test_one_with_a_checker_is_tried_after_a_check_alone():
    breaker = opened(has_checker=True)
    assert not breaker.is_to_be_checked(12 * S - 1)
    assert breaker.is_to_be_checked(12 * S)
    assert not breaker.allows(10**6 * S)
    breaker.note_checked(13 * S, is_well=False)
    assert not (breaker.allows(22 * S))
    assert not (breaker.is_to_be_checked(23 * S - 1))
    assert breaker.is_to_be_checked(23 * S)
    breaker.note_checked(23 * S, is_well=True)
    assert breaker.allows(23 * S)
    assert not breaker.is_to_be_checked(23 * S)
    breaker.begin("first")
    assert not breaker.allows(24 * S)  # one tries
    breaker.note_failure(24 * S)
    breaker.leave("first")
    assert not breaker.allows(34 * S)
    assert breaker.is_to_be_checked(34 * S)
    breaker.note_success()
    breaker.note_checked(35 * S, is_well=False)  # of one that lives again nothing is held against it
    assert breaker.allows(35 * S)


def test_what_one_tenant_alone_meets_opens_it_for_nobody_while_others_are_answered():
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.note_success(S, "b")
    for _ in range(20):
        breaker.note_failure(2 * S, "a")
    assert breaker.allows(2 * S)
    breaker.note_failure(3 * S)  # a connection that was reset, once, adds to nothing that only one has met
    assert breaker.allows(3 * S)
    for at_s in (4, 5):
        assert breaker.allows(at_s * S)
        breaker.note_failure(at_s * S, "c")  # two agree
    assert not breaker.allows(5 * S)


def test_what_one_tenant_met_is_not_held_against_others_later_either():
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.note_success(S, "b")
    for _ in range(20):
        breaker.note_failure(2 * S, "a")
    breaker.note_failure(60 * S, "b")  # its answer is old by now
    assert breaker.allows(60 * S)
    breaker.note_failure(60 * S, "a")
    assert breaker.allows(60 * S)
    breaker.note_failure(60 * S, "b")
    assert breaker.is_open


def test_a_tenant_that_is_alone_opens_it():
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.note_success(S, "a")
    breaker.note_success(S, "b")
    for _ in range(3):
        breaker.note_failure(11 * S, "a")  # the other's answer is too old to say anything
    assert breaker.is_open


def test_what_one_tenant_alone_opens_is_open_for_that_one_until_another_fails_too():
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.note_success(S, "b")
    for _ in range(3):
        breaker.note_failure(60 * S, "a")
    seen = [breaker.allows(61 * S, name) for name in ("a", "b", "c", "")]
    assert (breaker.is_open, seen) == (True, [False, True, True, True])
    breaker.note_busy(61 * S, 5.0, "b")
    assert (breaker.allows(62 * S, "b"), breaker.may_be_asked(62 * S, "b")) == (False, True)
    breaker.note_failure(67 * S, "b")
    assert [breaker.allows(68 * S, name) for name in ("a", "b", "c", "")] == [False] * 4
    breaker.note_success(80 * S, "c")
    for _ in range(3):
        breaker.note_failure(95 * S, "a")
    breaker.note_failure(95 * S)  # no connection, whoever asks
    assert [breaker.allows(96 * S, name) for name in ("a", "b", "c", "")] == [False] * 4
    breaker.note_success(100 * S, "c")
    for _ in range(3):
        breaker.note_failure(115 * S)
    assert [breaker.allows(116 * S, name) for name in ("a", "b", "c", "")] == [False] * 4


def test_what_no_request_brings_about_opens_it_whoever_met_it():
    breaker = Breaker(BreakerConfig(failures=3, open_s=10))
    breaker.note_success(S, "b")
    breaker.note_failure(2 * S, "a")
    for _ in range(2):
        breaker.note_failure(2 * S)  # no connection
        assert not breaker.is_open
    breaker.note_failure(2 * S, "a")
    assert breaker.is_open
    breaker.note_success(3 * S, "b")
    for _ in range(3):
        breaker.note_failure(4 * S, "a")  # those before the success are forgotten
    assert not breaker.is_open


def test_what_is_known_against_it():
    breaker = Breaker(BreakerConfig(failures=3))
    assert (breaker.is_well, breaker.num_successes) == (True, 0)
    breaker.note_failure(0)
    assert not breaker.is_well
    breaker.note_success()
    assert (breaker.is_well, breaker.num_successes) == (True, 1)


@given(
    asked=st.lists(st.tuples(st.integers(0, 3 * S), st.booleans()), max_size=300),
    ratio=st.sampled_from([0.0, 0.1, 0.5]),
    spare=st.integers(0, 2),
)
def test_retries_of_a_window_are_within_the_budget(asked, ratio, spare):
    """Of any window that ends at a retry, counted in parts as the budget counts it."""
    budget = RetryBudget(RetryConfig(ratio=ratio, spare=spare, window_s=60))
    at_ns, requests, retries = 0, [], []
    for gap_ns, is_retry in asked:
        at_ns += gap_ns
        if not is_retry:
            budget.note_request(at_ns)
            requests.append(at_ns)
        elif budget.take(at_ns):
            retries.append(at_ns)
            least = (at_ns // S - 59) * S
            in_window = [sum(one >= least for one in each) for each in (requests, retries)]
            assert in_window[1] <= ratio * in_window[0] + spare
    assert budget.num_taken == len(retries)


def test_a_retry_is_to_be_had_while_requests_come():
    budget = RetryBudget(RetryConfig(ratio=0.1, spare=0, window_s=60))
    for _ in range(20):
        budget.note_request(0)
    assert [budget.take(S) for _ in range(3)] == [True, True, False]
    assert not budget.take(60 * S)  # the window is over


def test_a_window_that_is_over_gives_back_what_it_had():
    budget = RetryBudget(RetryConfig(ratio=0, spare=2, window_s=60))
    for window in range(5):
        at_ns = window * 60 * S
        assert [budget.take(at_ns) for _ in range(3)] == [True, True, False]
        assert not budget.take(at_ns + 59 * S)
        assert budget.used(at_ns + 59 * S) == (2, 2)
    assert budget.used(10**6 * S) == (0, 2)


def test_what_is_free_and_what_is_a_failover_is_bounded_by_attempts_alone():
    budget = RetryBudget(RetryConfig(ratio=0, spare=0, max_attempts=3))
    assert not budget.may_retry(1, 0)
    assert budget.may_retry(1, 0, is_free=True)
    assert budget.num_taken == 0
    assert budget.may_retry(2, 0, is_failover=True)
    assert (budget.num_taken, budget.used(0)) == (1, (0, 0))
    assert not budget.may_retry(3, 0, is_free=True, is_failover=True)
    assert not budget.may_retry(1, 5, 5, is_failover=True)  # its client's time is over


def test_who_says_nothing_of_the_upstream_takes_no_failure_back():
    breaker = Breaker(BreakerConfig(failures=2, open_s=10))
    breaker.note_failure(0)
    breaker.begin("first")
    breaker.leave("first")
    breaker.note_failure(0)
    assert not breaker.allows(0)
