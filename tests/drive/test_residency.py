"""Falling asleep and waking, by the engine's own rules: who waits, who is refused, what is answered, what it cost."""

from collections.abc import Callable, Iterator

import pytest
from fake_sleeper import FakeSleeper

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import VirtualClock
from splittime.core.engine import ASLEEP, AWAKE, FALLING_ASLEEP, Rest, SleepAsk, SleepReport
from splittime.core.errors import EngineError, SplittimeError
from splittime.core.facts import Machine
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts, Pieces
from splittime.drive.loop import Inbox, run_loop
from splittime.drive.messages import ConfigureDone, FromEngine, Measured, Sleep, SleepDone, StepOutput, Submit, Wake
from splittime.engine.engine import Engine
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.scheduler import Scheduler

STEP_NS, SLEEP_NS = 1_000, 50_000


def make_request(name: str, max_tokens: int, now_ns: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id=name, prompt_token_ids=tuple(range(1, 10)), sampling=sampling, submitted_ns=now_ns)


class Bedroom:
    """An engine under a virtual clock, with a sleeper, and all that it said."""

    def __init__(self, is_ahead: bool = False, can_sleep: bool = True, measuring: Pieces | None = None) -> None:
        self.clock = VirtualClock()
        runner = FakeRunner(4, step_ns=STEP_NS, clock=self.clock)
        self.scheduler = Scheduler(SchedulerConfig(block_size=4, num_blocks=64, max_model_len=64))
        self.sleeper = FakeSleeper(runner, SLEEP_NS, self.clock.advance)
        engine = Engine(self.scheduler, plans_ahead=is_ahead)
        parts = EngineParts(engine, runner, sleeper=self.sleeper if can_sleep else None, measuring=measuring)
        self.crank = Crank(parts, self.clock)
        self.records: list[StepRecord] = []
        self.news: list[RequestOutput] = []

    def submit(self, name: str, max_tokens: int = 6) -> None:
        self.crank.submit(make_request(name, max_tokens, self.clock.now_ns()), self.clock.now_ns())

    def sleep(self, *ask: object) -> list[SleepReport | SplittimeError]:
        said: list[SleepReport | SplittimeError] = []
        self.crank.sleep(SleepAsk(*ask), self.clock.now_ns(), said.append)
        return said

    def turn(self) -> None:
        output = self.crank.turn()
        self.clock.advance(10)
        if output is not None:
            self.news += output.outputs
            self.records += [output.record] if output.record is not None else []

    def run_dry(self) -> None:
        for _ in range(200):
            if not self.crank.has_work:
                return
            self.turn()
        raise AssertionError("no end of it")

    def tokens_of(self, name: str) -> tuple[int, ...]:
        return tuple(token for news in self.news if news.request_id == name for token in news.token_ids)

    def end_of(self, name: str) -> RequestOutput:
        (end,) = [news for news in self.news if news.request_id == name and news.finish_reason is not None]
        return end


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def room(request: pytest.FixtureRequest) -> Bedroom:
    return Bedroom(request.param)


def test_it_waits_for_what_runs_and_refuses_what_comes(room: Bedroom) -> None:
    room.submit("first")
    room.turn()
    said = room.sleep(2)
    assert room.crank.residency.rest == Rest(FALLING_ASLEEP)
    assert said == []
    room.submit("late")
    room.run_dry()
    assert room.end_of("first").finish_reason is FinishReason.LENGTH
    late = room.end_of("late").error
    assert late is not None
    assert (late.code, late.status, late.hint) == ("asleep", 503, "POST /wake, or LLM.wake()")
    (report,) = said
    assert isinstance(report, SleepReport)
    assert (report.action, report.level, report.aborted_requests) == ("sleep", 2, 0)
    assert report.forgotten_tokens == 12  # three full blocks of the fifteen tokens whose KV was written
    assert list(report.parts_ns) == ["drain", "weights", "kv"]
    assert report.parts_ns["drain"] > 4 * STEP_NS
    assert room.crank.stats().rest == Rest(ASLEEP, 2)
    assert room.scheduler.cache.num_cached == 0


