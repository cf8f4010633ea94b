"""The loop's waiting: until something comes or is due, on a clock that passes only while it waits or computes."""

import msgspec
import pytest

from benchmarks.fake_runner import FakeRunner
from benchmarks.timed_run import TimedRun
from splittime.core.clock import VirtualClock
from splittime.core.errors import EngineError
from splittime.core.facts import Machine
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.loop import AWAITING_S, QUIET_S, Inbox, run_loop
from splittime.drive.messages import (
    Abort,
    Configure,
    ConfigureDone,
    FromEngine,
    MaskFound,
    Measured,
    StepOutput,
    Submit,
    ToEngine,
)
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

STEP_NS = 10


class Arrivals(Inbox):
    """Messages come at their instants, while the loop waits; after the last it is closed once the loop would wait for
    ever. `waits`: how long the loop was ready to wait each time."""

    def __init__(self, clock: VirtualClock, messages: dict[int, ToEngine]) -> None:
        super().__init__()
        self._clock, self._coming = clock, dict(sorted(messages.items()))
        self.waits: list[float | None] = []

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        now_ns = self._clock.now_ns()
        until_ns = None if timeout_s is None else now_ns + round(timeout_s * 1e9)
        at_ns = next(iter(self._coming), None)
        if at_ns is not None and (until_ns is None or at_ns <= until_ns):
            self._clock.advance(max(at_ns - now_ns, 0))
            self.put(self._coming.pop(at_ns), self._clock.now_ns())
        elif until_ns is not None:
            self._clock.advance(until_ns - now_ns)
        else:
            self.close()
        return super().wait(0)


class Loop:
    """An engine in its loop, until nothing is left to come."""

    def __init__(self, messages: dict[int, ToEngine], pieces: int = 0) -> None:
        self.clock = VirtualClock()
        runner = FakeRunner(step_ns=STEP_NS, clock=self.clock)
        self.measured_at: list[int] = []
        measuring = self._measuring(pieces) if pieces else None
        parts = EngineParts(Engine(Scheduler(SchedulerConfig())), runner, measuring=measuring)
        self.crank = Crank(parts, self.clock)
        self.inbox = Arrivals(self.clock, messages)
        self.said: list[tuple[int, FromEngine]] = []

    def _measuring(self, pieces: int):
        for left in reversed(range(pieces)):
            self.measured_at.append(self.clock.now_ns())
            self.clock.advance(1)
            yield None if left else Machine(cpu="fake", threads=1)

    def run(self) -> "Loop":
        run_loop(self.crank, self.inbox, lambda m: self.said.append((self.clock.now_ns(), m)))
        return self

    def ends(self) -> dict[str, tuple[FinishReason, int]]:
        told = [(at, news) for at, m in self.said if isinstance(m, StepOutput) for news in m.outputs]
        return {news.request_id: (news.finish_reason, at) for at, news in told if news.finish_reason is not None}


def ask(name: str, submitted_ns: int = 0, deadline_ns: int | None = None, max_tokens: int = 3) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    request = Request(request_id=name, prompt_token_ids=(1, 2), sampling=sampling, submitted_ns=submitted_ns)
    return Submit(msgspec.structs.replace(request, deadline_ns=deadline_ns))


def test_a_deadline_ends_a_paused_request_at_its_instant() -> None:
    loop = Loop({1: Configure(1, {"paused": True}), 2: ask("a", 2, 3_000_000_000), 5: ask("b", 5, 700)}).run()
    assert loop.ends() == {"b": (FinishReason.DEADLINE, 700), "a": (FinishReason.DEADLINE, 3_000_000_000)}
    assert loop.inbox.waits[:2] == [None, None]
    assert loop.inbox.waits[3:] == [695 / 1e9, 2_999_999_300 / 1e9, None]


def test_a_deadline_that_has_passed_is_not_waited_for() -> None:
    loop = Loop({1: Configure(1, {"paused": True}), 50: ask("late", 10, 20)}).run()
    assert loop.ends() == {"late": (FinishReason.DEADLINE, 50)}


def test_each_message_is_taken_in_its_turn_and_answered() -> None:
    loop = Loop(
        {
            1: Configure(4, {"max_num_seqs": 3}),
            2: Configure(5, {"max_num_seq": 3}),
            3: Configure(6, {"paused": True}),
            4: ask("a", 4),
            6: ask("b", 6),
            8: Abort("a"),
            9: Abort("nobody"),
            20: Configure(7, {"paused": False}),
        }
    ).run()
    done = [message for _, message in loop.said if isinstance(message, ConfigureDone)]
    assert [answer.call_id for answer in done] == [4, 5, 6, 7]
    assert [answer.error is None for answer in done] == [True, False, True, True]
    assert [answer.knobs.get("max_num_seqs") for answer in done] == [3, None, 3, 3]
    assert done[1].error is not None
    assert done[1].error.param == "max_num_seq"
    assert loop.ends() == {"a": (FinishReason.ABORT, 8), "b": (FinishReason.LENGTH, 20 + 3 * STEP_NS)}


