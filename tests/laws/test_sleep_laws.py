"""What holds however submits, aborts, sleeps, wakes and steps are mixed, beside the laws of every engine.

A sleep is carried out only when nothing runs; every call for one is answered once; a request that comes while the
engine is not awake ends at once, with the way out; what was forgotten is never read (the fake runner forgets its KV,
so a stale prefix would give other tokens); sleep is in the books as `asleep_ns`, to the nanosecond.
"""

from dataclasses import replace

from fake_sleeper import FakeSleeper
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_laws import World, asks, configs, events, play, shrink_cache

from benchmarks.fake_runner import FakeRunner
from splittime.core.engine import AWAKE, SleepAsk, SleepReport
from splittime.core.request import FinishReason, Request
from splittime.drive.crank import EngineParts
from splittime.drive.messages import Sleep, SleepDone, Wake
from splittime.drive.residency import REFUSED_CODE
from splittime.scheduler.config import SchedulerConfig

SLEEP_NS = 1_000
modes = st.sampled_from(["wait", "wait", "abort"])
timeouts = st.sampled_from([None, 0.0, 1e-6, 3e-5])
sleeps = st.tuples(st.just("sleep"), st.sampled_from([1, 2]), modes, timeouts)
wakes = st.just(("wake",))


class SleepyWorld(World):
    """A `World` that is put to sleep and woken, and who heard what."""

    def __init__(self, config: SchedulerConfig, plans_ahead: bool) -> None:
        super().__init__(config, plans_ahead)
        self.crank.wake = self.checked_wake  # type: ignore[method-assign]
        self.num_calls = 0
        self.refused: set[str] = set()
        self.slept_ns = 0
        self.unbooked_ns = 0  # before the first step: there is no gap that it could be a part of

    def parts(self, runner: FakeRunner) -> EngineParts:
        self.sleeper = FakeSleeper(runner, SLEEP_NS, self.clock.advance, self.look_around)
        return replace(super().parts(runner), sleeper=self.sleeper)

    def look_around(self) -> None:
        """Nothing runs, and the runner has no step."""
        assert not self.scheduler.has_requests
        assert self.scheduler.cache.num_used == 0
        assert self.engine.num_in_flight == 0

    def sleep(self, level: int, mode: str, timeout_s: float | None) -> None:
        self.num_calls += 1
        self.played.at(self.at_ns, Sleep(self.num_calls, SleepAsk(level, mode, timeout_s)))

    def wake(self) -> None:
        self.num_calls += 1
        self.played.at(self.at_ns, Wake(self.num_calls))

    def checked_wake(self) -> SleepReport:
        residency = self.crank.residency
        was_asleep, was_awake = residency.level > 0, residency.rest.state == AWAKE
        report = residency.wake()
        assert report.changed != was_awake
        assert (report.level > 0) == was_asleep
        assert residency.rest.state == AWAKE
        if was_asleep and self.records:
            self.slept_ns += report.end_ns - report.begin_ns + report.slept_ns
        elif was_asleep:
            self.unbooked_ns += report.end_ns - report.begin_ns + report.slept_ns
        return report

    def before_submit(self, request: Request) -> None:
        if self.crank.residency.rest.state != AWAKE:
            self.refused.add(request.request_id)

    def verify(self) -> None:
        super().verify()
        answered = [answer.call_id for answer in self.played.answers if isinstance(answer, SleepDone)]
        assert sorted(answered) == list(range(1, self.num_calls + 1))
        for request_id, outcome in self.outcomes.items():
            is_refused = outcome.error is not None and "was put to sleep" not in outcome.error.message
            is_refused = is_refused and outcome.error.code == REFUSED_CODE
            assert is_refused == (request_id in self.refused)
            if is_refused:
                assert (outcome.finish_reasons, outcome.token_ids) == ([FinishReason.ERROR], [])
                assert outcome.error.status == 503
        told_ns = sum(record.asleep_ns for record in self.records)
        slept_ns = self.crank.residency.take_slept_ns()
        assert told_ns + slept_ns == (self.slept_ns if self.records else self.unbooked_ns)


@settings(max_examples=200, deadline=None)
@given(
    configs.map(shrink_cache),
    st.booleans(),
    st.lists(st.one_of(events, events, sleeps, wakes, wakes), min_size=4, max_size=30),
)
def test_laws_hold_with_sleep(config: SchedulerConfig, plans_ahead: bool, script: list[tuple]) -> None:
    world = SleepyWorld(config, plans_ahead)
    for event in script:
        match event:
            case ("sleep", level, mode, timeout_s):
                world.sleep(level, mode, timeout_s)
            case ("wake",):
                world.wake()
            case _:
                play(world, event)
    play(world, ("knobs", {"paused": False}))
    world.wake()
    world.call(world.release_all)
    world.run()
    world.verify()


@settings(max_examples=60, deadline=None)
@given(configs.map(shrink_cache), st.booleans(), st.lists(asks, min_size=1, max_size=6), st.integers(0, 12), sleeps)
def test_a_slept_through_script_gives_the_same_tokens(
    config: SchedulerConfig, plans_ahead: bool, asked: list[tuple], steps: int, sleep: tuple
) -> None:
    """The same requests before and after a sleep; the second time nothing is found in the prefix cache."""
    world = SleepyWorld(config, plans_ahead)
    play(world, ("burst", asked))
    play(world, ("steps", steps))
    world.sleep(*sleep[1:])
    world.run()
    hits = world.crank.stats().prefix_hit_tokens
    world.wake()
    play(world, ("burst", asked[:1]))
    world.run()
    if world.sleeper.calls:
        assert world.crank.stats().prefix_hit_tokens == hits
    world.verify()
