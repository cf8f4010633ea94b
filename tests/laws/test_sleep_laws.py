"""What holds however submits, aborts, sleeps, wakes and steps are mixed, beside the laws of every engine.

A sleep is carried out only when nothing runs; every call for one is answered once; a request that comes while the
engine is not awake ends at once, with the way out; what was forgotten is never read (the fake runner forgets its KV,
so a stale prefix would give other tokens); sleep is in the books as `asleep_ns`, to the nanosecond.
"""

import sys
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_laws import World, asks, configs, events, play, shrink_cache

from splittime.core.errors import ErrorInfo, SplittimeError
from splittime.core.request import FinishReason
from splittime.core.sleep import AWAKE, SleepAsk, SleepReport
from splittime.engine.sleep import REFUSED_CODE

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from fake_sleeper import FakeSleeper

SLEEP_NS = 1_000
modes = st.sampled_from(["wait", "wait", "abort"])
timeouts = st.sampled_from([None, 0.0, 1e-6, 3e-5])
sleeps = st.tuples(st.just("sleep"), st.sampled_from([1, 2]), modes, timeouts)
wakes = st.just(("wake",))


class SleepyWorld(World):
    """A `World` that is put to sleep and woken, and who heard what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sleeper = FakeSleeper(self.engine._runner, SLEEP_NS, self.clock.advance, self.look_around)
        self.engine.bed.sleeper = self.sleeper
        self.answers: list[list[SleepReport | SplittimeError]] = []
        self.errors: dict[str, ErrorInfo | None] = {}
        self.refused: set[str] = set()
        self.slept_ns = 0
        self.unbooked_ns = 0  # before the first step: there is no gap that it could be a part of

    def look_around(self) -> None:
        """Nothing runs, and the runner has no step."""
        assert not self.scheduler.has_requests
        assert self.scheduler.cache.num_used == 0
        assert self.engine._flight is None
        assert self.engine._following is None

    def sleep(self, level: int, mode: str, timeout_s: float | None) -> None:
        heard: list[SleepReport | SplittimeError] = []
        self.answers.append(heard)
        self.engine.sleep(SleepAsk(level, mode, timeout_s), self.clock.now_ns(), heard.append)

    def wake(self) -> None:
        was_asleep, was_awake = self.engine.bed.level > 0, self.engine.bed.rest.state == AWAKE
        report = self.engine.wake()
        assert report.changed != was_awake
        assert (report.level > 0) == was_asleep
        assert self.engine.bed.rest.state == AWAKE
        if was_asleep and self.records:
            self.slept_ns += report.end_ns - report.begin_ns + report.slept_ns
        elif was_asleep:
            self.unbooked_ns += report.end_ns - report.begin_ns + report.slept_ns

    def submit(self, prompt: list[int], max_tokens: int, deadline_ns: int | None, priority: int) -> None:
        if self.engine.bed.rest.state != AWAKE:
            self.refused.add(f"r{len(self.requests)}")
        super().submit(prompt, max_tokens, deadline_ns, priority)

    def step(self) -> None:
        step = self.engine.step

        def listening() -> Any:
            output = step()
            for news in output.outputs if output is not None else ():
                self.errors[news.request_id] = news.error
            return output

        self.engine.step = listening
        super().step()
        self.engine.step = step

    def verify(self) -> None:
        super().verify()
        assert all(len(heard) == 1 for heard in self.answers)
        for request_id in self.refused:
            error = self.errors[request_id]
            assert self.ends[request_id] == [FinishReason.ERROR]
            assert self.tokens[request_id] == []
            assert error is not None
            assert (error.code, error.status) == (REFUSED_CODE, 503)
        told_ns = sum(record.asleep_ns for record in self.records)
        assert told_ns + self.engine.bed.take_slept_ns() == (self.slept_ns if self.records else self.unbooked_ns)


@settings(max_examples=200, deadline=None)
@given(
    configs.map(shrink_cache),
    st.booleans(),
    st.lists(st.one_of(events, events, sleeps, wakes, wakes), min_size=4, max_size=30),
)
def test_laws_hold_with_sleep(config: Any, plans_ahead: bool, script: list[tuple]) -> None:
    world = SleepyWorld(config, plans_ahead)
    for event in script:
        match event:
            case ("sleep", level, mode, timeout_s):
                world.sleep(level, mode, timeout_s)
            case ("wake",):
                world.wake()
            case _:
                play(world, event)
    world.engine.configure({"paused": False})
    world.wake()
    world.run_dry()
    world.verify()


@settings(max_examples=60, deadline=None)
@given(configs.map(shrink_cache), st.booleans(), st.lists(asks, min_size=1, max_size=6), st.integers(0, 12), sleeps)
def test_a_slept_through_script_gives_the_same_tokens(
    config: Any, plans_ahead: bool, asked: list[tuple], steps: int, sleep: tuple
) -> None:
    """The same requests before and after a sleep; the second time nothing is found in the prefix cache."""
    world = SleepyWorld(config, plans_ahead)
    play(world, ("burst", asked))
    play(world, ("steps", steps))
    world.sleep(*sleep[1:])
    world.run_dry()
    hits = world.scheduler.prefix_hit_tokens
    world.wake()
    play(world, ("burst", asked[:1]))
    world.step()
    if world.sleeper.calls:
        assert world.scheduler.prefix_hit_tokens == hits
    world.run_dry()
    world.verify()