def test_abort_ends_them_with_the_reason(room: Bedroom) -> None:
    room.submit("one")
    room.submit("two")
    room.turn()
    said = room.sleep(1, "abort")
    room.run_dry()
    for name in ("one", "two"):
        end = room.end_of(name)
        assert end.finish_reason is FinishReason.ERROR
        assert end.error is not None
        assert end.error.code == "asleep"
        assert "put to sleep" in end.error.message
    assert isinstance(said[0], SleepReport)
    assert said[0].aborted_requests == 2
    assert room.scheduler.cache.num_used == 0


def test_the_same_tokens_after_waking_and_sleep_is_in_the_book(room: Bedroom) -> None:
    room.submit("before")
    room.run_dry()
    room.sleep(1)
    room.run_dry()
    room.clock.advance(1_000_000)
    woken = room.crank.wake()
    room.clock.advance(77)
    room.submit("after")
    room.run_dry()
    assert room.tokens_of("after") == room.tokens_of("before")
    assert (woken.action, woken.level, woken.changed) == ("wake", 1, True)
    verify_steps(room.records)
    slept_ns = [record.asleep_ns for record in room.records if record.asleep_ns]
    assert slept_ns == [woken.slept_ns + woken.end_ns - woken.begin_ns]
    assert woken.slept_ns > SLEEP_NS + 1_000_000
    (gap,) = [record for record in room.records if record.asleep_ns]
    assert gap.idle_ns >= gap.asleep_ns + 77


def test_too_late_stays_awake(room: Bedroom) -> None:
    room.submit("long", max_tokens=40)
    room.turn()
    said = room.sleep(1, "wait", 2e-6)
    room.turn()
    room.turn()
    room.turn()
    (error,) = said
    assert isinstance(error, SplittimeError)
    assert (error.info.code, error.info.status, error.info.hint) == ("sleep_timeout", 409, "mode=abort ends them")
    assert room.crank.residency.rest.state == AWAKE
    room.submit("next")
    room.run_dry()
    assert room.end_of("next").finish_reason is FinishReason.LENGTH
    assert room.sleeper.calls == []


def test_no_patience_at_all_sleeps_only_if_nothing_runs(room: Bedroom) -> None:
    said = room.sleep(1, "wait", 0.0)
    room.run_dry()
    assert isinstance(said[0], SleepReport)


def test_a_paused_engine_does_not_wait_for_ever(room: Bedroom) -> None:
    room.crank.configure({"paused": True})
    room.submit("waits")
    said = room.sleep(1, "wait", 1.0)
    room.turn()
    assert not room.crank.has_work
    assert room.crank.seconds_to_deadline() is not None
    room.clock.advance(2_000_000_000)
    room.turn()
    assert isinstance(said[0], SplittimeError)


def test_waking_calls_off_what_was_not_asleep_yet(room: Bedroom) -> None:
    room.submit("long", max_tokens=40)
    room.turn()
    said = room.sleep(1)
    woken = room.crank.wake()
    assert (woken.changed, woken.level, woken.parts) == (True, 0, ())
    assert isinstance(said[0], SplittimeError)
    assert said[0].info.code == "sleep_called_off"
    room.run_dry()
    assert room.end_of("long").finish_reason is FinishReason.LENGTH
    assert room.sleeper.calls == []


def test_two_sleeps_and_waking_the_awake(room: Bedroom) -> None:
    assert room.crank.wake() == SleepReport(action="wake", level=0, changed=False)
    room.submit("long", max_tokens=40)
    room.turn()
    first, second = room.sleep(1), room.sleep(1)
    assert isinstance(second[0], SplittimeError)
    assert (second[0].info.code, second[0].info.status) == ("falling_asleep", 409)
    assert first == []
    room.run_dry()
    assert isinstance(first[0], SleepReport)
    assert room.sleep(1) == [SleepReport(action="sleep", level=1, changed=False)]
    deeper = room.sleep(2)
    assert isinstance(deeper[0], SplittimeError)
    assert deeper[0].info.hint == "wake it first"
    assert room.sleeper.calls == ["sleep 1"]


@pytest.mark.parametrize(
    "ask", [(3,), (0,), (True,), (1.0,), (1, "now"), (1, "wait", -1.0), (1, "wait", float("nan")), (1, "wait", "5")]
)
def test_what_cannot_be_asked_is_refused(room: Bedroom, ask: tuple) -> None:
    (error,) = room.sleep(*ask)
    assert isinstance(error, SplittimeError)
    assert error.info.status == 400
    assert error.info.param is not None
    assert room.crank.residency.rest.state == AWAKE


