"""A simulated server: with the true step times it writes the ledger that the real one wrote; and its own admission."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_runs import MOVE_NS, STEP_NS, TIGHT, TOKEN_NS, record_run

from benchmarks.timed_run import HostCosts
from splittime.core.clock import VirtualClock
from splittime.core.errors import Refused
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.messages import Abort, Submit
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.ledger.steps import verify_steps
from splittime.scheduler.admission import Admission, QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.door import Door
from splittime.simulate.drafts import DraftsAt, RequestDrafts
from splittime.simulate.fit import host_parts, is_queued
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import replay
from splittime.simulate.run import OF_THE_REQUEST, Delivery, SimulatedBooks, simulate
from splittime.simulate.shape import StepShape, StepTime, shape_of_record
from splittime.simulate.trace import TracedRequest, at_speed, traced_requests, with_drafts

COSTS = HostCosts(to_wake_ns=11)
UNBOUNDED = QueueLimits(10**9, 10**9)


class TrueCosts:
    """What the runner of the recorded runs takes."""

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        return StepTime(moves_ns=MOVE_NS * shape.moved_blocks, device_ns=STEP_NS + TOKEN_NS * shape.tokens)


CONFIGS = (TIGHT, msgspec.structs.replace(TIGHT, num_host_slots=8), SchedulerConfig(max_model_len=256, num_blocks=60))


@given(st.sampled_from(CONFIGS), st.sampled_from((0, 40)), st.integers(0, 10_000), st.booleans())
def test_with_the_true_times_it_writes_the_recorded_ledger(
    config: SchedulerConfig, eos_every: int, seed: int, plans_ahead: bool
) -> None:
    recorded = record_run(
        config, seed, eos_every=eos_every, costs=COSTS, have_deadlines=False, stops=0.0, plans_ahead=plans_ahead
    )
    requests, delivery = traced_requests(recorded.accounts, 256), Delivery(to_wake_ns=COSTS.to_wake_ns)
    books = simulate(requests, config, TrueCosts(), UNBOUNDED, delivery, plans_ahead=plans_ahead)
    _require_same(books, recorded)


@given(st.sampled_from(CONFIGS), st.sampled_from((0, 40)), st.integers(0, 10_000))
def test_with_the_true_times_it_tells_and_verifies_the_recorded_drafts(
    config: SchedulerConfig, eos_every: int, seed: int
) -> None:
    recorded = record_run(config, seed, eos_every=eos_every, costs=COSTS, have_deadlines=False, stops=0.0, guess_ns=0)
    requests = with_drafts(traced_requests(recorded.accounts, 256), recorded.steps)
    delivery = Delivery(to_wake_ns=COSTS.to_wake_ns)
    books = simulate(requests, config, TrueCosts(), UNBOUNDED, delivery, drafts_seed=0)
    assert any(step.verified for step in books.steps)
    _require_same(books, recorded)


def _require_same(books: SimulatedBooks, recorded: Recorded) -> None:
    verify_steps(books.steps)
    assert books.steps == list(recorded.steps)
    made = {account.request_id: account for account in books.accounts}
    for account in recorded.accounts:
        again = made[account.request_id]
        again.verify()
        for name in ("intervals", "finish_reason", "token_ready_ns", "token_steps", "cached_tokens", "num_preemptions"):
            assert getattr(again, name) == getattr(account, name), name


def test_a_shape_is_the_same_from_a_plan_and_from_its_record() -> None:
    shapes = []

    class Watching(TrueCosts):
        def of(self, shape: StepShape, now_ns: int) -> StepTime:
            shapes.append(shape)
            return super().of(shape, now_ns)

    recorded = record_run(TIGHT, seed=4)
    books = simulate(traced_requests(recorded.accounts, 256), TIGHT, Watching(), UNBOUNDED)
    assert [shape_of_record(step) for step in books.steps] == shapes


def test_time_passes_in_the_parts_of_a_step_and_behind_it() -> None:
    class Parts:
        def of(self, shape: StepShape, now_ns: int) -> StepTime:
            return StepTime(1, 20, 0, 300, 4_000, 50_000, 600_000)

    recorded = record_run(TIGHT, seed=4, count=4)
    first, second = simulate(traced_requests(recorded.accounts, 256), TIGHT, Parts(), UNBOUNDED).steps[:2]
    names = ("plan_ns", "launch_ns", "device_ns", "sample_ns", "commit_ns")
    assert [getattr(first, name) for name in names] == [1, 20, 300, 4_000, 50_000]
    assert second.begin_ns - first.end_ns == second.host_gap_ns == 600_000


class HostAndDevice:
    """The host takes longer than the device for a step of few rows, and shorter for one of many."""

    def of(self, shape: StepShape, now_ns: int) -> StepTime:
        return StepTime(plan_ns=700 + shape.rows, launch_ns=13, device_ns=6 * shape.kv_tokens, host_gap_ns=150)


@pytest.mark.parametrize("seed", range(6))
def test_ahead_a_step_takes_what_the_longer_of_host_and_device_does(seed: int) -> None:
    recorded = record_run(TIGHT, seed, count=60)
    requests, costs = traced_requests(recorded.accounts, 256), HostAndDevice()
    books = simulate(requests, TIGHT, costs, UNBOUNDED, plans_ahead=True)
    verify_steps(books.steps)
    kinds, own = set(), host_parts(books.steps)
    for number, (before, step) in enumerate(pairwise(books.steps), 1):
        behind = books.steps[number + 1] if number + 1 < len(books.steps) else None
        if not is_queued(before, step) or not is_queued(step, behind or step):
            continue
        time = costs.of(shape_of_record(step), 0)
        host_ns = 150 + costs.of(shape_of_record(behind), 0).plan_ns
        assert host_ns <= step.end_ns - step.begin_ns <= max(host_ns, 13 + time.device_ns)
        kinds.add(step.end_ns - step.begin_ns > host_ns)
        assert step.ahead_ns == 150
        plan_ns, _, _, _, gap_ns = own[number]
        assert (plan_ns, gap_ns) == (time.plan_ns, 150)
    assert kinds == {False, True}


@pytest.mark.parametrize("seed", range(6))
def test_what_was_simulated_ahead_is_replayed_ahead(seed: int) -> None:
    recorded = record_run(TIGHT, seed, count=60)
    books = simulate(traced_requests(recorded.accounts, 256), TIGHT, HostAndDevice(), UNBOUNDED, plans_ahead=True)
    assert replay(msgspec.structs.replace(recorded, accounts=books.accounts, steps=books.steps)) is None


def test_a_stop_string_ends_its_request_a_little_late() -> None:
    recorded = record_run(TIGHT, seed=4, eos_every=0)
    long = max(recorded.accounts, key=lambda account: account.output_tokens)
    stopped = msgspec.structs.replace(long, finish_reason="stop", freed_ns=None, output_tokens=7, max_tokens=60)
    (request,) = traced_requests([stopped], 256)
    books = simulate([request], TIGHT, TrueCosts(), UNBOUNDED, Delivery(send_lag_ns=10))
    (account,) = books.accounts
    assert (account.finish_reason, account.output_tokens, account.freed_ns) == ("stop", 7, None)
    assert len([step for step in books.steps if step.decode_tokens]) == 7  # the first is the prompt's; one too many


def test_a_stop_string_among_accepted_drafts_ends_its_request_too() -> None:
    recorded = record_run(TIGHT, seed=4, eos_every=0)
    long = max(recorded.accounts, key=lambda account: account.output_tokens)
    stopped = msgspec.structs.replace(long, finish_reason="stop", freed_ns=None, output_tokens=4, max_tokens=60)
    (request,) = traced_requests([stopped], 256)
    drafts = RequestDrafts((long.prompt_tokens + 1,), (DraftsAt(5, 5, 5),), 0.0)
    books = simulate([request._replace(drafts=drafts)], TIGHT, TrueCosts(), UNBOUNDED, drafts_seed=0)
    (account,) = books.accounts
    assert (account.finish_reason, account.output_tokens) == ("stop", 4)
    second = books.steps[-1].step_id
    assert account.token_steps == (second - 1, second, second, second)


def test_an_answer_ends_when_its_last_token_is_written() -> None:
    recorded = traced_requests(record_run(TIGHT, seed=4).accounts, 256)
    nobody_knows = [msgspec.structs.replace(traced.account, token_written_ns=()) for traced in recorded]
    requests = [traced._replace(account=account) for traced, account in zip(recorded, nobody_knows, strict=True)]
    for delivery, behind_ns in ((Delivery(send_lag_ns=70), 70), (Delivery(send_lag_ns=70, end_ns=90), 90)):
        for account in simulate(requests, TIGHT, TrueCosts(), UNBOUNDED, delivery).accounts:
            if account.token_ready_ns and account.finish_reason == "length":
                assert account.token_written_ns == tuple(ns + 70 for ns in account.token_ready_ns)
                assert account.end_ns - account.token_ready_ns[-1] == behind_ns


def test_twice_as_fast_means_half_the_gaps() -> None:
    requests = traced_requests(record_run(TIGHT, seed=4).accounts, 256)
    fast = at_speed(requests, 2.0)
    starts = [request.marks[0].begin_ns for request in requests]
    expected = [starts[0] + (start - starts[0]) / 2 for start in starts]
    assert [request.marks[0].begin_ns for request in fast] == pytest.approx(expected, abs=1)
    for slow, quick in zip(requests, fast, strict=True):
        delta_ns = quick.marks[0].begin_ns - slow.marks[0].begin_ns
        assert quick.received_ns - slow.received_ns == delta_ns
        assert quick.request.submitted_ns - slow.request.submitted_ns == delta_ns
        before, after = slow.request.deadline_ns, quick.request.deadline_ns
        assert after is None if before is None else after == before + delta_ns
        assert quick.leaves_ns is None if slow.leaves_ns is None else quick.leaves_ns == slow.leaves_ns + delta_ns
    assert at_speed([], 2.0) == []


# ---- the door


def traced(name: str, at_ns: int, tokens: int = 10, leaves_ns: int | None = None) -> TracedRequest:
    account = record_run(TIGHT, seed=4, count=1).accounts[0]
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(range(tokens)),
        sampling=SamplingParams(max_tokens=1, seed=0),
        submitted_ns=at_ns + 5,
    )
    marks = (Mark(Stage.RECEIVE, None, at_ns), Mark(Stage.ADMIT, None, at_ns + 2), Mark(Stage.HANDOFF, None, at_ns + 5))
    return TracedRequest(request, account, marks, at_ns + 9, None, leaves_ns)


class Refusals(list):
    def __call__(self, request: TracedRequest, refused: Refused, at_ns: int) -> None:
        self.append((request.request.request_id, refused.reason, at_ns))


def a_door(limits: QueueLimits, to_wake_ns: int = 0) -> tuple[Door, VirtualClock, Refusals]:
    clock, refusals = VirtualClock(), Refusals()
    return Door(clock, Admission(limits), to_wake_ns, refusals), clock, refusals


def test_who_comes_is_asked_for_when_it_has_got_so_far() -> None:
    door, clock, refusals = a_door(QueueLimits(1, 10**9), to_wake_ns=7)
    door.expect([traced("a", 100), traced("b", 103, leaves_ns=150)])
    assert door.wait(None)
    assert clock.now_ns() == 109 + 7
    assert [(message.request.request_id, at_ns) for message, at_ns in door.take_all()] == [("a", 109)]
    assert refusals == [("b", "queued_requests", 105)]


def test_admission_knows_no_more_than_it_could() -> None:
    """One left the queue at 104, one asked at 103 and one at 105: only the second finds room."""
    door, clock, refusals = a_door(QueueLimits(1, 10**9))
    door.expect(traced(name, at_ns) for name, at_ns in (("a", 0), ("early", 101), ("late", 103)))
    clock.advance_to(50)
    assert [at_ns for _, at_ns in door.take_all()] == [9]
    door.note_begun("a", 104)
    clock.advance_to(300)
    assert [message.request.request_id for message, _ in door.take_all()] == ["late"]
    assert refusals == [("early", "queued_requests", 103)]


def test_who_leaves_is_aborted_and_not_before_it_came() -> None:
    door, clock, _ = a_door(UNBOUNDED)
    door.expect([traced("a", 0, leaves_ns=50), traced("b", 0, leaves_ns=3)])
    clock.advance_to(100)
    came = [(type(message), getattr(message, "request_id", None), at_ns) for message, at_ns in door.take_all()]
    assert came == [(Submit, None, 9), (Submit, None, 9), (Abort, "b", 9), (Abort, "a", 50)]


def test_who_comes_is_asked_for_no_earlier_than_the_rest_of_the_world() -> None:
    asked = []
    door, clock, _ = a_door(UNBOUNDED)
    door.expect(asked.append(name) or traced(name, at_ns) for name, at_ns in (("a", 0), ("b", 4), ("c", 500)))
    assert door.next_ns == 2
    assert asked == ["a", "b"]
    clock.advance_to(100)
    assert len(list(door.take_all())) == 2
    assert door.next_ns == 502


def test_who_comes_out_of_order_is_refused() -> None:
    door, _, _ = a_door(UNBOUNDED)
    door.expect([traced("a", 10), traced("b", 9)])
    with pytest.raises(ValueError, match="'b' comes before 'a'"):
        door.wait(None)


def test_it_wakes_for_messages_and_closes_when_nothing_is_left() -> None:
    door, clock, _ = a_door(UNBOUNDED, to_wake_ns=7)
    assert not door.wait(1e-6)
    assert clock.now_ns() == 1_000
    door.abort("x", 1_500)
    assert door.wait(None)
    assert clock.now_ns() == 1_507
    assert [message for message, _ in door.take_all()] == [Abort("x")]
    assert not door.wait(None)
    assert door.is_closed


def test_the_refused_have_accounts() -> None:
    recorded = record_run(TIGHT, seed=4, count=60, have_deadlines=False)
    requests = traced_requests(recorded.accounts, 256)
    books = simulate(requests, TIGHT, TrueCosts(), QueueLimits(2, 10**9))
    refused = [account for account in books.accounts if account.is_refused]
    assert refused
    assert len(books.accounts) == len(requests)
    for account in books.accounts:
        account.verify()
    assert all(account.is_turned_away and account.error.code == "queued_requests" for account in refused)


@pytest.mark.parametrize("account", [record_run(TIGHT, seed=4).accounts[0]])
def test_an_account_keeps_what_its_request_was(account: ClosedAccount) -> None:
    (request,) = traced_requests([account], 256)
    (made,) = simulate([request], TIGHT, TrueCosts(), UNBOUNDED).accounts
    for name in OF_THE_REQUEST:
        assert getattr(made, name) == getattr(account, name), name