def test_the_machine_is_measured_when_it_has_been_quiet_for_a_while() -> None:
    """A piece, then quiet again, then a piece; a message in between begins the quiet anew."""
    quiet_ns = round(QUIET_S * 1e9)
    loop = Loop({quiet_ns // 2: ask("a", quiet_ns // 2), 3 * quiet_ns: Abort("nobody")}, pieces=3).run()
    begin_ns = quiet_ns // 2 + 3 * STEP_NS
    second_ns = begin_ns + 2 * quiet_ns + 1
    assert loop.measured_at == [begin_ns + quiet_ns, second_ns, 3 * quiet_ns + quiet_ns]
    assert [type(message) for _, message in loop.said].count(Measured) == 1
    assert not loop.crank.measuring.is_due


@pytest.mark.parametrize(("room_s", "is_measured"), [(QUIET_S, False), (2 * QUIET_S, True)])
def test_no_piece_is_begun_where_a_deadline_comes_first(room_s: float, is_measured: bool) -> None:
    deadline_ns = 2 + round(room_s * 1e9)
    loop = Loop({1: Configure(1, {"paused": True}), 2: ask("a", 2, deadline_ns)}, pieces=2)
    loop.run()
    assert loop.ends() == {"a": (FinishReason.DEADLINE, deadline_ns)}
    assert any(at_ns < deadline_ns for at_ns in loop.measured_at) is is_measured


class CountedCrank(Crank):
    num_turns = 0

    def turn(self) -> StepOutput | None:
        self.num_turns += 1
        assert self.num_turns < 1000, "the loop spins"
        return super().turn()


@pytest.mark.parametrize("ahead_tokens", [0, 30], ids=["all who run await", "one is computed ahead"])
def test_a_loop_does_not_spin_while_nobody_gets_a_row(ahead_tokens: int) -> None:
    """Who runs awaits its mask, a static batch lets nobody in, and a prompt that is computed ahead makes way."""
    config = SchedulerConfig(batching="static", max_num_seqs=3, max_num_batched_tokens=6, max_model_len=64)
    clock, found_ns = VirtualClock(), round(9.5 * AWAITING_S * 1e9)
    runner = FakeRunner(step_ns=STEP_NS, clock=clock, is_late=lambda row: clock.now_ns() < found_ns)
    crank = CountedCrank(EngineParts(Engine(Scheduler(config)), runner), clock)
    run = TimedRun(crank, clock)
    if ahead_tokens:
        ahead = ask("ahead", max_tokens=1).request
        sampling = msgspec.structs.replace(ahead.sampling, pooling=AHEAD)
        run.submit(msgspec.structs.replace(ahead, prompt_token_ids=tuple(range(ahead_tokens)), sampling=sampling))
    run.submit(ask("a", 5).request)
    run.submit(ask("b", 15).request)
    run.at(found_ns, MaskFound("a"))
    run.run()
    assert {len(outcome.finish_reasons) for outcome in run.outcomes.values()} == {1}
    assert 10 <= crank.num_turns - len(run.steps) <= 12  # one in `AWAITING_S`
    assert run.outcomes["a"].token_ready_ns[0] - found_ns <= 3 * STEP_NS


def test_a_failure_ends_it_though_it_waits_and_whatever_else_has_come() -> None:
    inbox = Inbox()
    inbox.put(ask("a"), 0)
    inbox.fail(EngineError("a rank has died"))
    assert inbox.wait(None)
    clock = VirtualClock()
    crank = Crank(EngineParts(Engine(Scheduler(SchedulerConfig())), FakeRunner(clock=clock)), clock)
    with pytest.raises(EngineError, match="a rank has died"):
        run_loop(crank, inbox, lambda message: None)
    assert not crank.engine.scheduler.has_requests


def test_what_came_is_taken_once_in_its_order_with_its_instants() -> None:
    inbox = Inbox()
    assert not inbox.wait(0)
    for number in range(3):
        inbox.put(Abort(str(number)), number)
    assert inbox.wait(None)
    assert inbox.take_all() == [(Abort(str(number)), number) for number in range(3)]
    assert not inbox.wait(0)
    assert inbox.take_all() == []
    inbox.close()
    assert inbox.wait(None)