def test_an_engine_without_a_sleeper_says_so() -> None:
    (error,) = Bedroom(can_sleep=False).sleep(1)
    assert isinstance(error, SplittimeError)
    assert error.info.code == "cannot_sleep"


def test_a_sleep_that_fails_leaves_it_awake_with_its_cache(room: Bedroom) -> None:
    room.submit("before")
    room.run_dry()
    room.sleeper.fails = True
    said = room.sleep(1)
    room.run_dry()
    assert isinstance(said[0], EngineError)
    assert room.crank.residency.rest.state == AWAKE
    assert room.scheduler.cache.num_cached > 0
    room.submit("after")
    room.run_dry()
    assert room.tokens_of("after") == room.tokens_of("before")
    assert sum(record.asleep_ns for record in room.records) == 0


def test_a_waking_that_fails_leaves_it_asleep_and_can_be_tried_again(room: Bedroom) -> None:
    room.sleep(2)
    room.run_dry()
    room.sleeper.fails = True
    with pytest.raises(EngineError, match="stays asleep") as caught:
        room.crank.wake()
    info = caught.value.info
    assert (info.code, info.value, info.limit, info.hint) == ("wake_failed", 9, 5, "make room")
    assert room.crank.residency.rest == Rest(ASLEEP, 2)
    room.submit("refused")
    room.run_dry()
    assert room.end_of("refused").finish_reason is FinishReason.ERROR
    room.sleeper.fails = False
    assert room.crank.wake().changed
    room.submit("served")
    room.run_dry()
    assert room.end_of("served").finish_reason is FinishReason.LENGTH


def test_the_loop_answers_and_measures_before_it_sleeps() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    room = Bedroom(measuring=iter([None, Machine(cpu="fake", threads=1)]))
    inbox.put(Sleep(1, SleepAsk(1)), 0)

    def send(message: StepOutput | ConfigureDone | SleepDone | Measured) -> None:
        said.append(message)
        if isinstance(message, SleepDone):
            react[message.call_id]()

    request = make_request("late", 2, 0)

    def meanwhile() -> None:
        inbox.put(Submit(request), 0)
        inbox.put(Wake(2), 0)

    react: dict[int, Callable[[], None]] = {
        1: meanwhile,
        2: lambda: inbox.put(Sleep(3, SleepAsk(9)), 0),
        3: inbox.close,
    }
    run_loop(room.crank, inbox, send)
    assert [type(message) for message in said] == [Measured, SleepDone, SleepDone, StepOutput, SleepDone]
    asleep, woken, late, refused = said[1:]
    assert asleep.rest == Rest(ASLEEP, 1)
    assert woken.rest == Rest()
    assert late.outputs[0].error.code == "asleep"
    assert refused.error.param == "level"
    assert not room.crank.measuring.is_due
    assert (asleep.stats.rest, woken.stats.rest) == (Rest(ASLEEP, 1), Rest())


def test_nobody_stands_still_for_the_ceilings() -> None:
    """They are measured when nothing runs, and not at all for a sleep that is refused."""
    inbox, said = Inbox(), list[FromEngine]()

    def ceilings() -> Iterator[Machine | None]:
        assert not room.scheduler.has_requests
        yield Machine(cpu="fake", threads=1)

    room = Bedroom(measuring=ceilings())
    inbox.put(Submit(make_request("runs", 9, 0)), 0)
    inbox.put(Sleep(1, SleepAsk(9)), 0)
    inbox.put(Sleep(2, SleepAsk(1, "wait", 0.0)), 0)

    def send(message: StepOutput | ConfigureDone | SleepDone | Measured) -> None:
        said.append(message)
        if isinstance(message, SleepDone) and message.call_id == 2:
            inbox.put(Sleep(3, SleepAsk(1)), 0)
        if isinstance(message, SleepDone) and message.call_id == 3:
            inbox.close()

    run_loop(room.crank, inbox, send)
    calls = [message.call_id for message in said if isinstance(message, SleepDone)]
    assert calls == [1, 2, 3]
    kinds = [type(message) for message in said]
    assert kinds[-2:] == [Measured, SleepDone]
    assert kinds.count(Measured) == 1
    assert said[-1].report.forgotten_tokens > 0
    assert said[-1].stats.blocks_cached == 0
