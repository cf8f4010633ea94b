"""Loads that wait for answers: closed loops and sessions, under a virtual clock."""

from collections.abc import Sequence

import pytest
from known_replicas import LOAD, REPLICA

from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.plan.load import load_at, requests_for
from splittime.simulate.change import Change
from splittime.simulate.run import simulate
from splittime.simulate.trace import TracedRequest

CLOSED = {name: value for name, value in LOAD.items() if name not in ("rate", "duration_s")}


def served(load: dict[str, object]) -> list[ClosedAccount]:
    """Returns the accounts in the order in which the requests came."""
    books = REPLICA.run(requests_for(load, REPLICA), Change(), seed=0)
    return sorted(books.accounts, key=lambda account: account.start_ns)


def most_at_once(accounts: Sequence[ClosedAccount]) -> int:
    edges = sorted([(a.start_ns, 1) for a in accounts] + [(a.end_ns, -1) for a in accounts])
    return max(sum(step for _, step in edges[: place + 1]) for place in range(len(edges)))


def test_each_worker_of_a_closed_loop_asks_again_when_it_is_answered() -> None:
    accounts = served({**CLOSED, "concurrency": 3, "num_requests": 40})
    assert len(accounts) == 40
    assert most_at_once(accounts) == 3
    assert [account.start_ns for account in accounts[:3]] == [0, 0, 0]
    ends_ns = sorted(account.end_ns for account in accounts)
    assert [account.start_ns for account in accounts[3:]] == ends_ns[:37]


def test_a_closed_loop_begins_nothing_when_its_time_is_over() -> None:
    accounts = served({**CLOSED, "concurrency": 3, "duration_s": 0.4})
    assert 300_000_000 < accounts[-1].start_ns < 400_000_000
    assert len([account for account in accounts if account.end_ns >= 400_000_000]) == 3


def test_a_turn_comes_when_its_user_has_read_and_thought() -> None:
    requests = requests_for({**LOAD, "turns": "3", "think_s": "0.05", "rate": 4.0}, REPLICA)
    ends_ns = {account.request_id: account.end_ns for account in REPLICA.run(requests, Change(), 0).accounts}
    later = [each for each in requests if each.follows is not None]
    assert len(later) > len(requests) / 2
    starts_ns = {account.request_id: account.start_ns for account in REPLICA.run(requests, Change(), 0).accounts}
    for traced in later:
        assert starts_ns[traced.request.request_id] == _due_ns(traced, ends_ns)


def _due_ns(turn: TracedRequest, ends_ns: dict[str, int]) -> int:
    assert turn.follows is not None
    assert turn.follows.request_id is not None
    return max(turn.arrived_ns, ends_ns[turn.follows.request_id] + turn.follows.think_ns)


def test_a_slow_answer_holds_the_next_turn_up() -> None:
    load = {**LOAD, "turns": "2", "rate": 4.0, "expected_ttft_ms": 0.0, "expected_tpot_ms": 0.0}
    requests = requests_for(load, REPLICA)
    starts_ns = {account.request_id: account.start_ns for account in REPLICA.run(requests, Change(), 0).accounts}
    late = [each for each in requests if each.follows and starts_ns[each.request.request_id] > each.arrived_ns]
    assert late


def test_workers_take_turns_that_are_due_before_new_sessions() -> None:
    requests = requests_for({**CLOSED, "concurrency": 2, "num_requests": 24, "turns": "3", "think_s": "0"}, REPLICA)
    accounts = sorted(REPLICA.run(requests, Change(), 0).accounts, key=lambda account: account.start_ns)
    assert len(accounts) == len(requests)
    assert most_at_once(accounts) == 2
    place = {account.request_id: number for number, account in enumerate(accounts)}
    for traced in requests:
        if traced.follows and traced.follows.request_id:
            assert place[traced.request.request_id] - place[traced.follows.request_id] <= 2


@pytest.mark.parametrize(
    "load", [{"concurrency": 5, "num_requests": 60}, {"turns": "3", "rate": 20.0, "duration_s": 4.0}]
)
def test_the_ledger_is_the_same_whether_quiet_steps_are_skipped_or_not(load: dict[str, object]) -> None:
    requests = requests_for({**CLOSED, **load}, REPLICA)

    class Fixed:
        def of(self, shape: object, now_ns: int) -> object:
            return REPLICA.costs.step_time(shape, 1.0, 1.0)  # type: ignore[arg-type]

    plain, skipping = (
        simulate(requests, REPLICA.config, Fixed(), REPLICA.limits, skips_ahead=skips)  # type: ignore[arg-type]
        for skips in (False, True)
    )
    assert plain == skipping
    assert len(plain.accounts) == len(requests)


def test_a_closed_loop_has_no_rate_to_plan_with() -> None:
    with pytest.raises(ConfigError, match="no rate to look for") as error:
        load_at({**CLOSED, "concurrency": 4}, 3.0)
    assert error.value.info.param == "concurrency"


def test_sessions_have_no_rate_of_requests_to_plan_with() -> None:
    with pytest.raises(ConfigError, match="one of sessions") as error:
        load_at({**LOAD, "turns": "3"}, 3.0)
    assert "all turns" in str(error.value.info.hint)
